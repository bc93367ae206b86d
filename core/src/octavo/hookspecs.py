"""Every hook of Octavo, on one screen.

All `register_*` hooks take no argument and return a list of Providers; they run once per process,
at start, and never during a step. Implement one in a module or package, mark it with
`octavo.hookimpl`, and name that module in the entry-point group ``octavo``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from octavo.catalog import Provider

PROJECT = "octavo"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_allocators() -> list[Provider]:  # type: ignore[empty-body]
    """Block bookkeeping (ids only, no tensors): `octavo.interfaces.Allocator`."""


@hookspec
def register_schedulers() -> list[Provider]:  # type: ignore[empty-body]
    """Who runs next: `octavo.interfaces.Scheduler`."""


@hookspec
def register_attention_backends() -> list[Provider]:  # type: ignore[empty-body]
    """Paged attention kernels and the cache layout they like: `octavo.interfaces.AttentionBackend`."""


@hookspec
def register_quantizers() -> list[Provider]:  # type: ignore[empty-body]
    """Weight formats, the Linear of a layer, its loading and kernels: `octavo.interfaces.Quantizer`."""


@hookspec
def register_model_adapters() -> list[Provider]:  # type: ignore[empty-body]
    """Model architectures: `octavo.interfaces.ModelAdapter`."""


@hookspec
def register_operators() -> list[Provider]:  # type: ignore[empty-body]
    """Fused norm, RoPE, activation, sampler, input building: `octavo.interfaces.Operators`."""


@hookspec
def register_executors() -> list[Provider]:  # type: ignore[empty-body]
    """Where the model runs (this process, one process a GPU, ...): `octavo.interfaces.Executor`."""


@hookspec
def register_grammars() -> list[Provider]:  # type: ignore[empty-body]
    """Which tokens a grammar allows (JSON schemas, patterns, grammars): `octavo.interfaces.GrammarCompiler`."""


@hookspec
def register_tool_parsers() -> list[Provider]:  # type: ignore[empty-body]
    """How a family of models writes calls of functions: `octavo.interfaces.ToolFormat`."""


@hookspec
def engine_ready(engine: object) -> None:
    """Called once in the engine's process after the build, for observers."""
