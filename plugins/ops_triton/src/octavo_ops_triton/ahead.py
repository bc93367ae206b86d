"""Kernels compiled side by side before any of them is needed: the operator ("compile_ahead", "plain").

A step that nobody has run yet compiles one kernel after the other, each when it is first launched, while all other cores of the
machine idle. Whoever runs such a step within `compile_ahead` launches none of its Triton kernels: each is handed to a pool of
threads. What they would have written is zeros, so that no index leaves its table. Owns that state of Triton, which is the
whole process's; what other threads launch meanwhile is launched. Triton has no interface for it: with a version whose parts are not
those that are replaced here, kernels are compiled when they are first launched, and a warning says so.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

MOST_THREADS = 16
"""A compilation holds the interpreter's lock for a good part of its time: more threads would wait for each other."""

FETCHING = 0.4
"""Seconds within which a few kernels come from the cache on disk."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What of Triton is replaced, or runs in a way that a replaced part relies on."""

    jit: Any
    mode: Any
    active: Any
    knobs: Any

    @classmethod
    def find(cls) -> _Parts:
        """Raises ImportError, AttributeError or TypeError with the name of a part that is not as it is known."""
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction

        known = {
            JITFunction.run: ["self", "args", "grid", "warmup", "kwargs"],
            JITFunction._do_compile: ["self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup"],
            AsyncCompileMode.submit: ["self", "key", "compile_fn", "finalize_fn"],
        }
        for function, names in known.items():
            found = list(inspect.signature(function).parameters)
            if found != names:
                raise TypeError(f"{function.__qualname__} takes {', '.join(found)} instead of {', '.join(names)}")
        _ = knobs.compilation.listener, active_mode.set
        return cls(JITFunction, AsyncCompileMode, active_mode, knobs)


@cache
def usable() -> bool:
    """Whether the installed Triton is one that `compile_ahead` knows. Where not, the first call logs a warning."""
    try:
        _Parts.find()
    except (ImportError, AttributeError, TypeError) as error:
        log.warning(
            "Triton %s: kernels cannot be compiled side by side before they are needed (%s); each is compiled when it is first "
            "launched, so a start with an empty cache of kernels takes longer. Triton 3.6 is known to work.",
            triton.__version__,
            error,
        )
        return False
    return True


@dataclass(slots=True)
class Ahead:
    """started: kernels handed over so far; compiled, fetched: those of them that are done, the latter from the cache on disk."""

    started: dict[Any, Any] = field(default_factory=dict)
    compiled: int = 0
    fetched: int = 0

    def all_fetched(self) -> bool:
        """Whether all that was handed over so far lay in the cache on disk. Waits for it, but not as long as compiling takes."""
        end = time.perf_counter() + FETCHING
        while not self.compiled and self.fetched < len(self.started) and time.perf_counter() < end:
            time.sleep(0.005)
        return len(self.started) == self.fetched > 0


class _Zeros(TorchFunctionMode):
    """New tensors hold zeros. Not a TorchDispatchMode: entering one imports torch._dynamo, which took 5.3 s of a start."""

    EMPTY = frozenset(
        (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self.EMPTY else out


class _Pool(ThreadPoolExecutor):
    """Threads that compile and load kernels for the current device: what launches a kernel is a C module, compiled as well."""

    def __init__(self, threads: int) -> None:
        device = torch.cuda.current_device()
        super().__init__(threads, "compile", lambda: torch.cuda.set_device(device))

    def submit(self, compile: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def ready() -> Any:
            kernel = compile(*args, **kwargs)
            assert kernel.run is not None  # loads it
            return kernel

        return super().submit(ready)


@contextmanager
def compile_ahead(threads: int | None = None) -> Iterator[Ahead]:
    """Within, kernels are compiled and not launched; on leaving, all of them are ready. threads: None for as many as the machine
    has cores for this process. Raises what a compilation raised. Only where Triton is `usable`."""
    ahead, parts = Ahead(), _Parts.find()
    jit, compilation = parts.jit, parts.knobs.compilation
    run, make, before = jit.run, jit._do_compile, compilation.listener
    me, counting = threading.get_ident(), threading.Lock()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != me:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        run(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    def once(self: Any, key: Any, *args: Any) -> Any:
        if threading.get_ident() != me:
            return make(self, key, *args)
        mine = id(self), key
        if mine not in ahead.started:
            ahead.started[mine] = make(self, key, *args)
        return ahead.started[mine]

    def count(*, cache_hit: bool, **rest: Any) -> None:
        with counting:
            ahead.fetched += cache_hit
            ahead.compiled += not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **rest)

    pool = _Pool(threads or min(MOST_THREADS, len(os.sched_getaffinity(0))))
    jit.run, jit._do_compile, compilation.listener = compile_only, once, count
    try:
        with pool, parts.mode(pool), _Zeros():
            yield ahead
    finally:
        jit.run, jit._do_compile, compilation.listener = run, make, before
        parts.active.set(None)  # it leaves itself on where a compilation has failed
