"""Engines whose FP8 cache holds spread keys: when they do, what stays the same, and that a real model loses less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.attention.torch_backend import TorchAttention
from octavo.config import EngineConfig
from octavo.engine.build import build_engine, build_from_plan
from octavo.engine.plan import Plan, plan_engine
from octavo.errors import ConfigError
from octavo.interfaces import Step
from octavo.model.operators import spread
from octavo.model.source import resolve_source
from octavo.model.spread import gathered
from octavo.plugins import discover
from octavo.text.tokenizer import Tokenizer
from torch import Tensor

from tests.engine.harness import alone, make_engine, request, run

TEXT = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()


def plan(path: Path, **options: Any) -> Plan:
    config = EngineConfig(model=str(path), **{"dtype": "float32", "num_threads": 1, "max_model_len": 256, **options})
    return plan_engine(config, discover({}))


@pytest.mark.parametrize(
    ("cache", "asked", "spreads"),
    [
        ("auto", "auto", False),
        ("fp8_e4m3", "auto", True),
        ("fp8_e4m3", "always", True),
        ("fp8_e4m3", "never", False),
        ("fp8_e5m2", "auto", True),
        ("fp8_e5m2", "never", False),
        ("bfloat16", "never", False),
    ],
)
def test_keys_of_an_fp8_cache_are_spread_unless_told_not_to(cache: str, asked: Any, spreads: bool, tiny: Path) -> None:
    made = plan(tiny, kv_cache_dtype=cache, kv_cache_spread=asked)
    assert made.spread_keys == spreads
    told = made.explain()["values"]
    assert ("kv_cache_spread" in told) == spreads and all(item["why"] for item in told.values())
    if spreads:
        assert told["kv_cache_spread"]["why"].endswith(
            "; by a kernel a layer of its own: torch has no kernel that turns keys as it stores them"
        )


@pytest.mark.parametrize("widths", [(), (16,)])
def test_explain_tells_what_spreads_keys(widths: tuple[int, ...], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "prologue", lambda *_: None, raising=False)
    monkeypatch.setattr(TorchAttention, "prologue_spreads", lambda _, layer: layer.k_dim in widths, raising=False)
    why = plan(tiny, kv_cache_dtype="fp8_e5m2").explain()["values"]["kv_cache_spread"]["why"]
    by = (
        "the kernel of torch that stores keys"
        if widths
        else "a kernel a layer of its own: torch stores heads of 16 channels as they are"
    )
    assert why.endswith(f"; by {by}")


def test_keys_that_are_not_rounded_to_fp8_are_not_spread(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-spread always: the KV cache is float32.*--kv-cache-dtype fp8_e4m3"):
        plan(tiny, kv_cache_spread="always")


def test_an_exact_cache_of_spread_keys_gives_the_same_tokens(tiny: Path) -> None:
    made = plan(tiny)
    plain, turned = build_from_plan(made), build_from_plan(replace(made, spread_keys=True))
    for prompt in ([9, 30, 77], [9 + i % 200 for i in range(90)]):
        ask = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        want, got = (alone(engine, request(engine, "a", **ask))["a", 0].tokens for engine in (plain, turned))
        assert got == want


def test_chunks_prefix_hits_and_preemption_change_no_token(tiny: Path) -> None:
    """Keys are spread before they are stored, so that what is shared, swapped or computed again is one and the same."""
    options = {"kv_cache_dtype": "fp8_e5m2", "block_size": 8}
    roomy = make_engine(tiny, num_gpu_blocks_override=128, **options)
    tight = make_engine(
        tiny,
        num_gpu_blocks_override=16,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        swap_space=0.01,
        preemption_mode="swap",
        **options,
    )
    asks = [{"prompt": [*range(40, 60), 70 + i], "max_tokens": 40, "ignore_eos": True} for i in range(4)]
    outcomes = run(tight, [request(tight, str(i), **ask) for i, ask in enumerate(asks)])
    assert tight.stats().preemptions > 0
    for i, ask in enumerate(asks):
        assert outcomes[str(i), 0].tokens == alone(roomy, request(roomy, "a", **ask))["a", 0].tokens


def test_scores_of_a_real_model_are_rounded_with_much_less_harm(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M on 1,000 tokens: the variance of the error that e5m2 keys give its scores, weighted by the attention
    that they get (half of what its distribution moves by, in nats), over all layers and heads."""
    seen: list[Tensor] = []

    def write(backend: TorchAttention, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        seen.append(k.float())
        stored(backend, layer, step, k, v)

    def attend(backend: TorchAttention, layer: int, step: Step, q: Tensor, out: Tensor, **more: Any) -> Tensor:
        seen.append(q.float())
        return attended(backend, layer, step, q, out, **more)

    stored, attended = TorchAttention.write, TorchAttention.run
    config = EngineConfig(
        model="demo", device="cpu", num_threads=1, dtype="bfloat16", max_model_len=1024, attention_backend="torch", max_num_seqs=1
    )
    monkeypatch.setattr(TorchAttention, "write", write)
    monkeypatch.setattr(TorchAttention, "run", attend)
    engine = build_engine(config, discover({}))
    ids = Tokenizer.from_source(resolve_source("demo"), config).encode(TEXT[:8000], add_special=False)[:1000]
    run(engine, [request(engine, "a", ids, max_tokens=1)])
    assert len(seen) == 60 and len(seen[0]) == 1000, "not one step of all tokens through 30 layers"
    plain = spreads = 0.0
    for k, q in zip(seen[::2], seen[1::2], strict=True):
        plain += harm(q, k, k.to(torch.float8_e5m2).float())
        spreads += harm(q, k, gathered(spread(k).to(torch.float8_e5m2).float()))
    assert 0.1 * plain < spreads < 0.6 * plain, f"{spreads / 30:.5f} with spread keys, {plain / 30:.5f} without"


def harm(q: Tensor, k: Tensor, rounded: Tensor) -> float:
    """The mean over the last 200 of q [T, 9, 64] of the variance of q . (rounded - k) under softmax(q . k), scaled; keys [T, 3, 64]."""
    queries = q[-200:].view(200, 3, 3, 64) / 8
    right, found = (torch.einsum("tkgd,skd->tkgs", queries, x) for x in (k, rounded))
    error = found - right
    later = torch.arange(len(k)) > torch.arange(len(k) - 200, len(k)).unsqueeze(1)
    weights = right.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
    error = error - (weights * error).sum(-1, keepdim=True)
    return float((weights * error.square()).sum(-1).mean())
