"""Grammars: compiled once each, on threads of their own, and kept while they are recent.

Owns the compiler, which is made when the first grammar comes, and how long a compilation may take. The engine's loop asks whether a
grammar is ready and goes on; the sampler takes copies of what is. Knows no request.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

import numpy as np

from octavo.catalog import Options
from octavo.errors import AdmissionRefused
from octavo.grammar import Grammar, GrammarError
from octavo.interfaces import Constraint, GrammarCompiler, GrammarParts

log = logging.getLogger(__name__)

KEPT = 512
"""Compiled grammars that are remembered."""

PATIENCE = 10.0
"""Seconds that a grammar may take to compile, the making of the compiler included."""

THREADS = 2


class NoGrammars:
    """interfaces.GrammarCompiler where there is none."""

    def __init__(self, options: Options, parts: GrammarParts) -> None:
        pass

    def compile(self, grammar: Grammar) -> Constraint:
        raise GrammarError(
            "this server has no grammar provider: install octavo-grammar-llguidance, and leave out --grammar-backend none if it is given"
        )

    def fill(self, states: Sequence[Constraint], masks: np.ndarray) -> None:
        """Never called: there are no states."""


def invalid(message: str) -> AdmissionRefused:
    """What a request with this grammar is told."""
    return AdmissionRefused(message, code="invalid_grammar")


class Grammars:
    """make: builds the compiler (GrammarError where this model cannot have one); called once, on a thread."""

    def __init__(self, make: Callable[[], GrammarCompiler], *, patience: float = PATIENCE) -> None:
        self._make, self.patience = make, patience
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()
        self._known: OrderedDict[Grammar, Future[Constraint]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def prepare(self, grammar: Grammar) -> Future[Constraint]:
        """Begin to compile, unless it is known; its exception is a GrammarError, or a fault."""
        found = self._known.get(grammar)
        if found is None:
            found = self._known[grammar] = self._threads.submit(self._compile, grammar)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return found

    def require(self, grammar: Grammar) -> Constraint:
        """The state of an answer that has not begun, waited for. Raises AdmissionRefused, code "invalid_grammar", or "grammar_failed"
        where the fault is the provider's."""
        future = self.prepare(grammar)
        try:
            error = future.exception(self.patience)
        except Late:
            raise self.late() from None
        if isinstance(error, GrammarError):
            raise invalid(str(error)) from error
        if error is not None:  # of whatever kind, a panic of a library's too: it ends no engine
            self._known.pop(grammar, None)
            log.error("a grammar (%s) could not be compiled", grammar.kind, exc_info=error)
            message = f"the grammar provider failed: {type(error).__name__}: {error}"
            raise AdmissionRefused(message, code="grammar_failed") from error
        return future.result()

    def late(self) -> AdmissionRefused:
        return invalid(f"the grammar was not compiled within {self.patience:g} s: make it simpler")

    def fill(self, states: Sequence[Constraint], masks: np.ndarray) -> None:
        """See interfaces.GrammarCompiler."""
        assert self._compiler is not None  # somebody has made the states
        self._compiler.fill(states, masks)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Constraint:
        with self._making:
            if self._compiler is None:
                self._compiler = self._make()
        return self._compiler.compile(grammar)
