"""Rehearsal: a step of each kind before the first is needed, for whoever compiles their kernels side by side.

Owns which steps those are. The operator ("compile_ahead", "plain") is a context within which kernels are compiled and not launched; the steps
belong to the state table's scratch row, so that what does run touches no block of a sequence. What a rehearsal leaves out is compiled
when it is needed: it makes a start shorter and changes nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from octavo.interfaces import Limits

log = logging.getLogger(__name__)

CompileAhead = Callable[[], AbstractContextManager[Any]]
"""Yields an object with `compiled` and `fetched`, kernels that are ready, and `all_fetched()`: so far all came from the cache on disk."""

ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 256)
"""Decoding rows. Kernels for few rows differ from those for many, and rows that share a prefix have some of their own."""
SHARED_TOKENS = 4096
PROMPTS = (16, 100, 300, 1024, 2048)
"""Tokens of a prompt, computed beside a row that decodes."""


class Rehearsed(Protocol):
    """What a runner offers: a step of so many rows whose last token is at `position`, or one row and a prompt."""

    def rehearse(self, rows: int, position: int) -> None: ...

    def rehearse_prompt(self, tokens: int) -> None: ...


def rehearse(runner: Rehearsed, limits: Limits, ahead: CompileAhead) -> None:
    """Compile what steps within these limits launch; nothing more where what a prompt and a few rows take lies in the cache on disk."""
    began = time.perf_counter()
    with ahead() as found:
        for count, step in enumerate(_steps(runner, limits), 1):
            step()
            if count == 2 and found.all_fetched():
                break
    log.info("kernels: %d compiled, %d fetched in %.1f s", found.compiled, found.fetched, time.perf_counter() - began)


def _steps(runner: Rehearsed, limits: Limits) -> Iterator[Callable[[], None]]:
    longest = min(limits.max_model_len, limits.max_num_batched_tokens - 1)
    prompts = sorted({min(tokens, longest) for tokens in PROMPTS}, reverse=True)
    rows = sorted({min(rows, limits.max_num_seqs) for rows in ROWS}, reverse=True)
    yield partial(runner.rehearse_prompt, prompts[0])
    for position in (min(SHARED_TOKENS, limits.max_model_len - 1), 0):
        for count in rows:
            yield partial(runner.rehearse, count, position)
    for tokens in prompts[1:]:
        yield partial(runner.rehearse_prompt, tokens)
