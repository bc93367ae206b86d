"""Launching a loaded kernel on torch's current stream, with its arguments as one struct by value.

Owns the structs, which mirror those of the .cu files field by field, and the launch. Reads the stream at every launch, so work
under any torch stream, capture included, goes where torch's own would. Allocates nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

POINTER, I64, I32, F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class PlanArgs(ctypes.Structure):
    """PlanArgs of cuda/plan.cu."""

    _fields_ = (
        *_fields(POINTER, "query_start seq_lens table_rows row_work block_work"),
        *_fields(I32, "rows blocks heads unit least window"),
    )


class WriteArgs(ctypes.Structure):
    """WriteArgs of cuda/write.cu."""

    _fields_ = (
        *_fields(POINTER, "k v cache slots"),
        *_fields(I64, "k_token k_head v_token v_head page_bytes"),
        *_fields(I32, "tokens page kv_heads"),
        *_fields(F32, "k_scale v_scale"),
        *_fields(I32, "wide"),
    )


class DecodeArgs(ctypes.Structure):
    """DecodeArgs of cuda/decode.cu."""

    _fields_ = (
        *_fields(POINTER, "q out lse cache table row_work block_work part part_sums arrived sinks"),
        *_fields(I64, "q_token q_head out_token out_head lse_token table_row page_bytes"),
        *_fields(I32, "page kv_heads group pieces"),
        *_fields(F32, "scale softcap v_scale"),
    )


class PrefillArgs(ctypes.Structure):
    """PrefillArgs of cuda/prefill.cu."""

    _fields_ = (
        *_fields(POINTER, "q out lse cache table tiles sinks"),
        *_fields(I64, "q_token q_head out_token out_head lse_token table_row page_bytes"),
        *_fields(I32, "page kv_heads group window"),
        *_fields(F32, "scale softcap v_scale"),
    )


class Kernel:
    """A loaded kernel with its block size. `what` says in errors which kernel of which shape it is."""

    def __init__(self, function: Any, what: str, threads: int, shared: int = 0) -> None:
        from cupy.cuda import driver

        self._function, self._driver = function, driver  # the function keeps its module loaded
        self.what, self.threads, self.shared = what, threads, shared

    def __call__(self, grid: tuple[int, int], args: ctypes.Structure, device: torch.device) -> None:
        """Launch `grid` blocks. Raises RuntimeError that names the kernel if the driver refuses."""
        pointer = ctypes.c_void_p(ctypes.addressof(args))
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            self._driver.launchKernel(
                self._function.ptr, grid[0], grid[1], 1, self.threads, 1, 1, self.shared, stream, ctypes.addressof(pointer), 0
            )
        except self._driver.CUDADriverError as error:
            raise RuntimeError(
                f"{self.what}: the driver refused to launch {grid} blocks of {self.threads} threads with {self.shared} bytes "
                f"of shared memory: {error}"
            ) from error
