"""Triton paged attention as an Octavo plugin. Importing this package loads neither torch nor triton."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_attention_triton.latent_provider import provider as latent_provider
from octavo_attention_triton.provider import provider as paged


@hookimpl
def register_attention_backends() -> list[Provider]:
    return [paged, latent_provider]
