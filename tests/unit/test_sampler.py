"""Sampling: distributions against a float64 reference, independence of rows, ends and penalties, broken logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.request import MAX_LOGPROBS, SamplingParams
from octavo.sampling.rng import uniforms
from octavo.sampling.sampler import Sampled, Sampler, prompt_logprobs
from octavo.sampling.truncation import BLOCK, draw, locate, nucleus

EOS = (2, 5)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def table(rows: int, length: int = 64, vocab: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def sampler_of(params: list[dict[str, Any]], vocab: int, *, num_prompt: int = 4, valid: int | None = None) -> Sampler:
    sampler = Sampler(len(params), vocab, valid_vocab=valid)
    for slot, p in enumerate(params):
        sampler.admit(slot, SamplingParams(**{"max_tokens": 1000, **p}), p.get("seed") or slot, EOS, num_prompt)
    return sampler


def sample(
    sampler: Sampler, logits: torch.Tensor, positions: list[int] | np.ndarray, tokens: torch.Tensor | None = None
) -> Sampled:
    rows = len(logits)
    return sampler.sample(logits, np.arange(rows), np.asarray(positions), table(rows) if tokens is None else tokens)


def reference(
    logits: np.ndarray,
    *,
    tokens: np.ndarray,
    num_prompt: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    ban: tuple[int, ...] = (),
) -> np.ndarray:
    """float64 probabilities, written plainly: one row, sorts, no thresholds."""
    x = logits.astype(np.float64)
    for token, value in (logit_bias or {}).items():
        x[token] += value
    x[list(ban)] = -np.inf
    for token in set(tokens.tolist()):
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
        count = int((tokens[num_prompt:] == token).sum())
        x[token] -= frequency_penalty * count + presence_penalty * (count > 0)
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[np.argsort(-p, kind="stable")[top_k:]] = 0
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p * p.sum()]] = 0
    return p / p.sum()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_k over all": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p of many": {"top_p": 0.9, "temperature": 5.0},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.7},
    "bias": {"logit_bias": {3: 2.5, 7: -100.0, 9: 1.0}},
    "everything": {
        "top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "repetition_penalty": 0.8, "frequency_penalty": 0.4,
        "logit_bias": {3: 2.5}, "min_tokens": 200,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab", [40, 700])
def test_tokens_are_drawn_with_the_probabilities_of_a_float64_reference(name: str, vocab: int) -> None:
    """20,000 draws of one row, chi-square over tokens with at least 5 expected; a false alarm is one in 10^5."""
    params, draws = CASES[name], 20_000
    logits, tokens = logits_of(1, vocab), table(1, vocab=40)
    known = 20
    rest = {key: value for key, value in params.items() if key != "min_tokens"}
    ban = EOS if "min_tokens" in params else ()
    expected = reference(logits[0].numpy(), tokens=tokens[0, :known].numpy(), num_prompt=4, ban=ban, **rest)
    rows = 500
    counts = np.zeros(vocab)
    for chunk in range(draws // rows):
        # The same sequence under other seeds: what a row draws depends on seed and position only.
        many = Sampler(rows, vocab)
        for slot in range(rows):
            many.admit(slot, SamplingParams(max_tokens=1000, **params), chunk * rows + slot, EOS, 4)
        got = many.sample(logits.expand(rows, -1).contiguous(), np.arange(rows), np.full(rows, known), tokens.expand(rows, -1))
        counts += np.bincount(got.tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0, "a token that was excluded was drawn"
    enough = expected * draws >= 5
    if enough.sum() < 2:
        assert counts[enough].sum() >= 0.99 * draws
        return
    seen = np.append(counts[enough], counts[~enough].sum())
    wanted = np.append(expected[enough], expected[~enough].sum()) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal.
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)) if freedom else 0.0
    assert z < 4.3


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_truncation_keeps_is_what_the_reference_keeps(data: st.DataObject) -> None:
    """Also with ties, which are kept together; and for the largest vocabulary that needs the long way."""
    vocab = data.draw(st.sampled_from([3, 40, 257, 1000]))
    scale = data.draw(st.sampled_from([0.0, 0.2, 2.0, 20.0]))
    logits = logits_of(1, vocab, data.draw(st.integers(0, 99)), scale)
    if data.draw(st.booleans()):
        logits = logits.round()
    top_p = data.draw(st.sampled_from([0.01, 0.3, 0.9, 0.999]))
    x = torch.full((1, -(-vocab // BLOCK) * BLOCK), -torch.inf)
    x[:, :vocab] = logits - logits.max()
    threshold = nucleus(x, torch.tensor([top_p], dtype=torch.float64))
    kept = (x >= threshold[:, None])[0, :vocab].numpy()
    p = x[0, :vocab].double().exp().numpy()
    total, eps = p.sum(), 1e-6
    assert p[kept].sum() >= top_p * total * (1 - eps), "it reaches top_p"
    least = p[kept].min()
    assert p[p > least].sum() < top_p * total * (1 + eps), "and would not without its least likely tokens"


@pytest.mark.parametrize("vocab", [40, 257, 3001])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_token_whatever_shares_its_batch(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        params = [{**case, "seed": 11 + i, "logprobs": i % 3} for i, case in enumerate(CASES.values())]
        params += [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"top_p": 0.0}, {"top_k": 1}]
        rows = len(params)
        sampler, tokens = sampler_of(params, vocab), table(rows)
        logits = logits_of(rows, vocab).bfloat16().float()  # coarse values: many ties
        positions = 10 + np.arange(rows)
        whole = sampler.sample(logits, np.arange(rows), positions, tokens)
        entries = whole.logprobs()
        generator = np.random.default_rng(0)
        for size in (1, 1, 1, 2, 3, rows // 2, rows - 1, rows):
            for _ in range(4):
                some = generator.permutation(rows)[:size]
                part = sampler.sample(logits[some], some, positions[some], tokens)
                assert part.tokens.tolist() == whole.tokens[some].tolist()
                for at, row in enumerate(some.tolist()):
                    assert part.logprobs().get(at) == entries.get(row), "bit for bit"
    finally:
        torch.set_num_threads(1)


def test_a_seeded_row_repeats_itself_and_its_neighbours_seed_gives_another_stream() -> None:
    logits = logits_of(1, 1000).expand(2, -1).contiguous()
    first, second = [], []
    sampler = sampler_of([{"seed": 7}, {"seed": 8}], 1000)
    for position in range(4, 44):
        got = sample(sampler, logits, [position, position]).tokens.tolist()
        first.append(got[0])
        second.append(got[1])
    again = [sample(sampler_of([{"seed": 7}], 1000), logits[:1], [position]).tokens.item() for position in range(4, 44)]
    assert first == again and first != second
    assert not any(first[:20] == second[shift : shift + 20] for shift in range(20)), "nor a shifted copy"


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_int64_is_a_seed(seed: int) -> None:
    assert not sample(sampler_of([{"seed": seed}], 50), logits_of(1, 50), [5]).failed.any()


def test_uniforms_are_in_range_spread_evenly_and_unrelated_across_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert values.min() >= 0.0 and values.max() < 1.0 and len(np.unique(values)) == values.size
    counts = np.histogram(values, 50, (0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 110  # chi-square, 49 degrees of freedom
    grid = values.reshape(200, 200)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("kept", [[0], [511], [255, 256], [300], [0, 511]])
def test_the_ends_of_the_range_never_pick_a_token_of_probability_zero(uniform: float, kept: list[int]) -> None:
    x = torch.full((1, 512), -torch.inf)
    x[0, kept] = 0.0
    assert draw(x, torch.tensor([uniform], dtype=torch.float64)).item() in kept


@pytest.mark.parametrize("target", [0.0, 0.75, 0.75 + 1e-9, 1.0])
def test_rounding_up_to_the_whole_sum_still_points_at_a_part_above_zero(target: float) -> None:
    parts = torch.tensor([[0.0, 0.75, 0.0, 0.25, 0.0]], dtype=torch.float64)
    place, rest = locate(parts.cumsum(-1), torch.tensor([target], dtype=torch.float64), parts)
    assert place.item() == (1 if target < 0.75 else 3) and 0.0 <= rest.item() <= 1.0


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-7])
def test_a_vanishing_temperature_is_greedy_and_stays_finite(temperature: float) -> None:
    logits = logits_of(1, 100)
    got = sample(sampler_of([{"temperature": temperature}], 100), logits, [5])
    assert got.tokens.tolist() == logits.argmax(-1).tolist() and not got.failed.any()


def test_a_huge_temperature_is_uniform_over_what_may_be_chosen() -> None:
    got = {
        sample(sampler_of([{"temperature": 1e300, "seed": s, "min_tokens": 9}], 8), logits_of(1, 8), [5]).tokens.item()
        for s in range(200)
    }
    assert got == {0, 1, 3, 4, 6, 7}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 0.0}])
def test_keeping_one_token_keeps_the_largest(params: dict[str, Any]) -> None:
    logits = logits_of(6, 300)
    got = sample(sampler_of([params] * 6, 300), logits, np.full(6, 9))
    assert got.tokens.tolist() == logits.argmax(-1).tolist()


# ---------------------------------------------------------------- ends and penalties


def test_min_tokens_masks_every_end_of_the_union_and_the_users_until_it_is_reached() -> None:
    logits = torch.zeros((1, 12))
    logits[0, [2, 5, 9]] = torch.tensor([50.0, 40.0, 30.0])
    sampler = sampler_of([{"temperature": 0.0, "min_tokens": 10, "stop_token_ids": [5, 5, 9]}], 12)
    chosen = [sample(sampler, logits, [4 + count]).tokens.item() for count in (0, 5, 9, 10, 11)]
    assert [token in (2, 5, 9) for token in chosen] == [False, False, False, True, True]


def test_ignore_eos_leaves_the_models_ends_alone_and_still_masks_the_users() -> None:
    logits = torch.zeros((1, 12))
    logits[0, [9, 2]] = torch.tensor([50.0, 40.0])
    sampler = sampler_of([{"temperature": 0.0, "min_tokens": 10, "ignore_eos": True, "stop_token_ids": [9]}], 12)
    assert sample(sampler, logits, [4]).tokens.item() == 2


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_repetition_counts_prompt_and_output_the_others_output_only(name: str) -> None:
    tokens = torch.tensor([[1, 1, 2, 0, 3, 3, 3, 4, 0, 0]], dtype=torch.int32)  # prompt 1 1 2 0, output 3 3 3 4, rest unused
    logits = torch.full((1, 8), 2.0)
    logits[0, 7] = -2.0
    sampler = sampler_of([{name: 1.5}], 8)
    edited = logits.clone()
    sampler._edit(edited, np.array([0]), np.array([8]), np.array([False]), tokens)
    change = (edited - logits)[0].tolist()
    third = 2.0 / 1.5 - 2.0
    expected = {
        "repetition_penalty": [third, third, third, third, third, 0, 0, 0],
        "presence_penalty": [0, 0, 0, -1.5, -1.5, 0, 0, 0],
        "frequency_penalty": [0, 0, 0, -4.5, -1.5, 0, 0, 0],
    }[name]
    assert change == pytest.approx(expected)


def test_penalties_after_a_recompute_are_those_before_it() -> None:
    """A preempted row enters another slot with its output in the table: nothing was counted along."""
    tokens = table(2, vocab=30)
    tokens[1] = tokens[0]
    logits = logits_of(1, 30)
    sampler = Sampler(2, 30)
    for slot in (0, 1):
        sampler.admit(slot, SamplingParams(temperature=0.0, frequency_penalty=1.0, max_tokens=99), 0, EOS, 4)
    run = [sampler.sample(logits, np.array([slot]), np.array([20]), tokens).tokens.item() for slot in (0, 1)]
    assert run[0] == run[1]


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_distribution_with_rank_and_the_k_best(k: int) -> None:
    vocab = 300
    params = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 2.0, "logit_bias": {7: 30.0}, "logprobs": k}
    logits = logits_of(3, vocab)
    got = sample(sampler_of([params, {}, params], vocab), logits, [9, 9, 9])
    entries = got.logprobs()
    assert sorted(entries) == [0, 2]
    for row, entry in entries.items():
        exact = torch.log_softmax(logits[row].double(), -1)
        assert entry.token == got.tokens[row] == 7, "the bias decides; the value is the raw one all the same"
        assert entry.logprob == pytest.approx(exact[7].item(), abs=1e-5)
        assert entry.rank == int((exact > exact[7]).sum()) + 1
        best = exact.topk(k)
        assert entry.top_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_vocabulary_smaller_than_the_k_best_gives_all_of_it() -> None:
    entry = sample(sampler_of([{"logprobs": MAX_LOGPROBS}], 6), logits_of(1, 6), [5]).logprobs()[0]
    assert sorted(entry.top_ids) == list(range(6))


def test_best_of_rows_get_their_value_though_nobody_asked() -> None:
    entries = sample(sampler_of([{"best_of": 2}, {"n": 2}], 50), logits_of(2, 50), [5, 5]).logprobs()
    assert list(entries) == [0] and entries[0].top_ids == []


def test_prompt_logprobs_are_the_targets_own() -> None:
    logits, targets = logits_of(7, 90), torch.arange(7) * 3
    exact = torch.log_softmax(logits.double(), -1)
    for row, entry in enumerate(prompt_logprobs(logits, targets, 2)):
        assert entry.token == row * 3 and entry.logprob == pytest.approx(exact[row, row * 3].item(), abs=1e-5)
        assert entry.top_ids == exact[row].topk(2).indices.tolist()


# ---------------------------------------------------------------- ids as indices


@pytest.mark.parametrize("id", [40, 41, 2**31, 2**40])
def test_an_id_outside_the_vocabulary_changes_no_neighbours_row(id: int) -> None:
    """The server refuses such ids; the sampler must not trust that."""
    logits = torch.zeros((2, 40))
    logits[1, 0] = 9.0
    before = logits.clone()
    params = {"temperature": 0.0, "min_tokens": 50, "stop_token_ids": [id, id + 1], "logit_bias": {id: 100.0}}
    got = sample(sampler_of([params, {"temperature": 0.0, "min_tokens": 1}], 40), logits, [4, 4])
    assert got.tokens[1] == 0 and not got.failed.any()
    assert torch.equal(logits, before), "the caller's logits are left as they were"


def test_a_slot_that_is_used_again_keeps_nothing_of_its_last_row() -> None:
    sampler = sampler_of([{"logit_bias": {3: 100.0}, "min_tokens": 50, "logprobs": 5, "frequency_penalty": 2.0, "top_k": 2}], 20)
    sampler.admit(0, SamplingParams(temperature=0.0), 0, EOS, 4)
    logits = torch.zeros((1, 20))
    logits[0, 2] = 1.0
    got = sample(sampler, logits, [4])
    assert got.tokens.item() == 2 and got.logprobs() == {}


# ---------------------------------------------------------------- broken logits, padded vocabularies


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.9, "logprobs": 2}, {"top_k": 5, "frequency_penalty": 1.0}]
)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = logits_of(4, 300)
    rows = [{**params, "seed": 9 + i} for i in range(4)]
    sound = sample(sampler_of(rows, 300), logits, np.full(4, 9))
    broken = logits.clone()
    broken[1, 17] = bad
    broken[3] = bad
    got = sample(sampler_of(rows, 300), broken, np.full(4, 9))
    assert got.failed.tolist() == [False, True, False, True]
    assert got.tokens[[0, 2]].tolist() == sound.tokens[[0, 2]].tolist()
    assert int(got.tokens.min()) >= 0 and int(got.tokens.max()) < 300
    assert set(got.logprobs()) == ({0, 2} if "logprobs" in params else set())


def test_a_row_with_every_token_excluded_fails_alone() -> None:
    params = [{"min_tokens": 9, "stop_token_ids": list(range(8)), **extra} for extra in ({}, {"temperature": 0.0})]
    got = sample(sampler_of([*params, {}], 8), logits_of(3, 8), [4, 4, 4])
    assert got.failed.tolist() == [True, True, False]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 50.0}, {"top_k": 40}, {"logit_bias": {400: 100.0}}])
def test_ids_past_the_tokenizer_are_never_chosen(params: dict[str, Any]) -> None:
    logits = logits_of(50, 512)
    logits[:, 300:] += 20.0
    logits[:, 400] += 50.0
    got = sample(sampler_of([{**params, "seed": i, "logprobs": 5} for i in range(50)], 512, valid=300), logits, np.full(50, 9))
    assert int(got.tokens.max()) < 300 and not got.failed.any()
    assert all(max(entry.top_ids) < 300 for entry in got.logprobs().values())
