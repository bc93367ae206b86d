"""Tokens per KV block where nobody named a number: what model and backend like, as far as it wastes little.

A sequence leaves half of its last block empty on average, and nothing else of a pool of equal blocks is ever wasted. So
of a pool full of sequences of n tokens, blocks of b leave (b / 2) / (n + b / 2) empty. Owns the bound on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.decision import Decision

DEFAULT = 16

MOST_WASTE = 0.05
USUAL_TOKENS = 640
"""What a sequence is taken to hold: a question with some context, or a few turns of a chat. Blocks of 64 leave 4.8% of
a pool full of such sequences empty, blocks of 128 9.1%."""


def waste(block_size: int, tokens: float = USUAL_TOKENS) -> float:
    """Share of a full pool that the ends of sequences of so many tokens leave empty."""
    return block_size / 2 / (tokens + block_size / 2)


def choose_block_size(asked: int | None, recommended: Mapping[str, Any], attention: Decision) -> tuple[int, str]:
    """(tokens per block, why): the size asked for; else the model's recommendation where the backend takes it, else the
    backend's first that wastes at most MOST_WASTE, else its smallest."""
    if asked is not None:
        return asked, f"named in the configuration; {_cost(asked)}"
    name = f"attention {attention.name!r}"
    liked: Sequence[int] = tuple(attention.accept.preferences.get("block_sizes", ()))
    advice = recommended.get("block_size")
    if advice and (not liked or advice in liked):
        return int(advice), f"the model adapter recommends it and {name} takes it; {_cost(advice)}"
    if not liked:
        return DEFAULT, f"neither the model adapter nor {name} has a preference; {_cost(DEFAULT)}"
    size = next((s for s in liked if waste(s) <= MOST_WASTE), min(liked))
    note = f" (the model adapter recommends {advice}, which it does not take)" if advice else ""
    if size == liked[0]:
        return int(size), f"{name} likes it best{note}; {_cost(size)}"
    return int(size), f"{name} likes {liked[0]} best, but {_cost(liked[0])}{note}; {_cost(size)}"


def _cost(size: int) -> str:
    least = round(size / 2 * (1 / MOST_WASTE - 1))
    return (
        f"blocks of {size} leave {waste(size):.1%} empty where sequences hold {USUAL_TOKENS} tokens, and more than "
        f"{MOST_WASTE:.0%} below {least} tokens"
    )
