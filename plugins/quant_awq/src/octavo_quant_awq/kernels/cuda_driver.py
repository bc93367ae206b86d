"""The CUDA files of this package on top of `octavo.cuda`: their headers, and the launch that the products share."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from octavo.cuda import Function, compile_source, tensor_map
from torch import Tensor


def header(name: str) -> str:
    """The text of a file of this package, for `compile_file` to put before another."""
    return resources.files(__package__).joinpath(name).read_text()


def compile_file(name: str, defines: dict[str, int], device: torch.device, *, features: str = "", before: str = "") -> Any:
    """A module of common.cuh, the text `before` and a file of this package; the rest as `compile_source`."""
    source = "\n".join((header("common.cuh"), before, header(name)))
    return compile_source(source, defines, device, features=features)


Matrix = tuple[Tensor, Tensor, Tensor | None]
"""A matrix of 4-bit weights in memory: words, scales, and zero points or None."""


def multiply(
    call: Function,
    blocks: int,
    matrix: Matrix,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group_step: int,
    *,
    y: int | None = None,
    z: int = 1,
    box: int = 0,
    more: tuple[Tensor, ...] = (),
) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias by a kernel of this package: `blocks` along x, y (the cluster's size unless given) and z. x's rows must be
    dense and start at multiples of 16 bytes. box: rows of x that the kernel copies by a tensor map, 64 inputs at a time; without it, the kernel takes x's address and
    stride. more: what the kernel takes besides."""
    (m, k), n = x.shape, out.shape[1]
    tensors = (*matrix, bias, out) if box else (*matrix, x, bias, out, *more)
    pointers = tuple(0 if t is None else t.data_ptr() for t in tensors)
    numbers = (m, n, k, group_step) if box else (m, n, k, x.stride(0), group_step)
    call((blocks, y or call.cluster, z), pointers, numbers, by_value=(tensor_map(x, (64, box)),) if box else ())
    return out
