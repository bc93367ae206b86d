"""4-bit weights as an Octavo plugin. Importing this package loads neither torch nor a kernel."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_quant_awq.provider import awq, gptq, pack_quantized


@hookimpl
def register_quantizers() -> list[Provider]:
    return [awq, gptq, pack_quantized]
