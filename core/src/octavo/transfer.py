"""Small host arrays on their way to the device, without anybody waiting.

A copy from pageable memory may wait for all that its stream still has to do; then the host could never
prepare a step while the device computes the one before. So what goes to a GPU goes through pinned memory,
which torch's caching host allocator hands out again only when the copy is done.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def copy_into(target: Tensor, array: np.ndarray) -> None:
    """target takes the values of an array of its shape: one copy, where `to_device` and an assignment are two."""
    values = torch.from_numpy(np.ascontiguousarray(array))
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a CPU it may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
