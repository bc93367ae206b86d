"""Compiling CUDA source at run time and launching it with attributes: thread-block clusters and dependent launch.

Owns the way to the driver. CuPy compiles (NVRTC, kept on disk between runs); the launch goes to the driver itself, because
CuPy's passes no attributes. Launches on torch's current stream and may be captured; compiling may not.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
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

    def __call__(self, x: int, z: int, pointers: tuple[int, ...], numbers: tuple[int, ...], *, y: int | None = None) -> None:
        """Launch x * y * z blocks (y: the cluster's size unless given) with these addresses, then these int32."""
        values = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_int, numbers)]
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
