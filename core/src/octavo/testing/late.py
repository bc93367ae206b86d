"""An executor whose results come late, as a plugin: name this module in `discover(extra_modules=...)`
and choose executor "late".

On a CPU every step is done when `submit` returns, so the orders of events that an asynchronous
device produces (stops found too late, aborts of rows in flight, preempted rows whose token is still
to come) never happen. This executor makes them happen deterministically: it computes at once and
lets the engine run `depth` steps ahead of the results.
"""

from __future__ import annotations

from pydantic import Field

from octavo.catalog import Options, Provider
from octavo.engine.executor import ExecutorParts, InlineExecutor
from octavo.engine.runner import ModelRunner
from octavo.hookspecs import hookimpl
from octavo.interfaces import Handle
from octavo.request import Batch, Result


class LateOptions(Options):
    """depth: steps in flight besides the one that is waited for. padded: decode steps go through the padded
    buffers of captured graphs (run eagerly). fail_at: steps (counted from 1) whose
    result raises, fail_submit_at: whose submission does, for fault tests."""

    depth: int = Field(1, ge=0)
    padded: bool = False
    fail_at: tuple[int, ...] = ()
    fail_submit_at: tuple[int, ...] = ()


class LateExecutor(InlineExecutor):
    """InlineExecutor with a chosen depth and injected faults."""

    def __init__(self, options: LateOptions, parts: ExecutorParts) -> None:
        super().__init__(options, parts)
        self.depth = options.depth
        self._options = options
        if options.padded:
            assert isinstance(self._runner, ModelRunner)
            self._runner.use_graphs(capture=False)

    def submit(self, batch: Batch) -> Handle:
        if batch.step in self._options.fail_submit_at:
            raise RuntimeError(f"injected fault at the submission of step {batch.step}")
        handle = super().submit(batch)
        return _Fault(batch.step) if batch.step in self._options.fail_at else handle


class _Fault:
    def __init__(self, step: int) -> None:
        self._step = step

    def done(self) -> bool:
        return True

    def wait(self) -> Result:
        raise RuntimeError(f"injected fault in step {self._step}")


@hookimpl
def register_executors() -> list[Provider]:
    return [
        Provider(
            name="late",
            kind="executor",
            load="octavo.testing.late:LateExecutor",
            options=LateOptions,
            summary="computes at once, answers late: for tests",
        )
    ]
