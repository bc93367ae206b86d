"""Raw CUDA paged attention as an Octavo plugin. Importing this package loads neither torch nor cupy."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_attention_cupy.provider import provider


@hookimpl
def register_attention_backends() -> list[Provider]:
    return [provider]
