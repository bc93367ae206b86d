"""Service: what every route needs: the engine once it is there, names, metrics, configuration.

Owns the moment at which the engine appears behind a server that already listens. Holds no request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import AdmissionRefused, EngineDead
from octavo.server.errors import ApiError, model_not_found
from octavo.server.metrics import Metrics
from octavo.server.records import Record, new_id
from octavo.server.tenants import Principal, Tenants


class Service:
    """`attach` once, when the engine serves; before that, every route that needs it answers 503."""

    def __init__(self, config: ServerConfig, names: Sequence[str]) -> None:
        self.config, self.names = config, list(names)
        self.tenants = Tenants(config)
        self.started = int(time.time())
        self._llm: AsyncLLM | None = None
        self._metrics: Metrics | None = None

    def attach(self, llm: AsyncLLM) -> None:
        self._llm = llm
        metrics = Metrics(
            self.names[0],
            stats=lambda: llm.stats,
            alive=lambda: llm.alive,
            info=llm.info,
            vllm_names=self.config.vllm_metrics,
        )
        llm.on_events(metrics.on_step)
        self._metrics = metrics

    @property
    def loaded(self) -> bool:
        return self._llm is not None

    @property
    def alive(self) -> bool:
        return self._llm is not None and self._llm.alive

    @property
    def draining(self) -> bool:
        return self._llm is not None and self._llm.draining

    @property
    def llm(self) -> AsyncLLM:
        """The engine, whatever its state. Raises ApiError 503 while it loads."""
        if self._llm is None:
            raise ApiError(503, "The model is still loading.", code="loading", headers={"Retry-After": "2"})
        return self._llm

    @property
    def metrics(self) -> Metrics:
        if self._metrics is None:
            _ = self.llm  # raises
        assert self._metrics is not None
        return self._metrics

    def open(self) -> AsyncLLM:
        """The engine, for a new request. Raises what refuses one: ApiError, EngineDead, AdmissionRefused."""
        llm = self.llm
        if not llm.alive:
            raise EngineDead(llm.dead_reason or "its process is gone")
        if llm.draining:
            raise AdmissionRefused("The server is shutting down.", code="draining", retry_after=5.0)
        return llm

    def model(self, name: str | None) -> str:
        """The served name to echo. None or "" is the first one. Raises ApiError 404."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise model_not_found(name, self.names)
        return name

    def priority(self, asked: int | None, request: Request) -> int:
        """The request's priority, from the body or the header `x-octavo-priority`; lower runs first.

        Without either it is 0, or what the tenant's range has nearest to 0. Raises ApiError where it
        cannot be honoured: a first-come-first-served engine, or a value outside the tenant's range
        (more urgent than --min-priority, where the tenant has none of its own).
        """
        header = request.headers.get("x-octavo-priority")
        param = "priority" if asked is not None else "x-octavo-priority"
        if asked is None and header is not None:
            try:
                asked = int(header)
            except ValueError:
                raise ApiError(
                    400, f"{param}: must be an integer, got {header[:40]!r}", param=param, code="invalid_value"
                ) from None
        low, high = principal(request).priorities(self.config.min_priority)
        if asked is None:
            return min(max(0, low), high)
        if self.llm.config.scheduling_policy != "priority":
            if asked == 0:
                return 0
            raise ApiError(
                400,
                f"{param}: this server runs first come, first served (--scheduling-policy priority honours priorities)",
                param=param,
                code="unsupported",
            )
        if not low <= asked <= high:
            raise ApiError(400, f"{param}: must be in [{low}, {high}], got {asked}", param=param, code="invalid_value")
        return asked

    def record(self, request: Request) -> Record:
        """The account of a request that begins now."""
        return Record(
            self.metrics,
            getattr(request.scope.get("route"), "path", "other"),
            principal(request).tenant,
            log_line=not self.config.disable_log_requests,
            id=request.scope.get("octavo.request_id") or new_id(),
        )


def principal(request: Request) -> Principal:
    """Who asks; the guard has put it there."""
    found = request.scope.get("state", {}).get("principal")
    return found if isinstance(found, Principal) else Principal()


def service(request: Request) -> Service:
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


State = Annotated[Service, Depends(service)]
