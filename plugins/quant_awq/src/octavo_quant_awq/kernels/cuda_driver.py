"""Compiling CUDA source at run time and launching it with attributes: thread-block clusters and dependent launch.

Owns the way to the driver. CuPy compiles (NVRTC, kept on disk between runs); the launch goes to the driver itself, because
CuPy's passes no attributes. Launches on torch's current stream and may be captured; compiling may not.
"""

from __future__ import annotations

import ctypes
from importlib import resources
from typing import Any

import torch
from torch import Tensor

_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_UINT16, _SWIZZLE_128B, _PROMOTION_256B = 1, 3, 3  # CUtensorMapDataType, -Swizzle, -L2promotion
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


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


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compile_source(source: str, defines: dict[str, int], device: torch.device, *, features: str = "") -> Any:
    """A module of `source` with these macros, for `device`; functions come from its `get_function(name)`. features: what is
    appended to the architecture, such as "a" for the instructions of one generation."""
    import cupy

    major, minor = torch.cuda.get_device_capability(device)
    options = (f"-arch=sm_{major}{minor}{features}", *(f"-D{name}={value}" for name, value in sorted(defines.items())))
    with cupy.cuda.Device(device.index or 0):
        return cupy.RawModule(code=source, options=options)


def compile_file(name: str, defines: dict[str, int], device: torch.device, *, features: str = "", before: str = "") -> Any:
    """A module of common.cuh, the text `before` and a file of this package; the rest as `compile_source`."""
    files = resources.files(__package__)
    source = "\n".join((files.joinpath("common.cuh").read_text(), before, files.joinpath(name).read_text()))
    return compile_source(source, defines, device, features=features)


def tensor_map(x: Tensor, box: tuple[int, int]) -> ctypes.Array[Any]:
    """The descriptor (CUtensorMap) by which kernels copy boxes of x [rows, columns], 16 bits each: box columns, of 128 bytes and swizzled as those are,
    and box rows. What lies past x is read as zeros. Rows must start at multiples of 16 bytes."""
    memory = (ctypes.c_uint64 * 24)()  # 128 bytes that start at a multiple of 64
    at = (-ctypes.addressof(memory)) % 64 // 8
    descriptor = (ctypes.c_uint64 * 16).from_buffer(memory, 8 * at)
    rows, columns = x.shape
    _check(
        _driver().cuTensorMapEncodeTiled(
            descriptor, _UINT16, 2, ctypes.c_void_p(x.data_ptr()), (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(2 * x.stride(0)), (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1),
            0, _SWIZZLE_128B, _PROMOTION_256B, 0,
        ),
        "cuTensorMapEncodeTiled",
    )  # fmt: skip
    return descriptor


class CudaFunction:
    """A function of a compiled module with fixed block size, cluster and shared memory.

    threads a block; cluster: blocks along y that share memory (1: none); shared: bytes of dynamic shared memory; dependent:
    may start before the preceding kernel has ended (the kernel must wait itself)."""

    def __init__(self, module: Any, name: str, *, threads: int, cluster: int, shared: int, dependent: bool) -> None:
        self._module = module  # keeps the code loaded
        self._function = ctypes.c_void_p(module.get_function(name).kernel.ptr)
        self._launch = _driver().cuLaunchKernelEx
        if shared > 48 << 10:
            _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
        attributes = []
        if cluster > 1:
            attributes.append(_attribute(_CLUSTER_DIMENSION, 1, cluster, 1))
        if dependent:
            attributes.append(_attribute(_PROGRAMMATIC_SERIALIZATION, 1))
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self._config = _Config(shared=shared, attributes=self._attributes, count=len(attributes))
        self._config.block[:] = (threads, 1, 1)
        self._cluster = cluster

    def __call__(
        self, x: int, z: int, pointers: tuple[int, ...], numbers: tuple[int, ...], *, y: int | None = None, first: Any = None
    ) -> None:
        """Launch x * y * z blocks (y: the cluster's size unless given) with `first`, if there is one (a ctypes object that the kernel takes by value),
        these addresses, then these int32."""
        values = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_int, numbers)]
        if first is not None:
            values.insert(0, first)
        params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        config = self._config
        config.grid[:] = (x, y or self._cluster, z)
        config.stream = torch.cuda.current_stream().cuda_stream
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
