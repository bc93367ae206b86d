"""A gated MLP's first product on Hopper: cuBLAS and SwiGLU after it, against both in one kernel, under a load as long as a prompt's.

A large product draws all the power that the card may take, and its clock falls within milliseconds: a figure from a cold start is no
step's. So every row is the mean over SECONDS of back-to-back launches but for their first third, over several weights. `layer` is a
layer of Llama-3.1-8B but attention and RoPE, one after the other and once more, so that a drift shows. Also the mean SM clock, where
NVML tells it. Run from the repository's root: python3 benchmarks/gated.py [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "ops_triton" / "src"))

import torch
from octavo_ops_triton.kernels import activation, norm
from octavo_ops_triton.kernels.hopper_product import GatedProduct
from octavo_ops_triton.launch import Launcher
from torch import Tensor

BF16 = torch.bfloat16
SHAPES = {"llama-3.1-8b": (4096, 14336, 4), "qwen3-0.6b": (1024, 3072, 24)}
"""Hidden size, inner size, and weights that take turns, together past the L2."""


def sustained(work: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Microseconds of one call, and the SM clock in MHz (nan where it is not told)."""
    work()
    torch.cuda.synchronize()
    began, spans, clocks = time.perf_counter(), [], []
    while time.perf_counter() - began < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        clocks.append(clock())
        end.synchronize()
        spans.append((time.perf_counter() - began, start.elapsed_time(end)))
    late = [i for i, (at, _) in enumerate(spans) if at > seconds / 3]
    return 1e3 * sum(spans[i][1] for i in late) / len(late), sum(clocks[i] for i in late) / len(late)


def clock() -> float:
    try:
        return float(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):
        return float("nan")


def weights(count: int, n: int, k: int) -> list[Tensor]:
    return [(torch.randn(n, k, device="cuda") * 0.02).to(BF16) for _ in range(count)]


def gates(launch: Launcher, seconds: float) -> None:
    print("| shape | rows | cuBLAS, SwiGLU us | one kernel us | TFLOP/s | times faster |\n|---|---|---|---|---|---|")
    for name, (hidden, inner, count) in SHAPES.items():
        made = weights(count, 2 * inner, hidden)
        products = [GatedProduct(launch, w, "silu") for w in made]

        def apart(x: Tensor, made: list[Tensor] = made) -> None:
            for weight in made:
                activation.silu_mul(launch, torch.mm(x, weight.t()))

        def fused(x: Tensor, products: list[GatedProduct] = products) -> None:
            for product in products:
                product(x)

        for rows in (256, 512, 1024, 2048, 4096, 8192):
            x = torch.randn(rows, hidden, device="cuda").to(BF16)
            two, one = (sustained(partial(way, x), seconds)[0] / count for way in (apart, fused))
            rate = 4 * rows * hidden * inner / one / 1e6
            print(f"| {name} | {rows} | {two:.1f} | {one:.1f} | {rate:.0f} | {two / one:.3f} |", flush=True)


def layers(launch: Launcher, seconds: float) -> None:
    hidden, inner, _ = SHAPES["llama-3.1-8b"]
    rows, (qkv, out, gate, down) = (
        8192,
        (weights(1, *s)[0] for s in ((6144, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))),
    )
    x, residual = torch.randn(rows, hidden, device="cuda").to(BF16), torch.randn(rows, hidden, device="cuda")
    scale, product = torch.rand(hidden, device="cuda"), GatedProduct(launch, gate, "silu")

    def layer(mlp: Callable[[Tensor], Tensor]) -> None:
        torch.mm(norm.add_rms_norm(launch, x, residual, scale, 1e-5)[0], qkv.t())
        h = norm.add_rms_norm(launch, torch.mm(x, out.t()), residual, scale, 1e-5)[0]
        torch.mm(mlp(h), down.t())

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "cuBLAS, SwiGLU": lambda h: activation.silu_mul(launch, torch.mm(h, gate.t())),
        "one kernel": product,
    }
    print("\n| layer without attention, 8192 rows | us | MHz |\n|---|---|---|")
    for _ in range(2):
        for name, mlp in ways.items():
            us, mhz = sustained(partial(layer, mlp), 4 * seconds)
            print(f"| {name} | {us:.0f} | {mhz:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3)
    seconds = parser.parse_args().seconds
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    launch = Launcher(pdl=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        gates(launch, seconds)
        layers(launch, seconds)


if __name__ == "__main__":
    main()
