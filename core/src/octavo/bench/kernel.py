"""`octavo bench kernel`: any attention provider, by name, on decode and prefill shapes, against the device's ceilings.

Owns the shapes and how they are timed; knows no kernel: a provider is resolved, bound and driven through
`octavo.interfaces.AttentionBackend`, as the engine does. What is timed: `run` only (one layer); `plan` is once
a step for all layers, and stands in a column of its own. How: caches of normal random values (never zeros) in
randomly permuted pages, rotated over layers so that together they exceed the L2 several times; decode as replays of
a captured graph, prefill as back-to-back launches; the median of several such regions. Every shape's last row is
also checked against a float64 reference over what `gather` returns, so that no wrong kernel gets a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from octavo.bench.device_time import graphed, time_region
from octavo.bench.record import surroundings
from octavo.catalog import Catalog, Device, Needs
from octavo.engine.device import cuda_device
from octavo.errors import PluginError
from octavo.interfaces import (
    AttentionBackend,
    AttentionLayer,
    AttentionParts,
    BoundGroup,
    KVGroup,
    KVSpec,
    Limits,
    Step,
    StepHost,
)
from octavo.model.source import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

ROTATION_BYTES = 1 << 30  # of KV that a region reads before it reads any of it again
MAX_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement. lens: tokens in the cache of each row, new ones included; new: of those, how many are queries."""

    name: str
    lens: tuple[int, ...]
    new: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None

    @property
    def phase(self) -> str:
        return "decode" if self.new == 1 else "prefill"

    def bytes(self, element: int) -> int:
        """KV bytes that a decode step must read: the visible tokens, once."""
        seen = sum(min(n, self.window or n) for n in self.lens)
        return seen * self.kv_heads * 2 * self.dim * element

    def flops(self) -> int:
        """Multiplications and additions of Q.K and P.V over the visible pairs of causal attention."""
        pairs = sum(sum(min(p + 1, self.window or p + 1) for p in range(n - self.new, n)) for n in self.lens)
        return 4 * pairs * self.heads * self.dim


def _rows(batch: int, length: int) -> tuple[int, ...]:
    return (length,) * batch


DECODE = (
    Shape("1 x 1k", _rows(1, 1024)),
    Shape("1 x 32k", _rows(1, 32768)),
    Shape("1 x 131k", _rows(1, 131072)),
    Shape("8 x 16k", _rows(8, 16384)),
    Shape("8 x 32k", _rows(8, 32768)),
    Shape("64 x 4k", _rows(64, 4096)),
    Shape("256 x 1k", _rows(256, 1024)),
)
"""The decode table of the attention bars: 32 query heads, 8 KV heads, dim 128."""

RAGGED = (
    Shape("1 x 128k + 31 x 4k", (131072, *_rows(31, 4096))),
    Shape("16 x 4k, 32/32 heads", _rows(16, 4096), heads=32, kv_heads=32),
    Shape("64 x 4k, 64/8 heads", _rows(64, 4096), heads=64),
    Shape("64 x 4k, 28/4 heads", _rows(64, 4096), heads=28, kv_heads=4),
    Shape("64 x 4k, dim 64", _rows(64, 4096), dim=64),
    Shape("64 x 4k, 16/8 heads, dim 256", _rows(64, 4096), heads=16, dim=256),
    Shape("8 x 128k, window 4096", _rows(8, 131072), window=4096),
    Shape("256 x 512, 16/8 heads", _rows(256, 512), heads=16),
)
"""Uneven batches, other head counts and dims, a window."""

PREFILL = (
    Shape("16 x 1k", _rows(16, 1024), new=1024),
    Shape("4 x 4k", _rows(4, 4096), new=4096),
    Shape("2 x 8k", _rows(2, 8192), new=8192),
    Shape("1 x 16k", _rows(1, 16384), new=16384),
)
"""Causal prefill of whole prompts through the paged cache."""

SETS = {"decode": DECODE, "ragged": RAGGED, "prefill": PREFILL}


def run(
    backends: Sequence[str],
    shapes: Sequence[Shape] = DECODE + RAGGED + PREFILL,
    *,
    catalog: Catalog | None = None,
    device: Device | None = None,
    dtype: str = "bfloat16",
    kv_dtypes: Sequence[str] = ("bfloat16",),
    block_size: int | None = None,
    repeats: int = 15,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure each backend on each shape and KV dtype. Prints one line each and returns surroundings, ceilings, results.

    block_size None takes each provider's preferred one. A provider that rejects a shape gives a result with its
    reason. Raises PluginError for a name that is not in the catalogue, and where there is no CUDA device.
    """
    torch = _torch()

    if not torch.cuda.is_available():
        raise PluginError("octavo bench kernel measures on a CUDA device, and torch finds none")
    if catalog is None:
        from octavo.plugins import discover

        catalog = discover()
    device = device or cuda_device()
    ceilings = measure_ceilings()
    log(f"{device.name}: copy {ceilings['copy_gbps']:.0f} GB/s, bf16 matmul {ceilings['matmul_tflops']:.0f} TFLOP/s")
    results: list[dict[str, Any]] = []
    log(HEADER)
    for shape in shapes:
        for kv_dtype in kv_dtypes:
            for name in backends:
                results.append(measure(catalog, name, shape, device, dtype, kv_dtype, block_size, repeats, ceilings))
                log(line(results[-1]))
    return {
        "surroundings": surroundings(),
        "device": asdict(device) | {"features": sorted(device.features)},
        "ceilings": ceilings,
        "results": results,
    }


HEADER = f"{'shape':30} {'backend':10} {'kv':14} {'page':>4} {'us':>9} {'plan us':>8} {'rate':>14} {'ceiling':>8} {'error':>8}"


def line(result: dict[str, Any]) -> str:
    """One line of the table."""
    head: str = f"{result['shape']:30} {result['backend']:10} {result['kv_dtype']:14} "
    if "rejected" in result:
        return f"{head}{result['rejected']}"
    rate: str = f"{result['gbps']:.0f} GB/s" if "gbps" in result else f"{result['tflops']:.0f} TFLOP/s"
    return (
        f"{head}{result['block_size']:4d} {result['us']:9.1f} {result['plan_us']:8.1f} {rate:>14} "
        f"{100 * result['share']:7.0f}% {result['error']:8.1e}"
    )


def measure_ceilings() -> dict[str, float]:
    """What this device reaches: a large device-to-device copy (bytes read plus written) and a bf16 8192^3 product, warm."""
    torch = _torch()

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = time_region(lambda: target.copy_(source), 10, 10)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    c = torch.empty_like(a)
    time_region(lambda: torch.mm(a, b, out=c), 60, 1)
    matmul = time_region(lambda: torch.mm(a, b, out=c), 20, 5)
    return {"copy_gbps": 2 * source.numel() / copy / 1e3, "matmul_tflops": 2 * 8192**3 / matmul / 1e6}


def measure(
    catalog: Catalog,
    name: str,
    shape: Shape,
    device: Device,
    dtype: str,
    kv_dtype: str,
    block_size: int | None,
    repeats: int,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """One line of results; see `run`."""
    result: dict[str, Any] = {"shape": shape.name, "backend": name, "phase": shape.phase, "kv_dtype": kv_dtype}
    layer = AttentionLayer(0, shape.heads, shape.kv_heads, shape.dim, shape.dim, 1 / math.sqrt(shape.dim), window=shape.window)
    facts = {"layers": (layer,), "kv_dtype": kv_dtype, "block_size": block_size}
    try:
        decision = catalog.resolve("attention", Needs("attention", device, dtype, facts), name)
    except PluginError as error:
        if name not in catalog.names("attention"):
            raise
        return result | {"rejected": str(error)}
    page = block_size or decision.accept.preferences["block_sizes"][0]
    backend: AttentionBackend = decision.create(AttentionParts(device, dtype))
    bench = Bench(backend, shape, layer, dtype, kv_dtype, page)
    us, plan_us = bench.time(repeats)
    moved, work = shape.bytes(DTYPE_BYTES[kv_dtype]), shape.flops()
    result |= {"block_size": page, "us": us, "plan_us": plan_us, "error": bench.error(), "bytes": moved, "flops": work}
    if shape.phase == "decode":
        gbps = moved / us / 1e3
        return result | {"gbps": gbps, "share": gbps / ceilings["copy_gbps"]}
    tflops = work / us / 1e6
    return result | {"tflops": tflops, "share": tflops / ceilings["matmul_tflops"]}


class Bench:
    """One backend bound to one shape: caches, block table, step, queries. Lives as long as its measurement."""

    def __init__(
        self, backend: AttentionBackend, shape: Shape, layer: AttentionLayer, dtype: str, kv_dtype: str, page: int, seed: int = 0
    ) -> None:
        import torch

        self.backend, self.shape, self.layer = backend, shape, layer
        generator = torch.Generator("cuda").manual_seed(seed)
        kind: Literal["full", "window"] = "full" if shape.window is None else "window"
        spec = KVSpec(kind, shape.kv_heads, shape.dim, shape.dim, kv_dtype, shape.window)
        layout = backend.layout(spec, page)
        counts = [-(-n // page) for n in shape.lens]
        need = max(1, shape.bytes(DTYPE_BYTES[kv_dtype]))
        self.layers = max(2, min(MAX_LAYERS, -(-ROTATION_BYTES // need))) if shape.phase == "decode" else 1
        layers = tuple(replace(layer, index=i) for i in range(self.layers))
        # Fresh memory, as a pool has it: caches cut out of blocks that earlier shapes left behind were seen 13% slower.
        torch.cuda.empty_cache()
        caches = tuple(_noise((sum(counts), *layout.page_shape), layout.dtype, generator) for _ in layers)
        group = KVGroup(0, spec, tuple(range(self.layers)), page, layout.page_bytes)
        rows, tokens = len(shape.lens), len(shape.lens) * shape.new
        limits = Limits(rows, max(tokens, rows), max(shape.lens))
        backend.bind([BoundGroup(group, layout, layers, caches)], limits)
        self.step = _step(shape, page, counts, seed)
        model = getattr(torch, dtype)
        self.q = torch.randn(tokens, shape.heads, shape.dim, generator=generator, device="cuda").to(model)
        self.out = torch.full((tokens, shape.heads, shape.dim), float("nan"), dtype=model, device="cuda")
        self.runs = max(self.layers, 16) if shape.phase == "decode" else 1

    def _work(self) -> None:
        for i in range(self.runs):
            self.backend.run(i % self.layers, self.step, self.q, self.out)

    def _plans(self, count: int) -> None:
        for _ in range(count):
            self.backend.plan(self.step)

    def time(self, repeats: int) -> tuple[float, float]:
        """Microseconds of one layer's `run`, and of one `plan`."""
        self.backend.prepare(self.step)
        self.backend.plan(self.step)
        self._work()
        if self.shape.phase == "decode" and self.backend.graphs != "none":
            plan = time_region(graphed(lambda: self._plans(16)), 1, repeats) / 16
            return time_region(graphed(self._work), 1, repeats) / self.runs, plan
        return time_region(self._work, 5, repeats) / self.runs, time_region(lambda: self.backend.plan(self.step), 5, repeats)

    def error(self) -> float:
        """Relative error (norm) of the last query of the last row, against float64 over the cache's own K and V."""
        import torch

        n, group = self.shape.lens[-1], self.shape.heads // self.shape.kv_heads
        row = int(self.step.host.rows[-1])
        k, v = self.backend.gather((self.runs - 1) % self.layers, row, n)
        first = 0 if self.shape.window is None else max(0, n - self.shape.window)
        k, v = (x[first:].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", self.q[-1].double(), k) * self.layer.scale
        want = torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), v)
        return float((self.out[-1].double() - want).norm() / want.norm())


def _noise(shape: Iterable[int], dtype: str, generator: Any) -> Tensor:
    """Normal values in `dtype`, filled in pieces: the float32 draws of a whole cache would not fit beside it."""
    torch = _torch()

    out: Tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cuda")
    flat, piece = out.view(-1), 1 << 27
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        part.copy_(torch.randn(part.shape, generator=generator, device="cuda"))
    return out


def _step(shape: Shape, page: int, counts: Sequence[int], seed: int) -> Step:
    """A Step of the shape over randomly permuted pages; row i of the batch is row i of the state table."""
    torch = _torch()

    def on(data: Any, dtype: Any) -> Tensor:
        tensor: Tensor = torch.as_tensor(data, dtype=dtype).to("cuda")
        return tensor

    rows = len(shape.lens)
    pages = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
    table = np.full((rows, max(counts)), -1, dtype=np.int32)
    ends = np.cumsum(counts)
    for r, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[r, :count] = pages[end - count : end]
    lens = np.array(shape.lens)
    positions = np.concatenate([np.arange(n - shape.new, n) for n in lens])
    token_rows = np.repeat(np.arange(rows), shape.new)
    slots = table[token_rows, positions // page].astype(np.int64) * page + positions % page
    queries = np.full(rows, shape.new)
    return Step(
        token_ids=on(np.zeros(len(positions)), torch.int64),
        positions=on(positions, torch.int64),
        query_start=on(np.arange(rows + 1) * shape.new, torch.int32),
        seq_lens=on(lens, torch.int32),
        rows=on(np.arange(rows), torch.int64),
        tables=(on(table, torch.int32),),
        slot_mapping=(on(slots, torch.int64),),
        token_rows=on(token_rows, torch.int64),
        logit_index=on(np.arange(1, rows + 1) * shape.new - 1, torch.int64),
        host=StepHost(queries, lens, np.arange(rows), len(positions), shape.new, int(lens.max())),
    )


def _torch() -> Any:
    """torch, imported when a measurement starts; untyped, since its CUDA classes are."""
    import torch

    return torch
