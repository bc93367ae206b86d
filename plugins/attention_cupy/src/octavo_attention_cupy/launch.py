"""Launching a loaded kernel on torch's current stream, with its arguments as one struct by value.

Owns the structs, which mirror those of the .cu files field by field, and the launch. Reads the stream at every launch, so work
under any torch stream, capture included, goes where torch's own would. Allocates nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from octavo_attention_cupy.provider import DRIVER

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


class PrologueArgs(ctypes.Structure):
    """PrologueArgs of cuda/prologue.cu."""

    _fields_ = (
        *_fields(POINTER, "qkv weight cosine sine cache slots"),
        *_fields(I64, "page_bytes"),
        *_fields(I32, "tokens page heads kv_heads rotary wide"),
        *_fields(F32, "eps k_scale v_scale"),
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
    """PrefillArgs of cuda/prefill_args.cuh."""

    _fields_ = (
        *_fields(POINTER, "q out lse cache table tiles starts sinks"),
        *_fields(I64, "q_token q_head out_token out_head lse_token table_row page_bytes"),
        *_fields(I32, "page kv_heads group window"),
        *_fields(F32, "scale softcap v_scale"),
    )


class WidenArgs(ctypes.Structure):
    """WidenArgs of cuda/widen.cu."""

    _fields_ = (
        *_fields(POINTER, "cache table pages wide"),
        *_fields(I64, "table_row page_bytes"),
        *_fields(I32, "page kv_heads"),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        *_fields(ctypes.c_uint, "grid_x grid_y grid_z block_x block_y block_z shared"),
        ("stream", POINTER),
        ("attributes", POINTER),
        ("count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API: its number, and its value in a field of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint), ("rest", ctypes.c_uint * 15))


PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Kernel:
    """A loaded kernel with its block size. `what` says in errors which kernel of which shape it is.

    CuPy loads it; the launch itself is the driver's cuLaunchKernelEx, because CuPy's launch knows no attributes.
    """

    def __init__(self, function: Any, what: str, threads: int, shared: int = 0) -> None:
        self.function = function  # keeps its module loaded
        self.what, self.threads, self.shared = what, threads, shared
        self._driver = _driver()
        self._attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(grid_z=1, block_x=threads, block_y=1, block_z=1, shared=shared)
        self._config.attributes = ctypes.addressof(self._attribute)

    def __call__(self, grid: tuple[int, int], args: ctypes.Structure, device: torch.device, *, early: bool = False) -> None:
        """Launch `grid` blocks; `early`: the kernel may start while the one before it ends, and waits for it where it must.
        Raises RuntimeError that names the kernel if the driver refuses."""
        config = self._config
        config.grid_x, config.grid_y = grid
        config.stream = torch.cuda.current_stream(device).cuda_stream
        config.count = early
        pointer = ctypes.c_void_p(ctypes.addressof(args))
        status = self._driver.cuLaunchKernelEx(ctypes.byref(config), self.function.ptr, ctypes.byref(pointer), None)
        if status:
            raise RuntimeError(
                f"{self.what}: the driver refused to launch {grid[0]} x {grid[1]} blocks of {self.threads} threads with {self.shared} "
                f"bytes of shared memory: {_error(self._driver, status)}"
            )


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL(DRIVER)
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    driver.cuLaunchKernelEx.restype = ctypes.c_int
    return driver


def _error(driver: ctypes.CDLL, status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'unknown error').decode()} ({status}): {(text.value or b'').decode()}"
