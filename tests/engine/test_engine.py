"""The whole engine against transformers, and what must hold after the build."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import pluggy
import pytest
import torch
from octavo.engine.engine import Engine

from tests.engine.harness import assert_empty, make_engine, request, run
from tests.tiny import tiny_llama


@lru_cache(maxsize=8)
def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers chooses, token by token over the whole sequence: no cache of its own to be wrong."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(reference(path)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logprobs(path: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(path)(torch.tensor([ids])).logits[0].double().log_softmax(-1)


WINDOWED = {
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12},
    "qwen2, upper layers slide": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
    },
}


@pytest.mark.parametrize("budget", [7, 64])
def test_greedy_tokens_equal_transformers(tiny: Path, budget: int) -> None:
    engine = make_engine(tiny, block_size=4, num_gpu_blocks_override=64, max_num_batched_tokens=budget)
    prompts = [[9, 30, 77], list(range(60, 83)), [100] * 17]
    outcomes = run(engine, [request(engine, str(i), p, max_tokens=20, ignore_eos=True) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i), 0].tokens == greedy(tiny, prompt, 20)


@pytest.mark.parametrize("block_size", [4, 16])
def test_window_layers_equal_transformers_and_hold_only_their_window(tmp_path: Path, block_size: int) -> None:
    path = tiny_llama(tmp_path / "mistral", layers=2, **WINDOWED["mistral"])
    engine = make_engine(path, block_size=block_size, num_gpu_blocks_override=64, max_num_batched_tokens=8)
    most = 0

    def watch(turn: int) -> None:
        nonlocal most
        most = max(most, engine.allocator.usage().used)

    prompt = [9 + i % 200 for i in range(90)]
    outcomes = run(engine, [request(engine, "a", prompt, max_tokens=40, ignore_eos=True)], between=watch)
    assert outcomes["a", 0].tokens == greedy(path, prompt, 40)
    assert most <= -(-(12 + 8) // block_size) + 1, "the window and one chunk, whatever the context"


def test_full_and_window_layers_live_in_one_pool(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "qwen2", layers=4, **WINDOWED["qwen2, upper layers slide"])
    engine = make_engine(path, block_size=4, num_gpu_blocks_override=120, max_num_batched_tokens=16)
    prompts = [[9 + i % 150 for i in range(70)], list(range(50, 75))]
    outcomes = run(engine, [request(engine, str(i), p, max_tokens=25, ignore_eos=True) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i), 0].tokens == greedy(path, prompt, 25)
    again = run(engine, [request(engine, "again", prompts[0], max_tokens=25, ignore_eos=True)])
    assert again["again", 0].tokens == outcomes["0", 0].tokens
    assert again["again", 0].events[0].cached_tokens > 0, "a hit needs only the window of window layers"


def test_logprobs_of_prompt_and_output_equal_transformers(tiny: Path) -> None:
    engine = make_engine(tiny, block_size=4, num_gpu_blocks_override=64, max_num_batched_tokens=5)
    prompt = list(range(60, 83))
    run(engine, [request(engine, "warm", prompt, max_tokens=2)])  # so that the prefix could be hit: it must not be
    outcome = run(engine, [request(engine, "a", prompt, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)])["a", 0]
    want = logprobs(tiny, prompt + outcome.tokens)
    given = outcome.events[0].prompt_logprobs
    assert given is not None and len(given) == len(prompt) and given[0] is None
    for position, entry in enumerate(given[1:], 1):
        assert entry is not None and entry.token == prompt[position]
        row = want[position - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
        assert entry.top_ids == row.topk(2).indices.tolist()
    values = [v for e in outcome.events for v in e.logprobs or ()]
    for i, entry in enumerate(values):
        row = want[len(prompt) + i - 1]
        assert entry.token == outcome.tokens[i]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert entry.top_ids == row.topk(3).indices.tolist()


def test_hooks_are_never_called_after_the_build(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny, block_size=4, num_gpu_blocks_override=64)

    def raiser(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a hook ran during a step")

    def step() -> list[int]:
        with monkeypatch.context() as patch:  # pytest runs on pluggy too: only around the step
            patch.setattr(pluggy.HookCaller, "__call__", raiser)
            return [t for event in engine.step().events for t in event.tokens]

    engine.add(request(engine, "a", range(50, 60), max_tokens=5, ignore_eos=True))
    tokens: list[int] = []
    while engine.busy:
        tokens += step()
    assert len(tokens) == 5


def test_the_start_up_lines_name_the_cache_and_the_concurrency(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_engine(tiny, block_size=16, num_gpu_blocks_override=40)
    assert "KV cache size: 640 tokens" in caplog.text
    assert "Maximum concurrency for 256 tokens per request: 2.50x" in caplog.text
    assert "is smaller than --max-model-len" not in caplog.text
    make_engine(tiny, block_size=16, num_gpu_blocks=4)
    assert "the KV cache of 64 tokens is smaller than --max-model-len 256" in caplog.text


def test_a_share_of_a_gpu_that_is_given_for_a_cpu_is_told_to_change_nothing(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        without = make_engine(tiny, num_gpu_blocks=None).info.kv_cache_tokens
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert make_engine(tiny, num_gpu_blocks=None, gpu_memory_utilization=0.3).info.kv_cache_tokens == without
    assert "--gpu-memory-utilization 0.3 changes nothing on a CPU: --memory-share" in caplog.text


def test_a_request_that_fails_leaves_its_neighbours_alone(tiny: Path, tmp_path: Path) -> None:
    """A model whose embedding of one token is NaN fails the request that uses it, and nobody else."""
    from safetensors.torch import load_file, save_file

    path = tiny_llama(tmp_path / "nan")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(path, block_size=4, num_gpu_blocks_override=64)
    good = {"prompt": list(range(20, 40)), "max_tokens": 10, "ignore_eos": True}
    outcomes = run(
        engine, [request(engine, "bad", [30, 77, 31], max_tokens=10), request(engine, "good", good.pop("prompt"), **good)]
    )
    assert outcomes["bad", 0].finish == "error" and "not finite" in (outcomes["bad", 0].error or "")
    assert outcomes["good", 0].tokens == greedy(tiny, list(range(20, 40)), 10)
    assert_empty(engine)


def test_dynamic_rope_hits_only_prefixes_of_its_own_variant(tmp_path: Path) -> None:
    """A key rotated under one base is no other request's key."""
    path = tiny_llama(
        tmp_path / "dynamic",
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        max_position_embeddings=64,
    )
    engine = make_engine(path, block_size=4, num_gpu_blocks_override=128)
    prompt = list(range(50, 80))
    short = {"max_tokens": 5, "ignore_eos": True}
    run(engine, [request(engine, "short", prompt, **short)])
    long = run(engine, [request(engine, "long", prompt, max_tokens=150, ignore_eos=True)])["long", 0]
    assert long.events[0].cached_tokens == 0
    again = run(engine, [request(engine, "again", prompt, **short)])["again", 0]
    assert again.events[0].cached_tokens == 28


def test_the_plan_is_what_was_built(tiny: Path) -> None:
    engine: Engine = make_engine(tiny, num_gpu_blocks_override=64, late=1)
    told = json.loads(json.dumps(engine.explain))
    assert "late" in json.dumps(told) and engine.info.num_blocks == 64


def test_the_first_token_of_a_prompt_has_no_log_probability_even_if_it_is_the_only_one(tiny: Path) -> None:
    engine = make_engine(tiny)
    for prompt in ([9], [9, 30]):
        event = run(engine, [request(engine, "a", prompt, max_tokens=1, prompt_logprobs=0)])["a", 0].events[0]
        assert event.prompt_logprobs is not None
        assert event.prompt_logprobs[0] is None and len(event.prompt_logprobs) == len(prompt)
