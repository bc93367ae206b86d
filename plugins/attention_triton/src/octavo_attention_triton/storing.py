"""What is stored before attention: K and V alone, or behind norm and RoPE (and rotation) of the heads.

Owns the shapes that the kernels of write.py, prologue.py and prologue_spread.py are launched in.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from octavo.interfaces import Step
from octavo_ops_triton.kernels.spread import factor_of, heads_of, tile_of
from octavo_ops_triton.launch import Launcher, constants_of
from torch import Tensor

from octavo_attention_triton.bound import Bound
from octavo_attention_triton.kernels import prologue, prologue_spread, write

VALUES_APART = 128
"""Tokens of a step with chunks from which transposed values are stored by a kernel of their own; fewer are a launch too many."""


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _scale(scale: float) -> tuple[float, float]:
    """A scale and its inverse, as a kernel gets them: float32."""
    scale = float(np.float32(scale))
    return scale, float(np.float32(1) / np.float32(scale))


class Store:
    """Stores of a backend, whose launcher it takes."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def write(self, bound: Bound, step: Step, k: Tensor, v: Tensor) -> None:
        """`octavo.interfaces.AttentionBackend.write`."""
        g, cache = bound.geometry, bound.cache
        quantise = cache.dtype in write.FP8_MAX
        if k.shape[0] == 0:
            return
        block_k, block_v = max(16, _pow2(g.k_dim)), max(16, _pow2(g.v_dim))
        block_h = min(_pow2(g.heads), max(1, 2048 // max(block_k, block_v)))
        apart = self._values_apart(bound, step, k.shape[0])
        write.write_kernel[(k.shape[0], triton.cdiv(g.heads, block_h))](
            k, v, cache, step.slot_mapping[bound.group],
            bound.layer.k_scale, bound.layer.v_scale, write.FP8_MAX.get(cache.dtype, 0.0),
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0),
            HEADS=g.heads, K_DIM=g.k_dim, V_DIM=g.v_dim, PAGE=g.page, K_ROW=g.k_row, V_ROW=g.v_row, V_BASE=g.v_base,
            V_TRANSPOSED=g.v_transposed, QUANTISE=quantise, VALUES=not apart, BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_V=block_v,
            num_warps=4,
        )  # fmt: skip
        if apart:
            self._write_values(bound, step, v)

    def prologue(
        self, bound: Bound, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`octavo.interfaces.FusedPrologue.prologue`."""
        g, cache, facts = bound.geometry, bound.cache, bound.layer
        tokens, heads, dim = self._checked(bound, qkv, cos, sin)
        rotary = cos.shape[-1]
        q = qkv[:, : facts.num_heads]
        if tokens == 0:
            return q
        half, rest = _pow2(rotary // 2), dim - rotary
        block_h = max(1, min(8, 1024 // half))
        apart = self._values_apart(bound, step, tokens)
        if apart:
            heads -= facts.num_kv_heads
        key = ("prologue", rotary, weight is not None, apart)
        if key not in bound.constants:
            bound.constants[key] = constants_of(
                prologue.prologue_kernel, HEADS=facts.num_heads, KV_HEADS=facts.num_kv_heads, DIM=dim, ROTARY=rotary,
                NORM=weight is not None, PAGE=g.page, K_ROW=g.k_row, V_ROW=g.v_row, V_BASE=g.v_base, V_TRANSPOSED=g.v_transposed,
                QUANTISE=cache.dtype in write.FP8_MAX, VALUES=not apart, BLOCK_H=block_h, BLOCK_HALF=half,
                BLOCK_REST=_pow2(rest) if rest else 0,
            )  # fmt: skip
        self._launch(
            prologue.prologue_kernel, (tokens, triton.cdiv(heads, block_h)),
            (qkv, qkv if weight is None else weight, cos, sin, step.slot_mapping[bound.group], cache),
            (eps, facts.k_scale, facts.v_scale, write.FP8_MAX.get(cache.dtype, 0.0)),
            (qkv.stride(0), cache.stride(0), *bound.constants[key]), warps=4,
        )  # fmt: skip
        if apart:
            self._write_values(bound, step, qkv[:, -facts.num_kv_heads :])
        return q

    def prologue_spread(
        self, bound: Bound, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`octavo.interfaces.SpreadingPrologue.prologue` with spread=True."""
        g, cache, facts = bound.geometry, bound.cache, bound.layer
        tokens, _, dim = self._checked(bound, qkv, cos, sin)
        rotary = cos.shape[-1]
        q = qkv[:, : facts.num_heads]
        if tokens == 0:
            return q
        turns, kv_heads = facts.num_heads + facts.num_kv_heads, facts.num_kv_heads
        apart = self._values_apart(bound, step, tokens)
        tile = tile_of(dim, qkv.dtype, tokens * turns)
        block_h = heads_of(turns, tokens, tile)
        block_t = tile.rows // block_h
        enough = tile.warps * 32 // (block_t * _pow2(dim))  # to give every thread something to do
        block_v = max(1, enough) if g.v_transposed else min(_pow2(kv_heads), max(1, 2048 // (block_t * _pow2(dim))))
        key = ("spread", rotary, weight is not None, tile, block_h)
        if key not in bound.constants:
            bound.constants[key] = constants_of(
                prologue_spread.prologue_spread_kernel, HEADS=facts.num_heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=rotary,
                NORM=weight is not None, PAGE=g.page, K_ROW=g.k_row, V_ROW=g.v_row, V_BASE=g.v_base, V_TRANSPOSED=g.v_transposed,
                QUANTISE=cache.dtype in write.FP8_MAX, CHUNKS=tile.chunks, BLOCK=tile.block, BLOCK_R=tile.rows, BLOCK_H=block_h,
                BLOCK_V=block_v, BLOCK_D=_pow2(dim),
            )  # fmt: skip
        groups = triton.cdiv(turns, block_h) + (0 if apart else triton.cdiv(kv_heads, block_v))
        self._launch(
            prologue_spread.prologue_spread_kernel, (triton.cdiv(tokens, block_t), groups),
            (qkv, qkv if weight is None else weight, cos, sin, step.slot_mapping[bound.group], cache),
            (eps, *_scale(facts.k_scale), *_scale(facts.v_scale), write.FP8_MAX.get(cache.dtype, 0.0), factor_of(dim), tokens),
            (cache.stride(0), *bound.constants[key]), warps=tile.warps,
        )  # fmt: skip
        if apart:
            self._write_values(bound, step, qkv[:, -kv_heads:])
        return q

    def _checked(self, bound: Bound, qkv: Tensor, cos: Tensor, sin: Tensor) -> torch.Size:
        g, dim = bound.geometry, qkv.shape[2]
        if g.k_dim != dim or g.v_dim != dim or not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(
                f"layer {bound.layer.index}: qkv {list(qkv.shape)} is not dense, or not as wide as K {g.k_dim} and V {g.v_dim}"
            )
        return qkv.shape

    def _values_apart(self, bound: Bound, step: Step, tokens: int) -> bool:
        """Whether V of a step of so many tokens is stored by a kernel of its own."""
        return bound.geometry.v_transposed and tokens >= VALUES_APART and step.host.max_query_len > 1

    def _write_values(self, bound: Bound, step: Step, v: Tensor) -> None:
        g, cache = bound.geometry, bound.cache
        write.values_kernel[(triton.cdiv(v.shape[0], 64), g.heads)](
            v, cache, step.slot_mapping[bound.group], bound.layer.v_scale, write.FP8_MAX.get(cache.dtype, 0.0), v.shape[0],
            v.stride(0), v.stride(1), cache.stride(0), V_DIM=g.v_dim, PAGE=g.page, V_BASE=g.v_base, QUANTISE=cache.dtype in write.FP8_MAX,
            BLOCK_T=64, BLOCK_V=_pow2(g.v_dim), PDL=self._launch.pdl, num_warps=4, **({"launch_pdl": True} if self._launch.pdl else {}),
        )  # fmt: skip
