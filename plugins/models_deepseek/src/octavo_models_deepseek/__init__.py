"""DeepSeek models as an Octavo plugin. Importing this package loads no torch."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_models_deepseek.provider import OPERATORS, provider
from octavo_models_deepseek.v4_adapter import provider as v4
from octavo_models_deepseek.windowed import provider as windowed


@hookimpl
def register_model_adapters() -> list[Provider]:
    return [provider, v4, windowed]


@hookimpl
def register_operators() -> list[Provider]:
    return [OPERATORS]
