"""Full and window layers in one pool: a tiny Qwen2 with use_sliding_window and max_window_layers, at 8K context.

The window layers hold the window and what one step adds, whatever the context; a prefix hit needs only the window
of them; and the tokens are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo.cache.geometry import window_blocks
from octavo.engine.engine import Engine

from tests.engine.harness import make_engine, request, run
from tests.tiny import tiny_llama

WINDOW, BLOCK, CHUNK = 64, 16, 128
LENGTH = 8192


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: the first sees everything, two slide."""
    return tiny_llama(
        tmp_path_factory.mktemp("hybrid") / "qwen2",
        layers=3,
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        attention_bias=...,
        mlp_bias=...,
        max_position_embeddings=LENGTH,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    )


def hybrid(path: Path, **options: object) -> Engine:
    given = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "max_model_len": LENGTH}
    return make_engine(path, **{**given, **options})


def windows(engine: Engine) -> list[bool]:
    """Whether each KV group slides."""
    return [group.spec.window is not None for group in engine.allocator._groups]  # type: ignore[attr-defined]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 512, length).tolist()


def test_resident_kv_of_the_window_layers_is_bounded_at_8k_context_and_tokens_are_those_of_transformers(qwen2: Path) -> None:
    engine = hybrid(qwen2, max_num_batched_tokens=512)
    bound = window_blocks(WINDOW, BLOCK, 512)
    assert bound == 37, "blocks of W + chunk tokens, at the worst alignment"
    most = dict.fromkeys(range(len(windows(engine))), 0)

    def watch(_: int) -> None:
        for group in most:
            most[group] = max(most[group], int((engine.allocator.table(group) >= 0).sum()))

    ids = prompt(8000)
    got = run(engine, [request(engine, "long", ids, max_tokens=30, ignore_eos=True)], between=watch)["long", 0].tokens
    assert set(windows(engine)) == {False, True}
    for group, slides in enumerate(windows(engine)):
        if slides:
            assert most[group] <= bound, f"a window group held {most[group]} blocks"
        else:
            assert most[group] >= 8020 // BLOCK, "the full layer holds every token"
    from transformers import AutoModelForCausalLM

    # The whole sequence at once: "eager" would hold 8K x 8K scores of every head and layer.
    model = AutoModelForCausalLM.from_pretrained(qwen2, dtype=torch.float32, attn_implementation="sdpa").eval()
    assert len(got) == 30 and got == chosen(model, ids, got)


def test_many_such_requests_fit_where_full_layers_alone_would_not(qwen2: Path) -> None:
    """The pool is one: what the window layers do not hold, others use."""
    context = -(-LENGTH // BLOCK)
    engine = hybrid(qwen2, num_gpu_blocks_override=context + 2 * 13)
    assert engine.allocator.fits(LENGTH)
    assert engine.allocator.blocks(LENGTH) < 3 * context / 2


@pytest.fixture(scope="module")
def eager(qwen2: Path) -> Iterator[torch.nn.Module]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen2, dtype=torch.float32, attn_implementation="eager")
    yield model.eval()


@pytest.mark.parametrize("length", [40, WINDOW, 200, 1000])
def test_tokens_are_those_of_transformers(qwen2: Path, eager: torch.nn.Module, length: int) -> None:
    engine = hybrid(qwen2)
    ids = prompt(length, seed=length)
    got = run(engine, [request(engine, "a", ids, max_tokens=12, ignore_eos=True)])["a", 0].tokens
    assert len(got) == 12 and got == chosen(eager, ids, got)


@torch.inference_mode()
def chosen(model: torch.nn.Module, ids: list[int], tokens: list[int]) -> list[int]:
    """The model's best token at every place of `tokens`, from one pass over the whole sequence."""
    logits = model(torch.tensor([ids + tokens]), use_cache=False).logits[0]
    return logits[len(ids) - 1 : -1].argmax(-1).tolist()


def test_a_prefix_hit_needs_only_the_window_of_the_window_layers(qwen2: Path, eager: torch.nn.Module) -> None:
    engine = hybrid(qwen2)
    ids = prompt(1024 + 8)
    cold = run(engine, [request(engine, "cold", ids, max_tokens=8, ignore_eos=True)])["cold", 0]
    attached: dict[int, int] = {}
    admit = engine.allocator.admit

    def watched(row: int, *args: object, **options: object) -> int:
        hit = admit(row, *args, **options)  # type: ignore[arg-type]
        for group in range(len(windows(engine))):
            attached[group] = int((engine.allocator.table(group)[row] >= 0).sum())
        return hit

    engine.allocator.admit = watched  # type: ignore[method-assign]
    warm = run(engine, [request(engine, "warm", ids, max_tokens=8, ignore_eos=True)])["warm", 0]
    assert warm.events[0].cached_tokens == 1024
    assert warm.tokens == cold.tokens == chosen(eager, ids, cold.tokens)
    for group, slides in enumerate(windows(engine)):
        assert attached[group] == (WINDOW // BLOCK if slides else 1024 // BLOCK)
