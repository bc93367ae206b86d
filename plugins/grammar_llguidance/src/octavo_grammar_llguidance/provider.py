"""The provider and its options. Imports nothing heavy: llguidance loads with the compiler."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field


class Limits(Options):
    """Config key `plugins.grammar.llguidance`: what bounds the time and memory of a client's grammar. The first and the last count
    when it is compiled, the others in every step."""

    lexer_fuel: int = Field(1_000_000, ge=1000, description="Work for the patterns of a grammar; about 50,000 a millisecond.")
    step_lexer_fuel: int = Field(
        200_000, ge=1000, description="Work for them in one step of one answer; about 14,000 a millisecond."
    )
    step_items: int = Field(50_000, ge=1000, description="Parser items of one step of one answer; about 20,000 a millisecond.")
    lexer_states: int = Field(50_000, ge=1000, description="States of the patterns of one answer, 1 to 2 kB each.")
    grammar_size: int = Field(500_000, ge=1000, description="Symbols of a grammar.")


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    if find_spec("llguidance") is None:
        return Reject("llguidance is not installed")
    return Accept(reason="JSON schemas, patterns, choices, Lark and GBNF grammars")


PROVIDER = Provider(
    "llguidance",
    "grammar",
    "octavo_grammar_llguidance.compiler:Compiler",
    priority=10,
    accepts=accepts,
    options=Limits,
    summary="JSON schemas, patterns and grammars through llguidance",
)
