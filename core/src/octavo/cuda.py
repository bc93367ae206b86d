"""CUDA source to kernels, and their launch with what CuPy's launch does not pass: clusters, dependent launch, tensor maps.

For plugins that bring CUDA kernels; the engine itself imports this nowhere. Owns the way to the driver. CuPy, which is imported when
something is compiled and not before, compiles with NVRTC and keeps the results on disk. A launch goes to torch's current stream and may be
captured; compiling and loading may not.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""The driver's library."""

_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _PREFERRED_CARVEOUT = 8, 9  # CUfunction_attribute: ..._SHARED_SIZE_BYTES, ..._SHARED_MEMORY_CARVEOUT
_DATA_TYPES = {1: 0, 2: 1}  # bytes of an element -> CUtensorMapDataType, unsigned integers
_SWIZZLE_128B, _PROMOTE_256B = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
_ALWAYS_ALLOWED = 48 << 10  # bytes of shared memory that need no permission
_permissions = threading.Lock()


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes of which the first words are used."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """CUtensorMap: by which the copy engine reads boxes of a matrix. Made by `tensor_map`, passed to a kernel by value."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(matrix: Tensor, box: tuple[int, int]) -> TensorMap:
    """Of matrix [R, C] with elements of one or two bytes and rows that start at multiples of 16 bytes: boxes of box[0] columns, which are 128
    bytes, and box[1] rows, at most 256. Each row of a box is under the 128-byte swizzle; what lies past the matrix reads as zeros. The map
    holds the address only: the matrix must live on. Raises RuntimeError with the matrix's shape where the driver refuses."""
    memory = (ctypes.c_uint64 * 24)()  # 128 bytes that start at a multiple of 64
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)
    (rows, columns), size = matrix.shape, matrix.element_size()
    status = driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), _DATA_TYPES[size], 2, ctypes.c_void_p(matrix.data_ptr()), (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(size * matrix.stride(0)), (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1),
        0, _SWIZZLE_128B, _PROMOTE_256B, 0,
    )  # fmt: skip
    check(status, f"a tensor map of boxes {list(box)} for a matrix {[rows, columns]} at {matrix.data_ptr():#x}")
    return made


def compile_source(source: str, macros: Mapping[str, int], device: torch.device, *, features: str = "") -> Any:
    """A module of `source` with these macros, for `device`; `Function` takes its functions by name. features: what is appended to the
    architecture, such as "a" for the instructions of one generation alone. Needs CuPy; raises its CompileException with NVRTC's log."""
    import cupy

    major, minor = torch.cuda.get_device_capability(device)
    options = (f"-arch=sm_{major}{minor}{features}", *(f"-D{name}={value}" for name, value in sorted(macros.items())))
    with cupy.cuda.Device(device.index or 0):
        return cupy.RawModule(code=source, options=options)


class Function:
    """A function of a compiled module with fixed block size, cluster and shared memory.

    threads a block; cluster: blocks along y that share memory (1: none); shared: bytes of dynamic shared memory; dependent: it may start
    before the kernel in front has ended, and must wait for that itself. prefer_shared: a multiprocessor that runs it shall have as much
    shared memory as it can. Between that and L1 a multiprocessor has one division at a time, so blocks of kernels that want different
    ones never run on it together."""

    def __init__(
        self,
        module: Any,
        name: str,
        *,
        threads: int,
        cluster: int = 1,
        shared: int = 0,
        dependent: bool = False,
        prefer_shared: bool = False,
    ) -> None:
        self.cluster = cluster
        self._module = module  # keeps the code loaded
        self._what = f"kernel {name} with blocks of {threads} threads in clusters of {cluster}, {shared} bytes of shared memory"
        self._function = ctypes.c_void_p(module.get_function(name).kernel.ptr)
        self._launch = driver().cuLaunchKernelEx
        if shared > _ALWAYS_ALLOWED:
            self._allow(shared)
        if prefer_shared:
            self._set(_PREFERRED_CARVEOUT, 100)
        attributes = []
        if cluster > 1:
            attributes.append(_attribute(_CLUSTER_DIMENSION, 1, cluster, 1))
        if dependent:
            attributes.append(_attribute(_PROGRAMMATIC_SERIALIZATION, 1))
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self._config = _Config(shared=shared, attributes=self._attributes, count=len(attributes))
        self._config.block[:] = (threads, 1, 1)

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Sequence[int],
        numbers: Sequence[int | float],
        *,
        by_value: Sequence[TensorMap] = (),
    ) -> None:
        """Launch `grid` blocks on these tensor maps, then these addresses, then these numbers, int32 or float32 by their type. Raises
        RuntimeError that names the kernel if the driver refuses."""
        plain = (ctypes.c_float(n) if isinstance(n, float) else ctypes.c_int(n) for n in numbers)
        values = [*by_value, *map(ctypes.c_void_p, pointers), *plain]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config = self._config
        config.grid[:] = grid
        config.stream = torch.cuda.current_stream().cuda_stream
        status = self._launch(ctypes.byref(config), self._function, arguments, None)
        if status:
            check(status, f"{self._what}: the launch of {' x '.join(map(str, grid))} blocks")

    def _allow(self, shared: int) -> None:
        """Never less than before: modules of one source and the same macros are one, and so are their functions, whose launches may need more."""
        with _permissions:
            allowed = ctypes.c_int()
            check(driver().cuFuncGetAttribute(ctypes.byref(allowed), _MAX_DYNAMIC_SHARED, self._function), self._what)
            if shared > allowed.value:
                self._set(_MAX_DYNAMIC_SHARED, shared)

    def _set(self, attribute: int, value: int) -> None:
        check(driver().cuFuncSetAttribute(self._function, attribute, value), self._what)


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises OSError where there is none."""
    return ctypes.CDLL(DRIVER)


def check(status: int, what: str) -> None:
    """Raises RuntimeError with the driver's words for a status that is not success."""
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(
            f"{what}: the driver refused: {(name.value or b'unknown error').decode()} ({status}): {(text.value or b'').decode()}"
        )


def _attribute(kind: int, *words: int) -> _Attribute:
    made = _Attribute(id=kind)
    for i, word in enumerate(words):
        made.value[i] = word
    return made
