"""CUDA source to kernels, and their launch with what CuPy's launch does not pass: clusters, dependent launch, tensor maps.

Owns the way to the driver. CuPy compiles (NVRTC, kept on disk between runs). A launch goes to torch's current stream and may be
captured; compiling may not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _PREFERRED_CARVEOUT = 8, 9  # CUfunction_attribute: ..._SHARED_SIZE_BYTES, ..._SHARED_MEMORY_CARVEOUT
_UINT8, _SWIZZLE_128B, _PROMOTE_256B = 0, 3, 3  # CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes of which the first words are used."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class TensorMap:
    """CUtensorMap: 128 bytes at a multiple of 64, for the copy engine."""

    def __init__(self) -> None:
        self._room = ctypes.create_string_buffer(128 + 64)
        self.address = -(-ctypes.addressof(self._room) // 64) * 64


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def tensor_map(matrix: Tensor, rows: int) -> TensorMap:
    """Of matrix [R, C] of one-byte values, dense, C a multiple of 16: tiles of `rows` (at most 256) times 128, each row under the 128-byte
    swizzle, zero past the edges. It holds the address only: the matrix must live on."""
    made = TensorMap()
    height, width = matrix.shape
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(made.address),
            _UINT8,
            2,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(width, height),
            (ctypes.c_uint64 * 1)(width),
            (ctypes.c_uint32 * 2)(128, rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128B,
            _PROMOTE_256B,
            0,
        ),
        f"cuTensorMapEncodeTiled for a matrix {list(matrix.shape)} at {matrix.data_ptr():#x}",
    )
    return made


def compile_source(source: str, defines: dict[str, int], device: torch.device) -> Any:
    """A module of `source` with these macros, for `device` and the instructions of its generation alone ("a");
    functions come from its `get_function(name)`."""
    import cupy

    major, minor = torch.cuda.get_device_capability(device)
    options = (f"-arch=sm_{major}{minor}a", *(f"-D{name}={value}" for name, value in sorted(defines.items())))
    with cupy.cuda.Device(device.index or 0):
        return cupy.RawModule(code=source, options=options)


class Function:
    """A function of a compiled module with fixed block size, cluster and shared memory.

    threads a block; cluster: blocks along y that share memory (1: none); shared: bytes of dynamic shared memory. The kernel may start
    before the one in front has ended, and must wait for it itself. All of these kernels want as much shared memory as a multiprocessor
    has: between that and L1 it has one division at a time, and blocks of kernels that want different ones never run on it together."""

    def __init__(self, module: Any, name: str, *, threads: int, cluster: int, shared: int) -> None:
        self._module = module  # keeps the code loaded
        self._function = ctypes.c_void_p(module.get_function(name).kernel.ptr)
        self._launch = _driver().cuLaunchKernelEx
        for attribute, value in ((_MAX_DYNAMIC_SHARED, shared), (_PREFERRED_CARVEOUT, 100)):
            _check(_driver().cuFuncSetAttribute(self._function, attribute, value), "cuFuncSetAttribute")
        attributes = [_attribute(_PROGRAMMATIC_SERIALIZATION, 1)]
        if cluster > 1:
            attributes.append(_attribute(_CLUSTER_DIMENSION, 1, cluster, 1))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._config = _Config(shared=shared, attributes=self._attributes, count=len(attributes))
        self._config.block[:] = (threads, 1, 1)

    def __call__(
        self, grid: tuple[int, int, int], maps: tuple[TensorMap, ...], pointers: tuple[int, ...], numbers: tuple[int | float, ...]
    ) -> None:
        """Launch on these tensor maps, then these addresses, then these int32 and float32."""
        plain = (ctypes.c_float(n) if isinstance(n, float) else ctypes.c_int(n) for n in numbers)
        values = [*map(ctypes.c_void_p, pointers), *plain]
        addresses = [*[m.address for m in maps], *[ctypes.addressof(v) for v in values]]
        config = self._config
        config.grid[:] = grid
        config.stream = torch.cuda.current_stream().cuda_stream
        params = (ctypes.c_void_p * len(addresses))(*addresses)
        _check(self._launch(ctypes.byref(config), self._function, params, None), "cuLaunchKernelEx")


def _attribute(kind: int, *words: int) -> _Attribute:
    made = _Attribute(id=kind)
    for i, word in enumerate(words):
        made.value[i] = word
    return made


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'error').decode()} ({status})")
