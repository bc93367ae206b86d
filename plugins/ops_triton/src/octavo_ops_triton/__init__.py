"""Triton operators as an Octavo plugin. Importing this package loads neither torch nor triton."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_ops_triton.provider import provider as fused


@hookimpl
def register_operators() -> list[Provider]:
    return [fused]
