"""Triton operators as an Octavo plugin. Importing this package loads neither torch nor triton."""

from __future__ import annotations

from typing import Any

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_ops_triton.provider import provider as fused


@hookimpl
def register_operators() -> list[Provider]:
    return [fused]


@hookimpl
def engine_ready(engine: Any) -> None:
    if engine.explain.get("device", {}).get("type") == "cuda":
        from octavo_ops_triton import compiles

        compiles.tell()
