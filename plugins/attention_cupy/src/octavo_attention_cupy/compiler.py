"""From a CUDA file of this package to a loaded kernel: NVRTC for the chip at hand, and a cache on disk.

Owns the compilation and where its results are kept; knows nothing of attention. Files are compiled with macros, not
templates, so that one .cu file is one kernel. Never compiles or loads while a stream is being captured: the backend asks for
its kernels when it is bound.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo_attention_cupy.launch import DecodeArgs, PlanArgs, PrefillArgs, PrologueArgs, WidenArgs, WriteArgs

HEADERS = (
    "decode_heads.cuh",
    "decode_walk.cuh",
    "integers.cuh",
    "layout.cuh",
    "prefill_args.cuh",
    "prefill_hopper_copy.cuh",
    "prefill_hopper_softmax.cuh",
    "ptx.cuh",
    "spread.cuh",
    "wgmma.cuh",
    "work.cuh",
)
OPTIONS = ("--std=c++17",)
ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "plan": PlanArgs,
    "write": WriteArgs,
    "prologue": PrologueArgs,
    "decode": DecodeArgs,
    "prefill": PrefillArgs,
    "prefill_hopper": PrefillArgs,
    "widen": WidenArgs,
}


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


def source(name: str) -> str:
    """Text of a file in cuda/."""
    return (files("octavo_attention_cupy") / "cuda" / name).read_text(encoding="utf-8")


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "cupy"


def architecture(capability: str) -> str:
    """The real architecture of a compute capability such as "90". Hopper's wgmma is only in its own variant."""
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def options(arch: str, macros: Mapping[str, int]) -> tuple[str, ...]:
    """NVRTC's options for a real architecture such as "sm_90"."""
    return (*OPTIONS, f"--gpu-architecture={arch}", *(f"-D{name}={int(value)}" for name, value in macros.items()))


def with_arguments(name: str, macros: Mapping[str, int]) -> dict[str, int]:
    """`macros`, and the size of the kernel's argument struct here, which the file compares with its own."""
    return {**macros, "ARGS_BYTES": ctypes.sizeof(ARGUMENTS[name])}


def compile_cubin(name: str, arch: str, macros: Mapping[str, int]) -> bytes:
    """Machine code of cuda/<name>.cu. Needs NVRTC, but no GPU. Raises CompileError with NVRTC's log."""
    from cupy.cuda import nvrtc

    headers, names = tuple(source(h).encode() for h in HEADERS), tuple(h.encode() for h in HEADERS)
    program = nvrtc.createProgram(source(f"{name}.cu"), f"{name}.cu", headers, names)
    try:
        nvrtc.compileProgram(program, options(arch, with_arguments(name, macros)))
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{name}.cu for {arch} with {dict(macros)}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def cached_cubin(name: str, arch: str, macros: Mapping[str, int], directory: Path) -> bytes:
    """`compile_cubin`, kept in `directory` under a hash of all that goes in. A file is written whole or not at all."""
    from cupy.cuda import nvrtc

    text = "\0".join(
        [
            source(f"{name}.cu"),
            *(source(h) for h in HEADERS),
            *options(arch, with_arguments(name, macros)),
            str(nvrtc.getVersion()),
        ]
    )
    path = directory / f"{name}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    cubin = compile_cubin(name, arch, macros)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
    return cubin


def load_function(name: str, macros: Mapping[str, int], *, what: str, device: int, shared: int, directory: Path | None) -> Any:
    """The kernel `name` of cuda/<name>.cu, loaded on CUDA device number `device`: a cupy Function, allowed `shared` bytes
    of dynamic shared memory. what: kernel and shape, for errors. Raises CompileError, and RuntimeError if the driver refuses."""
    import cupy
    from cupy.cuda import driver, function

    with cupy.cuda.Device(device) as here:
        arch = architecture(here.compute_capability)
        cubin = cached_cubin(name, arch, macros, directory or default_cache_dir())
        try:
            module = function.Module()
            module.load(cubin)
            loaded = module.get_function(name)
            driver.funcSetAttribute(loaded.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        except driver.CUDADriverError as error:
            raise RuntimeError(
                f"{what}: the driver refused to load it for {arch} with {shared} bytes of shared memory: {error}"
            ) from error
    return loaded
