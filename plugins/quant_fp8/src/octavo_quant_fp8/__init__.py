"""FP8 weights as an Octavo plugin. Importing this package loads neither torch nor triton."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_quant_fp8.provider import OPERATORS, QUANTIZER


@hookimpl
def register_quantizers() -> list[Provider]:
    return [QUANTIZER]


@hookimpl
def register_operators() -> list[Provider]:
    return list(OPERATORS)
