"""The operators that this plugin offers. Signatures and values are those of `octavo.model.operators`; "draw" is that of
`octavo.sampling.sampler.DrawOperator`, "matrix" that of `octavo.model.matrix.MatrixMaker`.

Owns what goes to a kernel and what stays with torch: a shape that a kernel does not take (a row that is not whole
vectors) is computed by core's operator of the same name. Keeps no state but compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from octavo.interfaces import OperatorParts
from octavo.model import operators as core
from octavo.sampling.rng import uniforms
from torch import Tensor

from octavo_ops_cpu.jit.compiler import link_thread_pool
from octavo_ops_cpu.jit.emitter import float_bits
from octavo_ops_cpu.kernels import activation, norm
from octavo_ops_cpu.kernels.draw import draw as draw_kernel
from octavo_ops_cpu.launch import NAMES, dtype_of, fitting
from octavo_ops_cpu.matrix import MatrixPacker
from octavo_ops_cpu.provider import LANES, multiplies


class CpuOperators:
    """interfaces.Operators on compiled CPU kernels."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        link_thread_pool()
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("rms_norm", "plain"): rms_norm,
            ("add_rms_norm", "plain"): add_rms_norm,
            ("silu_mul", "plain"): partial(gated, "silu", core.silu_mul),
            ("gelu_tanh_mul", "plain"): partial(gated, "gelu_tanh", core.gelu_tanh_mul),
            ("draw", "plain"): draw,
            **({("matrix", "plain"): MatrixPacker()} if multiplies(parts.device, parts.dtype) else {}),
        }


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    rows, width = x.shape
    if width % LANES or x.stride(1) != 1 or x.dtype not in NAMES or dtype not in NAMES:
        return core.rms_norm(x, weight, eps, dtype)
    out = x.new_empty(rows, width, dtype=dtype)
    kernel = norm.rms_norm(dtype_of(x), NAMES[dtype])
    fitting(kernel, rows * width)(
        x.data_ptr(), x.stride(0) * x.itemsize, weight.data_ptr(), out.data_ptr(), rows, width, float_bits(eps)
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    if width % LANES or not (x.is_contiguous() and residual.is_contiguous()):
        return core.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    fitting(norm.add_rms_norm(dtype_of(x)), rows * width)(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, float_bits(eps)
    )
    return out, residual


def gated(act: str, otherwise: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if width % LANES or not gate_up.is_contiguous():
        return otherwise(gate_up)
    out = gate_up.new_empty(rows, width)
    fitting(activation.gated(act, dtype_of(gate_up)), rows * width)(gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


def draw(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab: int,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A row's uniform number is that of core's sampler, and so is its token."""
    count = len(logits)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    uniform = torch.from_numpy(uniforms(seed.numpy().view(np.uint64), position.numpy()))
    tokens, failed = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.bool)
    kernel = draw_kernel()
    (kernel.pooled if count > 1 else kernel.alone)(
        logits.data_ptr(), logits.stride(0) * 4, temperature.data_ptr(), uniform.data_ptr(),
        tokens.data_ptr(), failed.data_ptr(), count, vocab,
    )  # fmt: skip
    if keep is not None:
        table, slots = keep
        table[slots, position] = tokens
    return tokens, failed
