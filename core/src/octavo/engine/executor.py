"""InlineExecutor: the model runs in the engine's own process, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.catalog import Options
from octavo.interfaces import Handle, Runner
from octavo.request import Batch, TableUpdate


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """runner builds one device's runner; asynchronous says whether its `submit` returns before the
    device is done (a GPU), so that one batch ahead pays."""

    runner: Callable[[], Runner]
    asynchronous: bool


class InlineExecutor:
    """interfaces.Executor with one runner. depth is 1 on an asynchronous device: the host prepares
    step N + 1 while the device computes step N; 0 otherwise."""

    def __init__(self, options: Options, parts: ExecutorParts) -> None:
        self.depth = 1 if parts.asynchronous else 0
        self._runner = parts.runner()

    def submit(self, batch: Batch) -> Handle:
        return self._runner.submit(batch)

    def resize(
        self, num_blocks: int, tables: Sequence[TableUpdate], copies: Sequence[tuple[int, np.ndarray, np.ndarray]]
    ) -> None:
        self._runner.resize(num_blocks, tables, copies)

    def close(self) -> None:
        pass
