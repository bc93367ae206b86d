"""CPU kernels as an Octavo plugin. Importing this package loads neither torch nor llvmlite."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_ops_cpu.provider import attention_provider, operators_provider


@hookimpl
def register_operators() -> list[Provider]:
    return [operators_provider]


@hookimpl
def register_attention_backends() -> list[Provider]:
    return [attention_provider]
