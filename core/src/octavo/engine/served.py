"""Served: one model of a table, its state, and the leases of the requests that hold it.

Owns what a request may count on: while a lease is held, the engine behind it is not ended by the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Literal, Self

import psutil

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import AdmissionRefused, EngineDead

State = Literal["loading", "serving", "restarting", "drained", "dead"]

RETRY_SECONDS = 2.0
"""What a client is told to wait while a model loads or starts again."""


class Served:
    """One model of the table. `generation` counts loads over the table's life, so that two engines of one
    name are never taken for each other; `requests` hold it; `error` says why it is dead or starting again; `warm`:
    its engines run a warm-up before they serve."""

    def __init__(self, name: str, config: EngineConfig, generation: int) -> None:
        self.name, self.config, self.generation = name, config, generation
        self.state: State = "loading"
        self.error: str | None = None
        self.restarts = 0
        self.warm = False
        self.requests = 0
        self.since = time.time()
        self.idle = asyncio.Event()
        self.idle.set()
        self._llm: AsyncLLM | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The engine, whatever its state. Raises AdmissionRefused before there is one."""
        if self._llm is None:
            raise AdmissionRefused("The model is still loading.", code="loading", retry_after=RETRY_SECONDS)
        return self._llm

    @property
    def hung(self) -> bool:
        """Whether its engine stopped answering and none has taken its place yet."""
        return self.state == "restarting" and self._llm is not None and self._llm.hung

    @property
    def present(self) -> bool:
        return self._llm is not None

    def put(self, llm: AsyncLLM | None, state: State) -> None:
        self._llm, self.state, self.since = llm, state, time.time()

    def refusal(self) -> Exception | None:
        """Why a new request cannot have this model now, None where it can."""
        match self.state:
            case "serving":
                return None if self.llm.alive else EngineDead(self.llm.dead_reason or "its process is gone")
            case "dead":
                return EngineDead(self.error or "its process is gone")
            case "drained":
                return AdmissionRefused(f"The model {self.name!r} takes no new requests.", code="draining", retry_after=5.0)
            case "restarting":
                return AdmissionRefused(
                    f"The model {self.name!r} is starting again after a crash.", code="restarting", retry_after=RETRY_SECONDS
                )
        return AdmissionRefused("The model is still loading.", code="loading", retry_after=RETRY_SECONDS)

    def planned_bytes(self) -> int:
        """Weights and KV cache, as the engine's plan has them."""
        if self._llm is None or not self._llm.explain:
            return 0
        told = self._llm.explain
        return int(told["model"]["weight_bytes"]) + int(told["kv_cache"]["bytes"])

    def resident_bytes(self) -> int:
        """What the engine's process holds of the machine's memory now; 0 when it is gone."""
        with contextlib.suppress(psutil.Error):
            if self._llm is not None and self._llm.pid is not None:
                return int(psutil.Process(self._llm.pid).memory_info().rss)
        return 0


class Lease:
    """A request's hold on a model: while it lasts the engine stays. `release` is idempotent."""

    def __init__(self, model: Served) -> None:
        self.model, self.llm = model, model.llm
        self._held = True
        model.requests += 1
        model.idle.clear()

    def release(self) -> None:
        if self._held:
            self._held = False
            self.model.requests -= 1
            if not self.model.requests:
                self.model.idle.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
