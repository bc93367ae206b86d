"""Small host arrays on their way to the device, without anybody waiting.

A copy from pageable memory may wait for all that its stream still has to do; then the host could never
prepare a step while the device computes the one before. So what goes to a GPU goes through pinned memory,
which torch's caching host allocator hands out again only when the copy is done. Whoever makes an array for the device
makes it there (`staged`): pinning one that lies elsewhere asks the driver where, and copies it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor


def staged(shape: int | tuple[int, ...], dtype: DTypeLike, device: torch.device) -> tuple[Tensor, np.ndarray]:
    """A tensor on the host and its values, still to be written: of pinned memory where `device` is a GPU."""
    if device.type == "cuda":
        tensor = torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=True)
        return tensor, tensor.numpy()
    array = np.empty(shape, dtype)
    return torch.from_numpy(array), array


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, started and not waited for. From a GPU it goes to pinned memory: only such a copy is not waited for."""
    if not values.is_cuda:
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a CPU it may share the array's memory."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    tensor, values = staged(array.shape, array.dtype, device)
    values[...] = array
    return tensor.to(device, non_blocking=True)
