"""Where the model runs. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.request import Batch, Result, TableUpdate


class Handle(Protocol):
    """A submitted step."""

    def done(self) -> bool: ...

    def wait(self) -> Result:
        """Block until the result is on the host. Raises what the step raised."""


class Executor(Protocol):
    """Where the model runs. `depth`: steps that may be in flight besides the one being waited for
    (0 where the device is synchronous, 1 for one GPU, plus pipeline stages - 1)."""

    depth: int

    def submit(self, batch: Batch) -> Handle:
        """Submit in order; results come in the same order."""

    def resize(
        self,
        num_blocks: int,
        tables: Sequence[TableUpdate],
        copies: Sequence[tuple[int, np.ndarray, np.ndarray]],
    ) -> None:
        """Change the pool's size, between steps: after the copies and table changes (as in a Batch) and, where it
        shrinks, after all that was submitted. MemoryError, with nothing changed, where memory for a growth
        is missing. Called only where the configuration asks for a pool that changes its size."""

    def close(self) -> None: ...


class Runner(Protocol):
    """One device's part of an executor: state table, buffers, model, sampler."""

    def submit(self, batch: Batch) -> Handle: ...

    def resize(
        self,
        num_blocks: int,
        tables: Sequence[TableUpdate],
        copies: Sequence[tuple[int, np.ndarray, np.ndarray]],
    ) -> None: ...
