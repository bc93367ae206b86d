"""Whether one engine's greedy tokens are another's: to the letter in float32, and as good in 16 bits."""

from __future__ import annotations

from typing import Any

from octavo.engine.engine import Engine

from tests.engine.harness import alone, request


def check_tokens(engine: Engine, ask: dict[str, Any], tokens: list[int], dtype: str) -> None:
    """`tokens` are the greedy answer of `engine`, which has room. In float32 to the letter. In 16 bits two orders of a sum may
    disagree on which of two tokens is best: there each token must be within rounding of the best after those before it."""
    if dtype == "float32":
        assert tokens == alone(engine, request(engine, "a", **ask))["a", 0].tokens
        return
    whole = ask | {"prompt": ask["prompt"] + tokens, "max_tokens": 1, "prompt_logprobs": 1}
    given = alone(engine, request(engine, "a", **whole))["a", 0].events[0].prompt_logprobs
    assert given is not None and len(tokens) == ask["max_tokens"]
    for at, entry in enumerate(given[len(ask["prompt"]) :]):
        assert entry is not None and entry.top_logprobs[0] - entry.logprob < 0.1, f"token {at} is not the best, by far: {entry}"
