"""How a finished, unquantised weight matrix lies in memory, and the product that fits it.

Owns the choice: `layer_matrix` for the layers, whose result has the model's dtype, and `head_matrix`
for output heads, whose result is float32. A format is taken only where its operator is there; `name`
says which it was. Must never change a weight's value beyond the rounding that it states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_MAX = torch.finfo(torch.float16).max


class Matrix(Protocol):
    """y = x W^T + b for x [T, in], W [out, in], b [out] or None."""

    name: str

    def __call__(self, x: Tensor) -> Tensor: ...


@cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs matrices of this dtype on this device type: torch was built with it, has the two
    operators (private, but those of torch's own compiler), and the processor takes the dtype."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@cache
def has_half_kernel() -> bool:
    """Whether torch has FBGEMM's product of float32 with a packed float16 matrix."""
    ops = torch.ops.quantized
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(ops, "linear_prepack_fp16")


class SmallProduct(Protocol):
    """The operator ("small_linear", "plain"): x [M, K], W [N, K] -> x W^T [M, N] in dtype (default x's), for
    few rows. `wins` says for which shapes it is measured to be faster than the library's product."""

    def __call__(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...

    def wins(self, m: int, n: int, k: int) -> bool: ...


class MatrixMaker(Protocol):
    """The operator ("matrix", "plain"): a matrix in a layout of the provider's own, or None for one that it has no better
    product of than this module. weight [out, in] and bias [out] or None are of the model's dtype; a head's result is
    float32, not rounded on the way, others' is of the weight's dtype. `name` says what it is, for the log."""

    name: str

    def __call__(self, weight: Tensor, bias: Tensor | None, *, head: bool) -> Matrix | None: ...


@dataclass(frozen=True, slots=True)
class Offers:
    """What operator providers offer for products; None where nobody does."""

    small: SmallProduct | None = None
    matrix: MatrixMaker | None = None


NOTHING = Offers()


class SmallMatrix:
    """A 16-bit matrix without bias: `small` takes the steps of few rows that it wins, `large` the others. One
    row is then rounded otherwise than the same row in company, as with any library that picks kernels by
    shape; float32 models, which promise equality, do without."""

    def __init__(self, weight: Tensor, small: SmallProduct, large: Matrix, dtype: torch.dtype) -> None:
        self._weight, self._small, self._large, self._dtype = weight, small, large, dtype
        self.name = f"small_linear or {large.name}"

    def __call__(self, x: Tensor) -> Tensor:
        if self._small.wins(x.shape[0], *self._weight.shape):
            return self._small(x, self._weight, self._dtype)
        return self._large(x)


class PlainMatrix:
    """The matrix as it is, on any device; float32 logits from 16 bits only after rounding."""

    name = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedMatrix:
    """oneDNN's blocked layout, x and result in the weight's dtype: 1.5 to 2 times as fast as a plain matrix
    for up to 16 rows."""

    name = "onednn-packed"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


class HalfMatrix:
    """FBGEMM's layout: float16 weights, x, sums and result float32. For a head in bfloat16 it is both exact,
    but for weights below 2^-14 whose error is at most 2^-25, and the fastest: it reads half the bytes of a
    float32 head (one row of 49152 x 576: 1.7 ms against 5.0 on two cores)."""

    name = "fbgemm-float16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x.float(), self._packed)  # type: ignore[no-any-return]


class CublasMatrix:
    """A 16-bit matrix on CUDA whose product is written in float32."""

    name = "cublas-float32-out"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.t(), bias

    def __call__(self, x: Tensor) -> Tensor:
        result = torch.mm(x, self._weight, out_dtype=torch.float32)
        return result if self._bias is None else result.add_(self._bias)


class WideMatrix:
    """A float32 copy: the last resort for float32 results from 16-bit weights, at twice the memory."""

    name = "float32 copy"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._matrix = layer_matrix(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix(x.float())


def layer_matrix(weight: Tensor, bias: Tensor | None, offers: Offers = NOTHING) -> Matrix:
    """For weight [out, in] and bias [out] of one dtype; x and the result have it too."""
    made = None if offers.matrix is None else offers.matrix(weight, bias, head=False)
    if made is not None:
        return made
    if packs(weight.device.type, weight.dtype):
        return PackedMatrix(weight, bias)
    return _with_small(weight, bias, offers.small, PlainMatrix(weight, bias), weight.dtype)


def head_matrix(weight: Tensor, bias: Tensor | None, offers: Offers = NOTHING) -> Matrix:
    """For an output head: x in the weight's dtype, the result float32 and not rounded on the way, because
    bfloat16 logits near 25 tie at every eighth."""
    if weight.dtype == torch.float32:
        return layer_matrix(weight, bias)
    made = None if offers.matrix is None else offers.matrix(weight, bias, head=True)
    if made is not None:
        return made
    if weight.is_cuda:
        return _with_small(weight, bias, offers.small, CublasMatrix(weight, bias), torch.float32)
    if has_half_kernel() and float(weight.abs().max()) <= _HALF_MAX:
        return HalfMatrix(weight, bias)
    return WideMatrix(weight, bias)


def _with_small(weight: Tensor, bias: Tensor | None, small: SmallProduct | None, large: Matrix, dtype: torch.dtype) -> Matrix:
    if small is None or bias is not None or weight.dtype == torch.float32:
        return large
    return SmallMatrix(weight, small, large, dtype)
