"""The short end of a prompt runs as rows of one token, in the padded buffers that decoding steps are captured with.

`padded` runs what a graph would replay, eagerly: so the tokens can be compared on a CPU with those of plain prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octavo.engine.engine import Engine
from octavo.engine.graphs import bucket_sizes, prompt_sizes
from octavo.engine.rows import MOST_READ_AGAIN, MOST_TOKENS, TokenRows, may_split, token_rows
from octavo.engine.runner import ModelRunner
from octavo.interfaces import KVGroup, KVSpec
from octavo.request import Batch

from tests.engine.harness import alone, make_engine, request, run, unread_tokens_poisoned
from tests.tiny import tiny_llama

PADDED = {"depth": 1, "padded": True}
PREFIX = [*range(30, 30 + 96)]


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    with unread_tokens_poisoned():
        yield


def batch(*rows: tuple[int, int, int, bool], source: list[int] | None = None) -> Batch:
    """Rows of (slot, start, new tokens, whether a token is sampled)."""
    slots, start, new, sample = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Batch(1, slots, start, new, sample.astype(bool), np.array(source or range(len(rows)), np.int32))


def places(step: TokenRows | None) -> list[tuple[int, int]]:
    assert step is not None
    return list(zip(step.slots.tolist(), step.positions.tolist(), strict=True))


def test_a_decoding_step_is_what_it_is() -> None:
    step = token_rows(batch((3, 10, 1, True), (1, 7, 1, True)), split=False)
    assert places(step) == [(3, 10), (1, 7)] and step is not None and step.sampled == 2 and not step.prompts and step.again == 0


def test_the_tokens_that_are_sampled_from_come_first_and_every_token_is_there_once() -> None:
    step = token_rows(batch((3, 10, 1, True), (0, 5, 3, False), (1, 7, 4, True)), split=True)
    assert step is not None and step.sampled == 2 and step.prompts
    assert places(step)[:2] == [(3, 10), (1, 10)]
    assert sorted(places(step)[2:]) == [(0, 5), (0, 6), (0, 7), (1, 7), (1, 8), (1, 9)]
    assert step.again == 2 * 8 + 3 * 11


@pytest.mark.parametrize(("start", "count"), [(0, 2), (2048, 32), (5, 3)])
def test_a_prompt_alone_has_the_rows_that_it_has_beside_others(start: int, count: int) -> None:
    alone, beside = (
        token_rows(batch(*rows), split=True) for rows in ([(7, start, count, True)], [(7, start, count, True), (1, 4, 1, True)])
    )
    assert alone is not None and beside is not None
    assert places(alone) == [place for place in places(beside) if place[0] == 7]
    assert (alone.sampled, alone.prompts, alone.again) == (1, True, beside.again)
    assert alone.slots.dtype == beside.slots.dtype and alone.positions.dtype == beside.positions.dtype


@pytest.mark.parametrize(
    "given",
    [
        batch((0, 0, MOST_TOKENS + 1, True)),
        batch((0, 5, 3, True), (1, 8, 0, True), source=[0, 0]),
    ],
    ids=["too many tokens", "a fork samples from another row"],
)
def test_steps_that_are_left_to_prefill(given: Batch) -> None:
    assert token_rows(given, split=True) is None


def test_without_splitting_only_decoding_steps_qualify() -> None:
    assert token_rows(batch((0, 5, 3, True)), split=False) is None
    assert token_rows(batch((0, 5, 1, False)), split=False) is None


def test_sequences_with_a_state_or_shared_entries_are_not_split() -> None:
    def group(**fields: Any) -> KVGroup:
        return KVGroup(
            0, KVSpec(**{"kind": "full", "heads": 1, "k_dim": 8, "v_dim": 8, "dtype": "float32", **fields}), (0,), 16, 1024
        )

    assert may_split([group(), group(kind="window", window=8), group(kind="latent")])
    assert not may_split([group(), group(kind="state")])
    assert not may_split([group(kind="latent", tokens_per_entry=4)])


@pytest.mark.parametrize("rows", [1, 5, 16, 100, 256, 1024])
def test_sizes_of_prompt_steps_are_few_and_among_those_that_decode(rows: int) -> None:
    sizes = prompt_sizes(rows)
    assert set(sizes) <= set(bucket_sizes(rows)) and len(sizes) <= 5
    assert sizes[-1] == min(rows, MOST_TOKENS)


# ---------------------------------------------------------------- in an engine


def engines(path: Path, **options: Any) -> tuple[Engine, Engine]:
    """One that pads, and one that computes prompts as prompts."""
    given = {"block_size": 16, "num_gpu_blocks_override": 64, "max_num_seqs": 64, **options}
    return make_engine(path, late=PADDED, **given), make_engine(path, **given)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step that was computed as prompts are."""
    seen: list[int] = []
    eager = ModelRunner._eager

    def spy(self: ModelRunner, batch: Batch) -> Any:
        seen.append(batch.num_tokens)
        return eager(self, batch)

    monkeypatch.setattr(ModelRunner, "_eager", spy)
    return seen


def asks(engine: Engine, **fields: Any) -> list[Any]:
    ends = [[7] * 20, [9, 8, 7], list(range(200, 239)), [5]]
    return [
        request(engine, str(i), [*PREFIX, *end], **{"max_tokens": 12, "ignore_eos": True, **fields}) for i, end in enumerate(ends)
    ]


@pytest.mark.parametrize("window", [None, 24])
def test_the_end_of_a_cached_prompt_needs_no_prefill_and_gives_the_same_tokens(
    tmp_path: Path, window: int | None, prefills: list[int]
) -> None:
    more: dict[str, Any] = {}
    if window:
        more = {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "attention_bias": ...,
            "mlp_bias": ...,
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": 1,
        }
    path = tiny_llama(tmp_path / "model", layers=2, **more)
    padded, plain = engines(path)
    run(padded, [request(padded, "warm", PREFIX, max_tokens=1)])
    assert prefills == [96], "more tokens than rows: a prompt as prompts are"
    found = run(padded, asks(padded))
    assert prefills == [96], "every prompt's end was a step of single tokens"
    for i, one in enumerate(asks(plain)):
        assert found[str(i), 0].tokens == alone(plain, one)[str(i), 0].tokens
        assert found[str(i), 0].events[0].cached_tokens == 96


def test_logits_are_those_of_prefill(tiny: Path) -> None:
    """As log-probabilities of sampled tokens, of rows beside each other and of every size of a step."""
    padded, plain = engines(tiny)
    for count in (1, 2, 15, 16, 17, 40, 64):
        prompt = [*range(100, 100 + count)]
        got, right = (
            alone(engine, request(engine, "a", prompt, max_tokens=3, logprobs=5, ignore_eos=True))["a", 0]
            for engine in (padded, plain)
        )
        assert got.tokens == right.tokens
        for one, other in zip(got.events, right.events, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)


def test_sampled_rows_with_every_wish_get_the_tokens_of_prefill(tiny: Path, prefills: list[int]) -> None:
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.2, "seed": 4, "top_k": 30, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 5, "min_tokens": 3, "logprobs": 1},
    ]
    padded, plain = engines(tiny)
    for wish in wishes:
        found = run(padded, asks(padded, **wish))
        for i, one in enumerate(asks(plain, **wish)):
            assert found[str(i), 0].tokens == alone(plain, one)[str(i), 0].tokens


def test_log_probabilities_of_a_prompt_and_forks_still_come_from_prefill(tiny: Path, prefills: list[int]) -> None:
    padded, plain = engines(tiny)
    prompt = [*range(60, 90)]
    values = []
    for engine in (padded, plain):
        done = alone(engine, request(engine, "a", prompt, max_tokens=2, prompt_logprobs=1, ignore_eos=True))["a", 0]
        values.append([entry and entry.logprob for entry in done.events[0].prompt_logprobs or []])
    assert len(values[0]) == len(prompt) and values[0][1:] == pytest.approx(values[1][1:], abs=1e-4)
    several = [
        alone(e, request(e, "b", prompt, max_tokens=4, n=3, seed=1, temperature=1.0, ignore_eos=True)) for e in (padded, plain)
    ]
    assert {key: o.tokens for key, o in several[0].items()} == {key: o.tokens for key, o in several[1].items()}


def test_a_chunk_that_samples_nothing_writes_what_later_chunks_read(tiny: Path, prefills: list[int]) -> None:
    """Chunks smaller than a step's rows, none of which is prefill; and a drawn token never lands in a prompt."""
    padded, plain = engines(tiny, max_num_batched_tokens=10, max_num_seqs=16)
    prompts = [[*range(40 + i, 40 + i + 33)] for i in range(5)]
    found = run(padded, [request(padded, str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)])
    assert prefills == []
    for i, p in enumerate(prompts):
        assert found[str(i), 0].tokens == alone(plain, request(plain, "a", p, max_tokens=8, ignore_eos=True))["a", 0].tokens


def test_a_step_that_would_read_too_much_again_is_prefill(
    tiny: Path, prefills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    padded, _ = engines(tiny)
    run(padded, [request(padded, "warm", PREFIX, max_tokens=1)])
    monkeypatch.setattr("octavo.engine.graphs.MOST_READ_AGAIN", 19 * (96 + 20) - 1)
    run(padded, [request(padded, "a", [*PREFIX, *[7] * 20], max_tokens=1)])
    assert prefills == [96, 20]
    monkeypatch.setattr("octavo.engine.graphs.MOST_READ_AGAIN", 19 * (96 + 20))
    run(padded, [request(padded, "b", [*PREFIX, *[6] * 20], max_tokens=1)])
    assert prefills == [96, 20] and MOST_READ_AGAIN > 1
