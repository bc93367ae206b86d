"""From a kernel written with an Emitter to a function that Python calls.

Owns the machine code of this process: the host's target, one LLVM module for each kernel, and the way a kernel is
spread over threads. Threads are those of torch's own OpenMP pool, entered through the symbol that torch's kernels enter
it by: a pool of our own would fight with it for the same cores, since both spin while they wait. They are as many as torch
was last told (`torch.set_num_threads`), at every call.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from octavo.errors import PluginError

from octavo_ops_cpu.jit.emitter import I32, I64, Emitter, Value

log = logging.getLogger(__name__)

Body = Callable[..., None]
"""body(emitter, thread, threads, *arguments): writes what one thread does; all but the emitter are integer Values."""

_POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def target() -> llvm.TargetMachine:
    """This machine, with every instruction it has."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    # LLVM holds back on 512-bit vectors, for processors that lower their clock for them; kernels here choose their width.
    flags = features.flatten() + ",-prefer-256-bit"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=3, jit=True, codemodel="jitdefault"
    )


@cache
def features() -> frozenset[str]:
    """LLVM's names of the instruction sets of this processor."""
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


@cache
def lanes() -> int:
    """float32 lanes of this processor's widest vectors; 4 where it has neither AVX-512 nor AVX."""
    found = features()
    return 16 if "avx512f" in found else 8 if "avx" in found else 4


def thread_pool() -> ctypes.CDLL:
    """The OpenMP library that torch runs on. PluginError where it cannot be entered.

    Its functions are looked up from libtorch_cpu, whose dependency it is, so that no other copy in the process is met."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    handle = ctypes.CDLL(str(library))
    for name in _POOL:
        if not hasattr(handle, name):
            raise PluginError(
                f"torch's OpenMP library has no {name}: it is neither libgomp nor compatible with it, and kernels run on its threads; "
                "uninstall octavo-ops-cpu to go without them"
            )
    return handle


@cache
def link_thread_pool() -> None:
    """Make the pool's functions known to LLVM, once."""
    handle = thread_pool()
    for name in _POOL:
        llvm.add_symbol(name, ctypes.cast(getattr(handle, name), ctypes.c_void_p).value)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The same function twice: `pooled` runs on torch's threads, `alone` on the caller's, for work that is done before
    another thread could start. Both take 64-bit integers: addresses of living memory, sizes, `float_bits`."""

    pooled: Callable[..., None]
    alone: Callable[..., None]


def compile_kernel(name: str, count: int, body: Body, width: int | None = None) -> Kernel:
    """`body` with `count` arguments, in vectors of `width` float32 (default: the processor's). Takes 20 to 400 ms."""
    module = ir.Module(name)
    module.triple, module.data_layout = target().triple, str(target().target_data)
    began = time.perf_counter()
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (count + 2)), f"{name}_work")
    work.linkage = "internal"
    emitter = Emitter(ir.IRBuilder(work.append_basic_block("entry")), width or lanes())
    body(emitter, *(Value(emitter, argument) for argument in work.args))
    emitter.b.ret_void()
    entries = {"alone": _alone(module, count, work), "pooled": _pooled(module, count, work)}
    engine = _machine_code(module)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)
    functions = {key: kind(engine.get_function_address(entry.name)) for key, entry in entries.items()}
    log.debug("compiled %s in %.0f ms", name, (time.perf_counter() - began) * 1e3)
    return Kernel(**functions)


def _alone(module: ir.Module, count: int, work: ir.Function) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), "alone")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    b.call(work, [ir.Constant(I64, 0), ir.Constant(I64, 1), *function.args])
    b.ret_void()
    return function


def _pooled(module: ir.Module, count: int, work: ir.Function) -> ir.Function:
    """The arguments go to every thread as one array, and each asks OpenMP which thread it is."""
    link_thread_pool()
    pointer = I64.as_pointer()
    on_thread = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "on_thread")
    on_thread.linkage = "internal"
    b = ir.IRBuilder(on_thread.append_basic_block("entry"))
    arguments = [b.load(b.gep(on_thread.args[0], [ir.Constant(I64, i)], source_etype=I64), typ=I64) for i in range(count)]
    asked = (ir.Function(module, ir.FunctionType(I32, []), name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    b.call(work, [*(b.zext(b.call(function, []), I64) for function in asked), *arguments])
    b.ret_void()

    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), "pooled")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    array = b.alloca(I64, size=count)
    for i, argument in enumerate(function.args):
        b.store(argument, b.gep(array, [ir.Constant(I64, i)], source_etype=I64))
    start = ir.Function(module, ir.FunctionType(ir.VoidType(), [on_thread.type, pointer, I32, I32]), "GOMP_parallel")
    as_told, no_flags = ir.Constant(I32, 0), ir.Constant(I32, 0)  # 0 threads: the number that the pool was told last
    b.call(start, [on_thread, array, as_told, no_flags])
    b.ret_void()
    return function


_ENGINES: list[Any] = []
"""Compiled modules: their code must live as long as the process."""


def _machine_code(module: ir.Module) -> Any:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(target(), tuning)
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, target())
    engine.finalize_object()
    _ENGINES.append(engine)
    return engine
