"""Octavo: an LLM inference and serving engine. These are the public names, and nothing else.

Importing `octavo` loads no kernel, no torch and no FastAPI; each name is resolved when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.hookspecs import hookimpl

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.llm import LLM
    from octavo.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__", "hookimpl"]

_LAZY = {"LLM": "octavo.engine.llm", "AsyncLLM": "octavo.engine.async_llm", "SamplingParams": "octavo.request"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
