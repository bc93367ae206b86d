"""Raw CUDA paged attention as an Octavo plugin. Importing this package loads neither torch nor cupy."""

from __future__ import annotations

from dataclasses import replace

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_attention_cupy.provider import missing, provider


@hookimpl
def register_attention_backends() -> list[Provider]:
    lacks = missing()
    return [replace(provider, summary=f"{provider.summary}; cannot run here: {lacks}") if lacks else provider]
