"""The provider: its name and what it accepts. Imports nothing heavy: torch loads when a model is built."""

from __future__ import annotations

from typing import Any

from octavo.catalog import Accept, Needs, Provider, Reject
from octavo.errors import LoadError

from octavo_models_deepseek.config import FAMILIES, read_deepseek


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """Architectures of FAMILIES whose config says nothing that is unknown here."""
    name = needs.facts.get("architecture", "")
    if name not in FAMILIES:
        return Reject(f"architecture {name!r} is not one of {', '.join(FAMILIES)}")
    try:
        config = read_deepseek(needs.facts["config"])
    except LoadError as error:
        return Reject(str(error))
    entry = config.latent + config.rope.dim
    return Accept(reason=f"{name}: a latent cache of {entry} values a token and layer, whatever the {config.num_heads} heads")


provider = Provider(
    name="deepseek",
    kind="model",
    load="octavo_models_deepseek.adapter:DeepseekAdapter",
    priority=20,
    accepts=accepts,
    summary="DeepSeek: latent attention and mixture of experts: " + ", ".join(FAMILIES),
)
