"""Norms, SwiGLU and plain rows to e4m3 in CUDA, for few rows: the launches of quantise.cu.

Owns compiled variants, one for each length of a row and way to cut it. Compiling happens when a variant is first asked for, which must be before a graph is
captured. Many rows are quantise.py's: they fill the device by themselves.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.util import find_spec

import torch
from octavo.cuda import Function, compile_source
from octavo.interfaces import Activation
from torch import Tensor

PLAIN, NORM, SWIGLU = 0, 1, 2
MAX_ROWS = 64
MAX_CLUSTER = 8
VECTOR = 8
"""Channels that a thread loads at once."""


def blocks(size: int, rows: int) -> tuple[int, int, int]:
    """(blocks of a row, threads of a block, vectors of a thread) for so many rows of `size` channels: one block unless its threads would
    have more than one vector each. Blocks are small where they are few, to find room beside the product in front."""
    most = 256 if rows * size <= 1 << 19 else 512
    vectors = -(-size // VECTOR)
    cluster = 1
    while cluster < MAX_CLUSTER and vectors > cluster * most:
        cluster *= 2
    each = -(-vectors // cluster)
    items = -(-each // most)
    return cluster, -(-each // (32 * items)) * 32, items


@cache
def available(device: torch.device) -> bool:
    """Clusters, and a compiler."""
    return torch.cuda.get_device_capability(device)[0] == 9 and find_spec("cupy") is not None


def serves(x: Tensor, size: int, *others: Tensor) -> bool:
    """Whether rows of `size` channels can be made of x here, and are few; others: tensors that are read in whole vectors, too."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and size % VECTOR == 0
        and available(x.device)
        and all(t.stride(0) % VECTOR == 0 or t.ndim == 1 for t in (x, *others))
        and all(t.data_ptr() % 16 == 0 and t.stride(-1) == 1 for t in (x, *others))
    )


def macros(kind: int, dtype: torch.dtype, weight: torch.dtype, cut: tuple[int, int, int]) -> dict[str, int]:
    """What quantise.cu is compiled with. cut: of `blocks`."""
    cluster, threads, items = cut
    return {
        "KIND": kind, "BF16": int(dtype == torch.bfloat16), "WEIGHT": 32 if weight == torch.float32 else 16,
        "CLUSTER": cluster, "THREADS": threads, "ITEMS": items,
    }  # fmt: skip


def source() -> str:
    return resources.files(__package__).joinpath("quantise.cu").read_text()


@cache
def _function(kind: int, dtype: torch.dtype, weight: torch.dtype, cut: tuple[int, int, int], device: torch.device) -> Function:
    module = compile_source(source(), macros(kind, dtype, weight, cut), device, features="a")
    return Function(module, "quantise", threads=cut[1], cluster=cut[0], dependent=True, prefer_shared=True)


def quantise(
    kind: int, x: Tensor, out: Activation, *, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0,
    bound: float = float("inf"),
) -> Activation:  # fmt: skip
    """Fill out: data e4m3 [M, size] and scale float32 [M, 1]. NORM: residual float32 becomes the sum."""
    rows, size = out.data.shape
    cut = blocks(size, rows)
    call = _function(kind, x.dtype, torch.float32 if weight is None else weight.dtype, cut, x.device)
    pointers = (
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), 0 if weight is None else weight.data_ptr(),
        out.data.data_ptr(), out.scale.data_ptr(),
    )  # fmt: skip
    numbers = (size, x.stride(0), 0 if residual is None else residual.stride(0), float(eps), float(bound))
    call((rows, cut[0], 1), pointers, numbers)
    return out
