"""From tensors to kernel calls: dtypes by name, and when a kernel is worth more than one thread."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_ops_cpu.jit.compiler import Kernel
from octavo_ops_cpu.jit.emitter import Dtype

ALONE = 1 << 14
"""Values that one thread works through before another has started."""

NAMES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def fitting(kernel: Kernel, values: int) -> Callable[..., None]:
    """The kernel on one thread or on all, by the values that it goes through."""
    return kernel.alone if values <= ALONE else kernel.pooled


def dtype_of(tensor: Tensor) -> Dtype:
    return NAMES[tensor.dtype]
