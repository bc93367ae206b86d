"""A paged attention step in hostile memory, and what float64 says it must give. Shared by CPU and GPU tests of backends.

Memory: pages in random order, state-table rows in random order, every slot that no token was written to (free blocks, the
rest of last blocks, guard blocks before and behind the pool) holds NaN, table entries past a row's blocks are -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from octavo.catalog import Device
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

GUARD = 2  # blocks of NaN before and behind the pool
Make = Callable[[AttentionParts], AttentionBackend]


@dataclass(frozen=True)
class Case:
    """lens: tokens of each row after the step; new: how many of them are the step's."""

    lens: tuple[int, ...]
    new: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 0  # 0: as k_dim
    page: int = 16
    dtype: str = "float32"
    kv_dtype: str = ""  # "": as dtype
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    exact: bool = False  # draw only values that the cache's dtype holds
    layers: int = 1
    seed: int = 0

    @property
    def kv(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def values(self) -> int:
        return self.v_dim or self.k_dim

    def __str__(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
        parts = [f"{self.heads}x{self.kv_heads}", f"d{self.k_dim}" + (f"v{self.v_dim}" if self.v_dim else ""), f"p{self.page}"]
        parts += [short[self.dtype] + ("" if self.kv == self.dtype else "+" + short[self.kv])]
        parts += [f"w{self.window}"] * (self.window is not None) + ["cap"] * (self.softcap > 0) + ["sinks"] * self.sinks
        return "-".join([*parts, "decode" if max(self.new) == 1 else "mixed", str(sum(self.lens))])


@dataclass
class Built:
    """A case in memory: bound backend, step, and the tensors of it."""

    case: Case
    backend: Any
    step: Step
    q: torch.Tensor
    keys: list[torch.Tensor]  # by row, float32 [length, kv_heads, k_dim], in the query dtype's precision
    values: list[torch.Tensor]
    caches: list[torch.Tensor]  # guard blocks included
    sinks: torch.Tensor | None
    new_k: torch.Tensor = field(init=False)
    new_v: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        old = [n - q for n, q in zip(self.case.lens, self.case.new, strict=True)]
        dtype = self.q.dtype
        self.new_k, self.new_v = (
            torch.cat([x[o:] for x, o in zip(rows, old, strict=True)]).to(self.q.device, dtype)
            for rows in (self.keys, self.values)
        )

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh out and lse, NaN everywhere: what stays NaN was not written."""
        out = torch.full((*self.q.shape[:2], self.case.values), math.nan, dtype=self.q.dtype, device=self.q.device)
        return out, torch.full(self.q.shape[:2], math.nan, device=self.q.device)

    def run(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """prepare, plan, write, run; float64 out [T, heads, v_dim] and lse [T, heads] on the CPU."""
        out, lse = self.outputs()
        self.backend.prepare(self.step)
        self.backend.plan(self.step)
        self.backend.write(layer, self.step, self.new_k, self.new_v)
        self.backend.run(layer, self.step, self.q, out, lse=lse)
        return out.cpu().double(), lse.cpu().double()

    def guards_intact(self) -> bool:
        ends = [end for cache in self.caches for end in (cache[:GUARD], cache[-GUARD:])]
        return all(bool(torch.isnan(end.float()).all()) for end in ends)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by definition, in float64 over the values as the cache's dtype holds them."""
        case = self.case
        group = case.heads // case.kv_heads
        outs, lses, at = [], [], 0
        for row, (length, new) in enumerate(zip(case.lens, case.new, strict=True)):
            k = stored(self.keys[row], case.kv, case.k_scale).repeat_interleave(group, 1)
            v = stored(self.values[row], case.kv, case.v_scale).repeat_interleave(group, 1)
            q = self.q[at : at + new].cpu().double()
            at += new
            s = torch.einsum("qhd,khd->hqk", q, k) * case.k_dim**-0.5
            if case.softcap:
                s = case.softcap * torch.tanh(s / case.softcap)
            position, key = torch.arange(length - new, length)[:, None], torch.arange(length)[None]
            visible = key <= position
            if case.window is not None:
                visible &= key > position - case.window
            s = s.masked_fill(~visible, -math.inf)
            if self.sinks is not None:
                s = torch.cat([s, self.sinks.cpu().double()[:, None, None].expand(-1, new, 1)], -1)
            p = torch.softmax(s, -1)[..., :length]
            outs.append(torch.einsum("hqk,khd->qhd", p, v))
            lses.append(torch.logsumexp(s, -1).T)
        return torch.cat(outs), torch.cat(lses)


def stored(x: torch.Tensor, dtype: str, scale: float) -> torch.Tensor:
    """x as a cache of `dtype` gives it back, in float64: FP8 is divided by its scale, saturated, rounded, multiplied."""
    kv = getattr(torch, dtype)
    if not dtype.startswith("float8"):
        return x.to(kv).double()
    limit = torch.finfo(kv).max
    return (x / scale).clamp(-limit, limit).to(kv).double() * scale


def build(case: Case, make: Make, device: Device) -> Built:
    """Bind a backend to a fresh pool, lay out the rows, and write every token that is older than the step."""
    where = torch.device(device.type)
    generator = torch.Generator().manual_seed(case.seed)
    dtype, count = getattr(torch, case.dtype), len(case.lens)
    max_rows = count + 3
    backend = make(AttentionParts(device, case.dtype))
    spec = KVSpec("full" if case.window is None else "window", case.kv_heads, case.k_dim, case.values, case.kv, case.window)
    layout = backend.layout(spec, case.page)
    blocks = [-(-n // case.page) for n in case.lens]
    total = sum(blocks) + 4
    sinks = torch.randn(case.heads, generator=generator).to(where) if case.sinks else None
    layers = tuple(
        AttentionLayer(
            i, case.heads, case.kv_heads, case.k_dim, case.values, case.k_dim**-0.5, case.window, case.softcap, sinks,
            case.k_scale, case.v_scale,
        )
        for i in range(case.layers)
    )  # fmt: skip
    caches = [
        torch.full((total + 2 * GUARD, *layout.page_shape), math.nan).to(getattr(torch, layout.dtype)).to(where) for _ in layers
    ]
    group = KVGroup(0, spec, tuple(range(case.layers)), case.page, layout.page_bytes)
    bound = BoundGroup(group, layout, layers, tuple(cache[GUARD:-GUARD] for cache in caches))
    backend.bind([bound], Limits(max_rows, max(sum(case.lens), 1), max(case.lens) + 1))

    order = torch.randperm(total, generator=generator).int()
    rows = torch.randperm(max_rows, generator=generator)[:count]
    table = torch.full((max_rows, max(blocks) + 2), -1, dtype=torch.int32)
    for row, n in zip(rows.tolist(), blocks, strict=True):
        table[row, :n], order = order[:n], order[n:]

    def draw(length: int, dim: int, scale: float) -> torch.Tensor:
        x = torch.randn(length, case.kv_heads, dim, generator=generator).to(dtype).float()
        return stored(x, case.kv, scale).float() if case.exact else x

    keys = [draw(n, case.k_dim, case.k_scale) for n in case.lens]
    values = [draw(n, case.values, case.v_scale) for n in case.lens]
    q = torch.randn(sum(case.new), case.heads, case.k_dim, generator=generator).to(where, dtype)
    built = Built(case, backend, _step(case, case.new, case.lens, rows, table, where), q, keys, values, caches, sinks)
    old = tuple(n - new for n, new in zip(case.lens, case.new, strict=True))
    if sum(old):
        before = _step(case, old, old, rows, table, where)
        k, v = (torch.cat([x[:o] for x, o in zip(side, old, strict=True)]).to(where, dtype) for side in (keys, values))
        for layer in range(case.layers):
            backend.write(layer, before, k, v)
    return built


def _step(
    case: Case, new: tuple[int, ...], lens: tuple[int, ...], rows: torch.Tensor, table: torch.Tensor, where: torch.device
) -> Step:
    positions = np.concatenate([np.arange(n - q, n) for n, q in zip(lens, new, strict=True)])
    token_rows = np.repeat(rows.numpy(), new)
    slots = table.numpy()[token_rows, positions // case.page].astype(np.int64) * case.page + positions % case.page
    starts = np.concatenate([[0], np.cumsum(new)])

    def on(x: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(x, dtype=dtype).to(where)

    host = StepHost(np.array(new), np.array(lens), rows.numpy(), int(sum(new)), max(new), max(lens))
    return Step(
        token_ids=on(positions * 0, torch.int64),
        positions=on(positions, torch.int64),
        query_start=on(starts, torch.int32),
        seq_lens=on(lens, torch.int32),
        rows=on(rows, torch.int64),
        tables=(on(table, torch.int32),),
        slot_mapping=(on(slots, torch.int64),),
        token_rows=on(token_rows, torch.int64),
        logit_index=on(starts[1:] - 1, torch.int64),
        host=host,
    )
