"""4-bit matrix products of quant_awq against cuBLAS bf16 and their floor, on the shapes of Llama-3.1-8B.

Every figure is microseconds: the median over replays of a captured graph that holds the product once for each of several weights
(more bytes than the L2 holds, random values). Run from the repository's root on a GPU: python3 benchmarks/w4a16.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "quant_awq" / "src"))

import torch
import torch.nn.functional as F
from octavo_quant_awq.kernels import cuda_gemm, triton_gemm, wide_gemm
from octavo_quant_awq.kernels.cuda_gemm import Shape, Variant
from octavo_quant_awq.kernels.wide_gemm import WideShape
from octavo_quant_awq.packing import Grouped, unblocked, unpaired
from torch import Tensor

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
BYTES = 400 << 20  # of weights that a figure rotates over
REPLAYS = 7


class Weights:
    """Several random 4-bit matrices [N, K] of one shape, with zero points, as they lie in memory."""

    def __init__(self, k: int, n: int, group: int = 128) -> None:
        self.k, self.n, self.group, self.sub = k, n, group, max(1, 128 // group)
        count = max(2, min(48, BYTES // (k * n // 2)))
        self.words = [torch.randint(-(2**31), 2**31, (k // 128, n, 4, 4), dtype=torch.int32, device="cuda") for _ in range(count)]
        self.scales = [(torch.rand(k // group, n, device="cuda") * 0.01 + 0.005).half() for _ in range(count)]
        self.zeros = [torch.randint(0, 16, (k // group, n), dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.floor = k * n * (0.5 + 3 / group) / 4.25e12 * 1e6

    def __len__(self) -> int:
        return len(self.words)


def measure(op: Callable[[int], Any], count: int) -> float:
    """Microseconds of op(i) in a graph of i = 0 .. count - 1."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(0)
        op(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            op(i)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(times[2:])


def cuda_op(w: Weights, x: Tensor, shape: Shape, dependent: bool = True) -> Callable[[int], Tensor]:
    tiles = cuda_gemm.token_tiles(len(x))
    call = cuda_gemm.function(VARIANT, tiles, shape, x.device, dependent)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: cuda_gemm.launch(call, shape, tiles, w.words[i], w.scales[i], w.zeros[i], x, None, out, 1)


def triton_op(w: Weights, x: Tensor, block_n: int, splits: int, warps: int, stages: int) -> Callable[[int], Tensor]:
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: triton_gemm.multiply(
        w.words[i], w.scales[i], w.zeros[i], x, None, out,
        block_n=block_n, splits=splits, warps=warps, stages=stages, sub=w.sub, group_step=1,
    )  # fmt: skip


def library_op(w: Weights, x: Tensor) -> Callable[[int], Tensor]:
    """All weights made bfloat16, then cuBLAS."""
    made = torch.empty(w.n, w.k, dtype=x.dtype, device="cuda")

    def op(i: int) -> Tensor:
        triton_gemm.dequantise(w.words[i], w.scales[i], w.zeros[i], made, first=0, sub=w.sub, group_step=1)
        return F.linear(x, made)

    return op


def truth(w: Weights, i: int) -> Tensor:
    """float64 [N, K] of matrix i, unpacked by torch."""
    scales, zeros = unpaired(w.scales[i]), unpaired(w.zeros[i])
    return Grouped(unblocked(w.words[i], w.k), scales.T, zeros.T, w.group).dequantised(torch.float64)


def check(op: Callable[[int], Tensor], want: Tensor) -> float:
    got = op(0).double()
    return float((got - want).norm() / want.norm())


def say(*words: Any) -> None:
    print(*words, flush=True)


def candidates(tiles: int) -> list[Shape]:
    """Block shapes worth a try: by warps, by stages, and by how many blocks the registers must leave room for."""
    row_tiles, stages = {1: ((1, 2), (2, 3)), 2: ((1, 2), (2, 3)), 4: ((1, 2), (2,)), 8: ((1, 2), (2,))}[tiles]
    warps = ((1, 4), (1, 8), (2, 2), (2, 4))
    found = []
    for r, (n, k), s in itertools.product(row_tiles, warps, stages):
        found += [Shape(r, n, k, 1, s, blocks, tiles < 4) for blocks in sorted({1, 16 // (n * k)} if tiles < 4 else {1})]
    return found


def compile_all(tiles: tuple[int, ...]) -> None:
    """Compile the sweep's kernels on several threads: it takes longer than timing them."""

    def one(job: tuple[int, Shape]) -> None:
        torch.cuda.set_device(0)
        cuda_gemm.function(VARIANT, *job, torch.device("cuda", 0), True)

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, [(t, s) for t in tiles for s in candidates(t)]))


def sweep(seconds: float) -> None:
    began = time.monotonic()
    compile_all((1, 2))
    say(f"compiled in {time.monotonic() - began:.0f} s")
    for m in (1, 16, 8):
        for name, (k, n) in SHAPES.items():
            w = Weights(k, n)
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = x.double() @ truth(w, 0).T
            results, worst, tiles = [], 0.0, cuda_gemm.token_tiles(m)
            for shape, cluster in itertools.product(candidates(tiles), (1, 2, 4)):
                ctas = -(-n // shape.rows) * cluster
                if not 60 <= ctas <= 4000 or cluster * shape.warps_k > k // 128 or time.monotonic() - began > seconds:
                    continue
                full = replace(shape, cluster=cluster)
                op = cuda_op(w, x, full)
                worst = max(worst, check(op, want))
                results.append((measure(op, len(w)), full))
            results.sort(key=lambda r: r[0])
            say(f"M {m} {name} floor {w.floor:.1f} worst error {worst:.1e} of {len(results)}")
            for t, s in results[:4]:
                say(
                    f"   {t:6.1f}  rt {s.row_tiles} wn {s.warps_n} wk {s.warps_k} c {s.cluster} st {s.stages} mb {s.min_blocks} sums {s.sums:d}"
                )
            if name == "gate_up" and m == 16:
                found = []
                for bn, sp, wp, st in ((128, 8, 4, 2), (128, 4, 8, 2), (64, 4, 4, 3)):
                    op = triton_op(w, x, bn, sp, wp, st)
                    found.append((measure(op, len(w)), check(op, want), bn, sp, wp, st))
                say(f"   triton {min(found)}")


def wide_op(w: Weights, x: Tensor, shape: WideShape) -> Callable[[int], Tensor]:
    made = wide_gemm.functions(VARIANT, shape, x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: wide_gemm.launch(made, shape, w.words[i], w.scales[i], w.zeros[i], x, None, out, 1)


def wide_library_op(w: Weights, x: Tensor) -> Callable[[int], Tensor]:
    """All weights made bfloat16 by wide.cu, then cuBLAS."""
    made = wide_gemm.functions(VARIANT, WideShape(64, 2, 4, 1), x.device)
    whole = torch.empty(w.n, w.k, dtype=x.dtype, device="cuda")

    def op(i: int) -> Tensor:
        wide_gemm.dequantise(made, w.words[i], w.scales[i], w.zeros[i], whole, first=0, rows=w.n, group_step=1)
        return F.linear(x, whole)

    return op


def sweep_wide(seconds: float) -> None:
    """The kernel for many rows, and dequantising, against cuBLAS."""
    began = time.monotonic()
    shapes = [WideShape(t, g, s, 1) for t, g, s in itertools.product((32, 64, 128), (1, 2), (2, 4)) if t * s <= 384]

    def one(shape: WideShape) -> None:
        torch.cuda.set_device(0)
        wide_gemm.functions(VARIANT, shape, torch.device("cuda", 0))

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, shapes))
    say(f"compiled in {time.monotonic() - began:.0f} s")
    for name, (k, n) in SHAPES.items():
        w = Weights(k, n)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(3)]
        weight = truth(w, 0)
        for m in (32, 64, 128, 256, 512, 1024, 2048):
            if time.monotonic() - began > seconds:
                return
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = x.double() @ weight.T
            blas = measure(lambda i, x=x, plain=plain: F.linear(x, plain[i % 3]), 6)
            library = wide_library_op(w, x)
            say(f"{name} M {m}: cuBLAS {blas:.1f}, dequantised {measure(library, len(w)):.1f} error {check(library, want):.1e}")
            results = []
            for shape, cluster in itertools.product(shapes, (1, 2, 4)):
                ctas = -(-n // shape.rows) * cluster * -(-m // shape.tokens)
                if ctas < 60 or shape.tokens >= 2 * m or m > 512 or (cluster > 1 and ctas > 900) or m > 4 * shape.tokens:
                    continue
                op = wide_op(w, x, replace(shape, cluster=cluster))
                results.append((measure(op, len(w)), check(op, want), replace(shape, cluster=cluster)))
            results.sort(key=lambda r: r[0])
            for t, e, s in results[:3]:
                say(f"   {t:6.1f} tokens {s.tokens} groups {s.groups} stages {s.stages} cluster {s.cluster} error {e:.1e}")


NARROW = (1, 4, 8, 16, 32)
WIDE = (32, 64, 128, 256, 512)


def narrow_shape(m: int, k: int, n: int) -> Shape:
    return cuda_gemm.choose_shape(cuda_gemm.token_tiles(m), n, k, clusters=True)


def wide_shapes(m: int, k: int, n: int) -> list[WideShape]:
    """The block that is the default, and other ways to divide the work."""
    default = wide_gemm.choose_shape(m, n, k)
    others = [replace(default, groups=g, cluster=c) for g in (1, 2) for c in (1, 2, 4) if c <= k // 256]
    others += [replace(default, depth=4), replace(default, groups=1, depth=4)]
    return [default, *(o for o in others if o != default)]


def table(seconds: float) -> None:
    """Every product at every number of rows: the defaults, what else was near, cuBLAS. The last lines are the sums of the four."""
    began = time.monotonic()
    jobs: set[tuple[Any, ...]] = set()
    for k, n in SHAPES.values():
        jobs |= {(cuda_gemm.token_tiles(m), replace(narrow_shape(m, k, n), cluster=1)) for m in NARROW}
        jobs |= {(replace(s, cluster=1),) for m in WIDE for s in wide_shapes(m, k, n)}

    def one(job: tuple[Any, ...]) -> None:
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
        if len(job) == 2:
            cuda_gemm.function(VARIANT, *job, device, True)
        else:
            wide_gemm.functions(VARIANT, *job, device)

    with ThreadPoolExecutor(15) as pool:
        list(pool.map(one, jobs))
    say(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s")
    sums: dict[tuple[str, int], float] = {}

    def best(kind: str, m: int, name: str, found: list[tuple[float, str]]) -> None:
        """Prints the default (the first) and the best of the others; the default joins the sum."""
        sums[kind, m] = sums.get((kind, m), 0.0) + found[0][0]
        sums[kind + " best", m] = sums.get((kind + " best", m), 0.0) + min(found)[0]
        say(f"{name} M {m} {kind}: {found[0][0]:.1f}" + (f", best {min(found)[0]:.1f} {min(found)[1]}" if len(found) > 1 else ""))

    for name, (k, n) in SHAPES.items():
        w = Weights(k, n)
        weight = truth(w, 0)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(3)]
        for m in sorted({*NARROW, *WIDE, 1024, 2048}):
            if time.monotonic() - began > seconds:
                say("out of time")
                return
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = x.double() @ weight.T
            try:
                if m in NARROW:
                    op = cuda_op(w, x, narrow_shape(m, k, n))
                    error = check(op, want)
                    best("w4a16", m, name, [(measure(op, len(w)), "")])
                    say(f"   error {error:.1e}" if error > 2.5e-3 else "   right")
                if m in WIDE:
                    found = [
                        (wide_op(w, x, s), f"groups {s.groups} cluster {s.cluster} depth {s.depth}") for s in wide_shapes(m, k, n)
                    ]
                    errors = [check(op, want) for op, _ in found]
                    best("wide", m, name, [(measure(op, len(w)), text) for op, text in found])
                    say(f"   largest error {max(errors):.1e}" if max(errors) > 4e-3 else "   right")
                if m >= 256:
                    best("dequantised", m, name, [(measure(wide_library_op(w, x), len(w)), "")])
                best("cuBLAS", m, name, [(measure(lambda i, x=x, plain=plain: F.linear(x, plain[i % 3]), 6), "")])
            except Exception as error:
                say(f"{name} M {m}: {type(error).__name__}: {error}")
    for m in sorted({*NARROW, *WIDE, 1024, 2048}):
        say(f"M {m}: " + ", ".join(f"{kind} {value:.1f}" for (kind, at), value in sums.items() if at == m))


VARIANT = Variant(True, False, True, 1, False)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try block shapes of w4a16.cu instead")
    parser.add_argument("--sweep-wide", action="store_true", help="try block shapes of wide.cu instead")
    parser.add_argument("--seconds", type=float, default=100, help="stop after this long")
    args = parser.parse_args()
    if args.sweep:
        sweep(args.seconds)
    elif args.sweep_wide:
        sweep_wide(args.seconds)
    else:
        table(args.seconds)
