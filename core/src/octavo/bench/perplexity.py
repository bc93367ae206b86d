"""Perplexity of a text through the engine: what a weight format, a KV dtype or a kernel costs in quality.

Owns how a text is cut: windows of equal length that do not overlap, each starting with the model's bos where it has one,
every token of the text scored once, in the context of its window alone. The engine's own prompt log-probabilities are
the scores, so that whatever serves a request is what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.record import surroundings
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.errors import ConfigError, OctavoError
from octavo.model.source import resolve_source
from octavo.plugins import discover
from octavo.request import Request, SamplingParams, check_request
from octavo.text.tokenizer import Tokenizer

Tell = Callable[..., None]
"""tell(stage, done=0, total=0)"""


def windows(ids: Sequence[int], length: int, bos: int | None = None) -> list[list[int]]:
    """ids in windows of `length` tokens; bos, if given, is put before each. A last one of fewer than two
    tokens has nothing to score and is left out."""
    start = [] if bos is None else [bos]
    body = length - len(start)
    found = [start + list(ids[at : at + body]) for at in range(0, len(ids), body)]
    return [window for window in found if len(window) >= 2]


def score(engine: Engine, texts: Sequence[Sequence[int]], tell: Tell = lambda *_: None) -> list[list[float]]:
    """Natural log-probability of every token but the first, for each text (token ids). OctavoError if a request fails.
    The texts are queued at once; the prefix cache is not used, because a prompt whose scores are wanted is computed whole."""
    found: dict[str, list[float]] = {}
    for number, ids in enumerate(texts):
        params = check_request(
            list(ids), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0), engine.info
        )
        engine.add(Request(id=f"ppl-{number}", prompt=list(ids), params=params, eos_token_ids=engine.info.eos_token_ids))
    while engine.busy:
        for event in engine.step().events:
            if event.error:
                raise OctavoError(f"window {event.request_id} failed: {event.error}")
            if event.prompt_logprobs is not None:
                found[event.request_id] = [item.logprob for item in event.prompt_logprobs if item is not None]
        tell("scoring", len(found), len(texts))
    return [found[f"ppl-{number}"] for number in range(len(texts))]


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative log-probability over all tokens of all windows."""
    flat = [value for window in logprobs for value in window]
    return math.exp(-math.fsum(flat) / len(flat))


def measure(
    config: EngineConfig, text: str, *, window: int, limit: int | None = None, tell: Tell = lambda *_: None
) -> dict[str, Any]:
    """The whole record of one model on one text: perplexity, tokens scored, and how the engine was built. limit: windows
    at most. ConfigError where the context is shorter than a window, or the text than two tokens."""
    source = resolve_source(config.model, config.revision)
    tokenizer = Tokenizer.from_source(source, config)
    texts = windows(tokenizer.encode(text, add_special=False), window, tokenizer.bos_id if tokenizer.add_bos else None)[:limit]
    if not texts:
        raise ConfigError("--text: the text has fewer than two tokens: there is nothing to score")
    engine = build_engine(config, discover(config.plugins), progress=tell)
    if engine.info.max_model_len <= window:
        raise ConfigError(f"--window {window}: must be shorter than the model's context of {engine.info.max_model_len} tokens")
    record = surroundings()
    began = time.perf_counter()
    logprobs = score(engine, texts, tell)
    wall = time.perf_counter() - began
    record |= {
        "benchmark": "perplexity",
        "model": engine.info.model,
        "perplexity": perplexity(logprobs),
        "tokens": sum(map(len, logprobs)),
        "window": window,
        "wall_s": wall,
        "explain": engine.explain,
    }
    engine.close()
    return record
