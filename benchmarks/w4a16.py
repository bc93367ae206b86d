"""4-bit matrix products of quant_awq against cuBLAS bf16 and their floor, on the shapes of Llama-3.1-8B.

Every figure is microseconds: the median over replays of a captured graph that holds the product for each of several weights in turn
(more bytes than the L2 holds, random values), for at least a millisecond, so that the start of the graph counts little. Before each figure
of the table the GPU rests: after products of thousands of rows its clock stays low for a while (1.6 GHz instead of 2), and few rows would pay for it.
Run from the repository's root on a GPU: python3 benchmarks/w4a16.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "quant_awq" / "src"))

import torch
import torch.nn.functional as F
from octavo.bench.device_time import graph_time
from octavo_quant_awq.kernels import (
    cuda_gemm,
    library,
    narrow_gemm,
    ring_gemm,
    split_gemm,
    stationary_gemm,
    triton_gemm,
    warpgroup_gemm,
)
from octavo_quant_awq.kernels.cuda_gemm import Shape
from octavo_quant_awq.kernels.limits import NARROW_ROWS, RING_ROWS, SPLIT_ROWS, STATIONARY_ROWS, WARPGROUP_ROWS
from octavo_quant_awq.kernels.narrow_gemm import NarrowShape
from octavo_quant_awq.kernels.ring_gemm import RingShape
from octavo_quant_awq.kernels.split_gemm import SplitShape
from octavo_quant_awq.kernels.stationary_gemm import StationaryShape
from octavo_quant_awq.kernels.variant import Variant
from octavo_quant_awq.kernels.warpgroup_gemm import WarpgroupShape
from octavo_quant_awq.packing import Grouped, unblocked, unpaired
from torch import Tensor

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
ROWS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BYTES = 400 << 20  # of weights that a figure rotates over
REPLAYS = 7
LENGTH = 1000.0  # microseconds that a graph takes at least
REST = 0.15  # seconds before each figure
VARIANT = Variant(True, False, True, 1, False)
EXACT, ROUNDED = 2.6e-3, 4e-3  # largest errors: of a rounded result, and with rounded weights

Op = Callable[[int], Tensor]


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

    def tensors(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.words[i], self.scales[i], self.zeros[i]

    def truth(self, i: int) -> Tensor:
        """float64 [N, K] of matrix i, unpacked by torch."""
        scales, zeros = unpaired(self.scales[i]), unpaired(self.zeros[i])
        return Grouped(unblocked(self.words[i], self.k), scales.T, zeros.T, self.group).dequantised(torch.float64)


def measure(op: Op, count: int, rest: float = 0) -> float:
    """Microseconds of op(i) in a graph of i = 0 .. count - 1, as many times over as `LENGTH` asks for, after `rest` seconds."""
    torch.cuda.synchronize()
    time.sleep(rest)
    rounds = math.ceil(LENGTH / (count * graph_time(op, count, 1)))
    return graph_time(lambda i: op(i % count), rounds * count, REPLAYS)


def older_op(w: Weights, x: Tensor, shape: Shape) -> Op:
    call = older_function(len(x), shape)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: cuda_gemm.launch(call, shape, cuda_gemm.token_tiles(len(x)), w.tensors(i), x, None, out, 1)


def older_function(m: int, shape: Shape) -> Any:
    return cuda_gemm.function(VARIANT, cuda_gemm.token_tiles(m), shape, torch.device("cuda", 0), True)


def narrow_op(w: Weights, x: Tensor, shape: NarrowShape) -> Op:
    call = narrow_gemm.function(VARIANT, narrow_gemm.held(len(x)), shape, w.k, x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: narrow_gemm.launch(call, shape, w.tensors(i), x, None, out, 1)


def split_op(w: Weights, x: Tensor, shape: SplitShape) -> Op:
    call = split_gemm.function(VARIANT, shape, w.k, x.device)
    meeting = split_gemm.Meeting(w.n, [shape], x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: split_gemm.launch(call, shape, meeting, w.tensors(i), x, None, out, 1)


def warpgroup_op(w: Weights, x: Tensor, shape: WarpgroupShape) -> Op:
    call = warpgroup_gemm.function(VARIANT, shape, x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: warpgroup_gemm.launch(call, shape, w.tensors(i), x, None, out, 1)


def ring_op(w: Weights, x: Tensor, shape: RingShape) -> Op:
    call = ring_gemm.function(VARIANT, shape, x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: ring_gemm.launch(call, shape, w.tensors(i), x, None, out, 1)


def library_op(w: Weights, x: Tensor) -> Op:
    """All weights made bfloat16, then cuBLAS."""
    call = library.function(VARIANT, x.device)
    whole = torch.empty(w.n, w.k, dtype=x.dtype, device="cuda")

    def op(i: int) -> Tensor:
        library.dequantise(call, *w.tensors(i), whole, first=0, rows=w.n, group_step=1)
        return F.linear(x, whole)

    return op


def triton_op(w: Weights, x: Tensor) -> Op:
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    tuning = triton_gemm.choose(len(x), w.n, w.k)
    return lambda i: triton_gemm.multiply(*w.tensors(i), x, None, out, sub=w.sub, group_step=1, **tuning)


def older_shape(m: int, n: int, k: int) -> Shape:
    return cuda_gemm.choose_shape(cuda_gemm.token_tiles(m), n, k, clusters=True)


def narrow_shape(m: int, n: int, k: int) -> NarrowShape | None:
    return narrow_gemm.choose_shape(m, n, k, VARIANT) if m <= NARROW_ROWS else None


def stationary_op(w: Weights, x: Tensor, shape: StationaryShape) -> Op:
    call = stationary_gemm.function(VARIANT, shape, x.device)
    out = torch.empty(len(x), w.n, dtype=x.dtype, device="cuda")
    return lambda i: stationary_gemm.launch(call, shape, w.tensors(i), x, None, out, 1)


def stationary_shape(m: int, n: int, k: int) -> StationaryShape | None:
    return stationary_gemm.choose_shape(m, n, k, VARIANT) if STATIONARY_ROWS[0] <= m <= STATIONARY_ROWS[1] else None


def split_shape(m: int, n: int, k: int) -> SplitShape | None:
    return split_gemm.choose_shape(m, n, k, VARIANT) if SPLIT_ROWS[0] <= m <= SPLIT_ROWS[1] else None


def ring_shape(m: int, n: int, k: int) -> RingShape | None:
    wanted = NARROW_ROWS < m <= RING_ROWS and not warpgroup_gemm.fills(n)
    return ring_gemm.choose_shape(m, n, k, VARIANT) if wanted else None


def say(*words: Any) -> None:
    print(*words, flush=True)


def compile_all(jobs: Sequence[Callable[[], Any]]) -> None:
    """Compile on several threads: it takes longer than timing."""

    def one(job: Callable[[], Any]) -> None:
        torch.cuda.set_device(0)
        job()

    began = time.monotonic()
    with ThreadPoolExecutor(15) as pool:
        list(pool.map(one, jobs))
    say(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s")


def kernels(m: int, n: int, k: int) -> dict[str, Callable[[Weights, Tensor], tuple[Op, float]]]:
    """What may serve m rows, by name, with the largest error that is right."""
    found: dict[str, Callable[[Weights, Tensor], tuple[Op, float]]] = {}
    standing = stationary_shape(m, n, k)
    if standing is not None:
        found["stationary"] = lambda w, x: (stationary_op(w, x, standing), EXACT)
    parts = split_shape(m, n, k)
    if parts is not None:
        found["split"] = lambda w, x: (split_op(w, x, parts), EXACT)
    few = narrow_shape(m, n, k)
    if few is not None:
        found["narrow"] = lambda w, x: (narrow_op(w, x, few), EXACT)
    if m <= 16:
        found["w4a16"] = lambda w, x: (older_op(w, x, older_shape(m, n, k)), EXACT)
    ring = ring_shape(m, n, k)
    if ring is not None:
        found["ring"] = lambda w, x: (ring_op(w, x, ring), EXACT)
    elif m <= WARPGROUP_ROWS:
        found["warpgroup"] = lambda w, x: (warpgroup_op(w, x, warpgroup_gemm.choose_shape(m, n, k)), ROUNDED)
    if m >= 1024:
        found["dequantised"] = lambda w, x: (library_op(w, x), ROUNDED)
    if m in (1, 16):
        found["triton"] = lambda w, x: (triton_op(w, x), EXACT)
    return found


TAKEN = ("split", "stationary", "narrow", "ring", "warpgroup", "dequantised")
"""What quant_awq takes on Hopper: the first of these that serves a product."""


def table(seconds: float, counts: Sequence[int]) -> None:
    """Every product at every number of rows by every kernel at its default shape, and cuBLAS. The last lines are the sums of the four: `served`
    by the kernel that the plugin takes for each, and by every kernel that can serve all of them."""
    began, device = time.monotonic(), torch.device("cuda", 0)
    few = {(m, older_shape(m, n, k)) for k, n in SHAPES.values() for m in counts if m <= 16}
    fewest = {(narrow_gemm.held(m), s, k) for k, n in SHAPES.values() for m in counts if (s := narrow_shape(m, n, k)) is not None}
    more = {warpgroup_gemm.choose_shape(m, n, k) for k, n in SHAPES.values() for m in counts if m <= WARPGROUP_ROWS}
    ring = {s for k, n in SHAPES.values() for m in counts if (s := ring_shape(m, n, k)) is not None}
    standing = {s for k, n in SHAPES.values() for m in counts if (s := stationary_shape(m, n, k)) is not None}
    parts = {(s, k) for k, n in SHAPES.values() for m in counts if (s := split_shape(m, n, k)) is not None}
    compile_all(
        [lambda job=job: older_function(*job) for job in few]  # type: ignore[misc]
        + [lambda m=m, s=s, k=k: narrow_gemm.function(VARIANT, m, s, k, device) for m, s, k in fewest]  # type: ignore[misc]
        + [lambda s=s: warpgroup_gemm.function(VARIANT, s, device) for s in more]  # type: ignore[misc]
        + [lambda s=s: ring_gemm.function(VARIANT, s, device) for s in ring]  # type: ignore[misc]
        + [lambda s=s: stationary_gemm.function(VARIANT, s, device) for s in standing]  # type: ignore[misc]
        + [lambda s=s, k=k: split_gemm.function(VARIANT, s, k, device) for s, k in parts]  # type: ignore[misc]
        + [lambda: library.function(VARIANT, device)]
    )
    times: dict[tuple[str, int], list[float]] = {}
    for name, (k, n) in SHAPES.items():
        w = Weights(k, n)
        weight = w.truth(0)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(3)]
        for m in counts:
            if time.monotonic() - began > seconds:
                say("out of time")
                return
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = x.double() @ weight.T
            line, ways = [], kernels(m, n, k)
            taken = next(kernel for kernel in TAKEN if kernel in ways)
            for kernel, make in ways.items():
                op, bound = make(w, x)
                error = float((op(0).double() - want).norm() / want.norm())
                time_us = measure(op, len(w), REST)
                for sort in (kernel, "served") if kernel == taken else (kernel,):
                    times.setdefault((sort, m), []).append(time_us)
                line.append(f"{kernel} {time_us:.1f}" + ("" if error < bound else f" WRONG: error {error:.1e}"))
            blas = measure(lambda i, x=x, plain=plain: F.linear(x, plain[i % 3]), 6, REST)  # type: ignore[misc]
            times.setdefault(("cuBLAS", m), []).append(blas)
            say(f"{name} M {m} (floor {w.floor:.1f}): {', '.join(line)}, cuBLAS {blas:.1f}")
    sums = {key: sum(found) for key, found in times.items() if len(found) == len(SHAPES)}
    for m in counts:
        blas = sums["cuBLAS", m]
        say(f"M {m}: " + ", ".join(f"{kernel} {v:.1f} ({blas / v:.2f})" for (kernel, at), v in sums.items() if at == m))


def narrow_candidates(m: int, n: int, k: int) -> list[NarrowShape]:
    """Block shapes of narrow.cu worth a try."""
    default = narrow_shape(m, n, k)
    if default is None:
        return []
    found = {default}
    warps = (4, 6, 8, 12, 16) if default.warps_n == 1 else (1, 2, 3, 4)
    for warps_k, stages in itertools.product(warps, (1, 2, 3, 4)):
        shape = replace(default, warps_k=warps_k, stages=stages)
        if shape.taken(VARIANT, narrow_gemm.held(m), k) <= narrow_gemm.MOST:
            found.add(shape)
    return sorted(found, key=str)


def ring_candidates(m: int, n: int, k: int) -> list[RingShape]:
    """Divisions of ring.cu worth a try; none where it serves nothing."""
    default = ring_shape(m, n, k)
    if default is None:
        return []
    found = {default}
    for parts, stages in itertools.product((1, 2, 3, 4), range(2, 13)):
        shape = replace(default, parts=parts, stages=stages)
        if stages % parts == 0 and default.warps * parts <= 16 and 80 << 10 < shape.shared(VARIANT) < 112 << 10:
            found.add(shape)
    return sorted(found, key=str)


def warpgroup_candidates(m: int, n: int, k: int) -> list[WarpgroupShape]:
    """Block shapes of warpgroup.cu worth a try."""
    default = warpgroup_gemm.choose_shape(m, n, k)
    found = {default}
    tokens = [default.tokens] if m <= 64 else [128, 256]
    for t, tiles, groups, cluster in itertools.product(tokens, (1, 2), (1, 2, 3, 4), (1, 2, 4, 8)):
        shape = replace(default, tokens=t, tiles=tiles, groups=groups, cluster=cluster, stages=4 if t <= 128 else 3)
        if t >= 128:
            shape = replace(shape, registers=232 if tiles * t >= 256 else 0)
        blocks = -(-n // shape.rows) * cluster * -(-m // t)
        if tiles * t > 256 or (t >= 128 and groups != 2) or (groups > 2 and tiles > 1) or 4 * cluster > k // 128:
            continue
        if t < 2 * m + 16 and shape.shared(VARIANT) < 226 << 10 and blocks >= 60 and (cluster == 1 or blocks <= 600):
            found.add(shape)
    return sorted(found, key=str)


def sweep(seconds: float, rows: Sequence[int]) -> None:
    """Block shapes against each other, for each product the fastest first."""
    began, device = time.monotonic(), torch.device("cuda", 0)
    jobs: dict[Any, Callable[[], Any]] = {}
    for k, n in SHAPES.values():
        for m in rows:
            if m <= NARROW_ROWS:
                for s in narrow_candidates(m, n, k):
                    job = (VARIANT, narrow_gemm.held(m), s, k, device)
                    jobs[job] = lambda job=job: narrow_gemm.function(*job)  # type: ignore[misc]
            for ring in ring_candidates(m, n, k):
                jobs[ring] = lambda s=ring: ring_gemm.function(VARIANT, s, device)  # type: ignore[misc]
            if m > NARROW_ROWS:
                for wide in warpgroup_candidates(m, n, k):
                    jobs[replace(wide, cluster=1)] = lambda s=wide: warpgroup_gemm.function(VARIANT, s, device)  # type: ignore[misc]
    compile_all(list(jobs.values()))
    for name, (k, n) in SHAPES.items():
        w = Weights(k, n)
        weight = w.truth(0)
        for m in rows:
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = x.double() @ weight.T
            ops: list[tuple[Op, Any]] = []
            if m <= NARROW_ROWS:
                ops += [(narrow_op(w, x, s), s) for s in narrow_candidates(m, n, k)]
            ops += [(ring_op(w, x, s), s) for s in ring_candidates(m, n, k)]
            if m > NARROW_ROWS:
                ops += [(warpgroup_op(w, x, s), s) for s in warpgroup_candidates(m, n, k)]
            found = []
            for op, shape in ops:
                if time.monotonic() - began > seconds:
                    say("out of time")
                    return
                error = float((op(0).double() - want).norm() / want.norm())
                found.append((measure(op, len(w)), f"{shape}" + ("" if error < ROUNDED else f" WRONG: error {error:.1e}")))
            say(f"{name} M {m} floor {w.floor:.1f}")
            for time_us, text in sorted(found)[:4]:
                say(f"   {time_us:6.1f} {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", type=int, nargs="+", metavar="ROWS", help="try block shapes at these numbers of rows instead")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="ROWS", help="numbers of rows of the table")
    parser.add_argument("--seconds", type=float, default=100, help="stop after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    if args.sweep:
        sweep(args.seconds, args.sweep)
    else:
        table(args.seconds, args.rows)
