"""The operators `route` and `experts`: shapes checked, tiles chosen, kernels launched.

Owns which tile sizes serve which number of rows an expert (after the measurements in benchmarks/RESULTS.md). The kernels
are in kernels/route.py and kernels/experts.py; signatures and meaning are those of `octavo.model.operators`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from octavo.interfaces import Gate, Routing
from torch import Tensor

from octavo_ops_triton.kernels.experts import (
    BY_BLOCK,
    BY_EXPERT,
    BY_PAIR,
    BY_ROW,
    SORTED,
    UNSCALED,
    combine_kernel,
    count_kernel,
    down_kernel,
    gate_up_kernel,
    order_kernel,
)
from octavo_ops_triton.kernels.route import SCORES, route_kernel
from octavo_ops_triton.launch import Launcher, rows

MOST_TILES = 4096
"""Column tiles of the second product at most, of one token."""
FEW = 512
"""Pairs up to which a program finds its own among all of them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one product: rows, columns, depth of a turn, warps, turns in flight; `group` neighbours share weights in the cache."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 1


def tiles(pairs: int, experts: int, inner: int, bits: int) -> tuple[Tile, Tile]:
    """(gate_up, down) for `pairs` rows over `experts` of width `inner`, with weights of `bits` (32: of anything
    under float32 inputs)."""
    if bits == 32:
        return Tile(16, 32, 32, 4, 3), Tile(16, 64, 32, 4, 3)
    if pairs <= FEW:
        m = 16 if pairs <= 4 * experts else 32 if pairs <= 16 * experts else 64
        if bits == 8 and m == 16:  # of few experts, deep pipelines; of more, more programs a multiprocessor
            return Tile(m, 64, 128, 4, 6 if pairs <= 16 else 4), Tile(m, 64, 128, 4, 4)
        narrow = pairs <= 64 and inner >= 2048  # else fewer, larger programs
        return Tile(m, 32, 128, 4, 5 if m == 16 else 4), Tile(m, 32, 128, 4, 5) if narrow else Tile(m, 64, 128, 4, 4)
    each = pairs // experts
    if each <= 96:
        return Tile(64, 64, 64, 4, 4, 4), Tile(64, 128, 64, 4, 4, 4)
    return Tile(128, 128, 64, 8, 3, 4), Tile(128, 128, 64, 8, 4, 8)


def blocks(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of 128 x 128 that cover a matrix."""
    return triton.cdiv(rows, 128), triton.cdiv(columns, 128)


def route(
    launch: Launcher, logits: Tensor, routing: Routing, bias: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`octavo.model.operators.route`. Equal scores go to the lowest expert."""
    tokens, count = logits.shape
    if count % routing.groups or (routing.group_score == "sum2" and count // routing.groups < 2):
        raise ValueError(f"route: {count} experts do not make {routing.groups} groups by {routing.group_score!r}")
    size, top = count // routing.groups, routing.top_k
    weights = torch.empty((tokens, top), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=logits.device)
    constants = (
        SCORES[routing.score], top, routing.groups, routing.kept_groups, routing.group_score == "sum2",
        routing.renormalise, float(routing.scale), bias is not None, ids is not None,
        count, rows(logits, "route"), 0 if ids is None else rows(ids, "route"),
        triton.next_power_of_2(routing.groups), size, triton.next_power_of_2(size), triton.next_power_of_2(top),
    )  # fmt: skip
    tensors = (logits, logits if bias is None else bias, chosen if ids is None else ids, weights, chosen)
    launch(route_kernel, (tokens, 1), tensors, (), constants, warps=4 if count > 64 else 1)
    return weights, chosen


class GroupedExperts:
    """The operator `experts`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._arrived: Tensor | None = None  # of `down_kernel`: zero before and after every launch

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate: Gate,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        base: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`octavo.model.operators.experts`; weights and biases contiguous. Up to 512 pairs (token, expert) the parts of a sum stay
        float32; past that each is rounded to x's dtype, which halves the memory that a prompt takes.

        As the operator `experts_fp8`, gate_up and down are e4m3 and `scales` multiply them, float32 and contiguous: one a
        row, [E, 2 I] and [E, H], or one a block of 128 x 128, [E, 2, ceil(I / 128), ceil(H / 128)] and
        [E, ceil(H / 128), ceil(I / 128)]. x stays as it is; a weight is widened on its way into the product."""
        (tokens, hidden), top = x.shape, ids.shape[1]
        count, inner = gate_up.shape[0], gate_up.shape[1] // 2
        pairs = tokens * top
        if gate_up.shape[2] != hidden or down.shape != (count, hidden, inner) or weights.shape != ids.shape:
            raise ValueError(
                f"experts: x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)}, "
                f"weights {list(weights.shape)} and ids {list(ids.shape)} do not fit"
            )
        kind = UNSCALED if scales is None else BY_ROW if scales[0].ndim == 2 else BY_BLOCK
        if kind == BY_BLOCK and (
            scales[0].shape != (count, 2, *blocks(inner, hidden)) or scales[1].shape != (count, *blocks(hidden, inner))
        ):
            raise ValueError(f"experts_fp8: scales {[list(s.shape) for s in scales]} do not fit {list(gate_up.shape)}")
        gate_up_scale, down_scale = (weights, weights) if scales is None else scales
        first, second = tiles(pairs, count, inner, 32 if x.dtype == torch.float32 else gate_up.element_size() * 8)
        few = pairs <= FEW
        ids, weights = ids.contiguous(), weights.contiguous()
        order, counts = (ids, ids) if few else self._sort(ids.view(-1), count)
        mode = SORTED if not few else BY_PAIR if pairs <= count else BY_EXPERT
        block = triton.next_power_of_2(count)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        limit = gate.limit if math.isfinite(gate.limit) else 0.0
        middle = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
        part = torch.empty((pairs, hidden), dtype=torch.float32 if few else x.dtype, device=x.device)

        def grid(tile: Tile, columns: int) -> tuple[int, int]:
            work = {BY_PAIR: pairs, BY_EXPERT: count, SORTED: min(pairs, pairs // tile.m + count)}[mode]
            return triton.cdiv(columns, tile.n), triton.cdiv(work, tile.group) * tile.group

        def shape(tile: Tile) -> tuple[int, ...]:
            return block, tile.m, tile.n, tile.k, tile.group

        self._launch(
            gate_up_kernel, grid(first, inner),
            (x, ids, order, counts, gate_up, gate_up_scale, x if gate_up_bias is None else gate_up_bias, middle), (pairs,),
            (mode, count, top, hidden, inner, rows(x, "experts"), float(gate.alpha), float(limit), float(gate.offset),
             kind, gate_up_bias is not None, precision, *shape(first)),
            warps=first.warps, stages=first.stages,
        )  # fmt: skip
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        stride = 0 if base is None else rows(base, "experts")
        alone = tokens == 1 and mode == BY_PAIR and second.group == 1
        if alone and self._arrived is None:
            self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=x.device)
        self._launch(
            down_kernel, grid(second, hidden),
            (middle, ids, order, counts, down, down_scale, middle if down_bias is None else down_bias, weights, part,
             out if base is None else base, out, counts if self._arrived is None else self._arrived), (pairs,),
            (mode, count, hidden, inner, kind, down_bias is not None, precision, top if alone else 0, base is not None, *shape(second)),
            warps=second.warps, stages=second.stages,
        )  # fmt: skip
        if alone:
            return out
        self._launch(
            combine_kernel, (tokens, triton.cdiv(hidden, 1024)), (part, out if base is None else base, out), (),
            (top, hidden, base is not None, stride, 1024), warps=4,
        )  # fmt: skip
        return out

    def _sort(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(pairs by expert [P], pairs of each expert [count])."""
        pairs = len(ids)
        counts = torch.zeros(count, dtype=torch.int32, device=ids.device)
        rank, order = torch.empty_like(ids), torch.empty_like(ids)
        self._launch(count_kernel, (triton.cdiv(pairs, 256), 1), (ids, rank, counts), (pairs,), (256,), warps=4)
        block = triton.next_power_of_2(count)
        self._launch(order_kernel, (triton.cdiv(pairs, 64), 1), (ids, rank, counts, order), (pairs,), (count, block, 64), warps=4)
        return order, counts
