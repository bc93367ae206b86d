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
"""Yields an object with `compiled` and `fetched`, kernels that are ready, and `nothing_new`: so far all were fetched from the disk."""

ROWS = (1, 2, 4, 8, 16, 24, 64, 256)
"""Decoding rows. Kernels for few rows differ from those for many, and rows that share a prefix have some of their own."""
SHARED_TOKENS = 4096
PROMPTS = (16, 100, 300, 1024)
"""Tokens of a prompt, computed beside a row that decodes."""


class Rehearsed(Protocol):
    """What a runner offers: a step of so many rows whose last token is at `position`, or one row and a prompt."""

    def rehearse(self, rows: int, position: int) -> None: ...

    def rehearse_prompt(self, tokens: int) -> None: ...


def rehearse(runner: Rehearsed, limits: Limits, ahead: CompileAhead) -> None:
    """Compile what steps within these limits launch; stop at once where all of it lies in the cache on disk."""
    began = time.perf_counter()
    with ahead() as found:
        for step in _steps(runner, limits):
            step()
            if found.nothing_new:
                break
    log.info("kernels: %d compiled, %d fetched in %.1f s", found.compiled, found.fetched, time.perf_counter() - began)


def _steps(runner: Rehearsed, limits: Limits) -> Iterator[Callable[[], None]]:
    longest = min(limits.max_model_len, limits.max_num_batched_tokens - 1)
    for tokens in sorted({min(tokens, longest) for tokens in PROMPTS}, reverse=True):
        yield partial(runner.rehearse_prompt, tokens)
    for rows in sorted({min(rows, limits.max_num_seqs) for rows in ROWS}):
        for position in (0, min(SHARED_TOKENS, limits.max_model_len - 1)):
            yield partial(runner.rehearse, rows, position)
