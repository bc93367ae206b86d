"""llguidance as an Octavo plugin. Importing this package does not load llguidance."""

from __future__ import annotations

from octavo.catalog import Provider
from octavo.hookspecs import hookimpl

from octavo_grammar_llguidance.provider import PROVIDER


@hookimpl
def register_grammars() -> list[Provider]:
    return [PROVIDER]
