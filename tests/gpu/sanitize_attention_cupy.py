"""attention_cupy under compute-sanitizer: every feature of the kernels once, in few and small launches.

    python tests/gpu/sanitize_attention_cupy.py CASE...                 checks the results alone, and fills the cache of kernels
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention_cupy.py CASE...

Without a CASE, all of them. The conformance suite has more shapes and takes many times as long under the tools: each pytest case loads
modules of torch, and the oracle runs on the GPU. Here the oracle runs on the CPU. Needs octavo and the plugin to be installed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from octavo.bench.kernel import cuda_device
from octavo.testing.attention import TOLERANCE, AttentionTarget
from octavo.testing.paged import GUARD, Answer, Scene, Shape
from octavo_attention_cupy.provider import CupyOptions, provider

BF16, FP16, E4M3, E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
Work = tuple[int, int, int]
"""Row, first new token, new tokens."""

DECODE: list[Work] = [(0, 0, 1), (1, 128, 1), (2, 699, 1)]
PREFILL: list[Work] = [(3, 0, 40), (4, 0, 300), (5, 380, 140)]
MIXED = DECODE + PREFILL


@dataclass(frozen=True)
class Case:
    """One shape, and the steps that it runs. Rows have as many tokens as their last work ends at."""

    shape: Shape
    work: list[Work]
    prefill: str = "auto"


CROWD: list[Work] = [(i, 37 * i % 90, 1) for i in range(20)]
CASES = {
    # Hopper's prefill kernel: dims 64 and 128, 16-bit caches and FP8 ones whose pages are widened for it.
    "wgmma-bf16": Case(Shape((32, 8), 128, block_size=64, dtype=BF16), MIXED),
    "wgmma-window": Case(Shape((24, 1), 64, block_size=128, dtype=FP16, window=150, sinks=True, softcap=20.0), MIXED),
    "wgmma-e4m3": Case(Shape((8, 2), 128, block_size=16, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7), MIXED, "hopper"),
    "wgmma-e5m2": Case(Shape((4, 4), 64, block_size=8, dtype=FP16, kv_dtype=E5M2, window=150, sinks=True), MIXED, "hopper"),
    # The portable one, and decode at other dims.
    "portable-bf16": Case(Shape((8, 2), 128, block_size=32, dtype=BF16), MIXED, "portable"),
    "portable-e4m3": Case(Shape((16, 4), 64, block_size=64, dtype=BF16, kv_dtype=E4M3, window=150), MIXED, "portable"),
    "dim-256": Case(Shape((8, 2), 256, block_size=64, dtype=BF16, window=150, sinks=True, softcap=20.0), MIXED),
    "dim-80-e5m2": Case(Shape((7, 7), 80, block_size=40, dtype=FP16, kv_dtype=E5M2, k_scale=0.5), MIXED),
    "dims-192-128": Case(Shape((24, 2), 192, v_dim=128, block_size=24, dtype=FP16, kv_dtype=E4M3, window=90), MIXED),
    # Two decode blocks a multiprocessor: see `crowd` in tuning.py.
    "crowd-bf16": Case(Shape((128, 64), 128, block_size=16, dtype=BF16, sinks=True), CROWD),
    "crowd-e4m3": Case(Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=E4M3, softcap=15.0), CROWD),
}


def verify(scene: Scene, work: list[Work], answers: list[Answer]) -> None:
    """As octavo.testing.attention.check, with everything moved to the CPU first: no kernel but the backend's own is worth checking."""
    for row in scene.rows:
        row.q, row.k, row.v = ([x.cpu() for x in values] for values in (row.q, row.k, row.v))
    scene.sinks = [None if x is None else x.cpu() for x in scene.sinks]
    scene._storage = [x.cpu() for x in scene._storage]
    scene.caches = [s[GUARD : s.numel() - GUARD].view(cache.shape) for s, cache in zip(scene._storage, scene.caches, strict=True)]
    limit = TOLERANCE[scene.shape.dtype]
    for item, answer in zip(work, answers, strict=True):
        right = scene.expected(item)
        assert answer.lse is not None and right.lse is not None
        for name, found, wanted, most in (("out", answer.out, right.out, limit), ("lse", answer.lse, right.lse, 2 * limit)):
            error = float(((found.cpu().double() - wanted).abs() / wanted.abs().clamp_min(1)).max())
            assert error <= most, f"{name} of row {item[0]} is off by {error:.2e} (at most {most:.0e})"
    scene.check_untouched()


def prologue(scene: Scene, work: list[Work]) -> None:
    """Norm, RoPE and store of the work's tokens, with values that the step after it replaces."""
    shape, step = scene.shape, scene.step(work)
    (heads, kv_heads), dim, tokens = shape.heads, shape.k_dim, len(step.token_ids)
    sizes = ((tokens, heads + 2 * kv_heads, dim), (heads + kv_heads, dim), (tokens, 1, dim), (tokens, 1, dim))
    qkv, weight, cos, sin = (torch.randn(size).to(getattr(torch, shape.dtype)).cuda() for size in sizes)
    for spread in (False, True):
        scene.backend.prologue(0, step, qkv, weight, 1e-5, cos, sin, spread=spread)  # type: ignore[attr-defined]


def run(case: Case) -> None:
    """Fill the cache up to the work, run it as one step, and compare with float64. (The prologue's results are the suite's to check.)"""
    target = AttentionTarget(provider, cuda_device(), (BF16, FP16), CupyOptions.model_validate({"prefill": case.prefill}))
    scene = target.scene(case.shape, [start + count for _, start, count in case.work])
    scene.fill([start for _, start, _ in case.work])
    if case.shape.v_dim is None:
        prologue(scene, case.work)
    answers = scene.run(case.work, lse=True)
    torch.cuda.synchronize()
    verify(scene, case.work, answers)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    for name in names or CASES:
        started = time.monotonic()
        run(CASES[name])
        print(f"{name}: as float64 says, {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
