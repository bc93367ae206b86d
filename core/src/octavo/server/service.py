"""Service: what every route needs: the table of models, metrics, configuration.

Owns which model a request gets and the account that is kept of it. Holds no request itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.models import ModelTable
from octavo.engine.served import RETRY_SECONDS, Lease, Served
from octavo.errors import AdmissionRefused, UnknownModel
from octavo.request import EngineStats
from octavo.server.counts import Counts
from octavo.server.errors import ApiError, model_not_found
from octavo.server.gpu import Gpus
from octavo.server.metrics import Metrics, View
from octavo.server.pace import Pace
from octavo.server.records import Record, new_id
from octavo.server.tenants import Principal, Tenants
from octavo.server.tracing import Tracing
from octavo.server.watch import LoopWatch


class Service:
    """names: what clients may ask for while the table is still empty. Everything that needs an engine
    answers 503 until the first one serves."""

    def __init__(
        self, config: ServerConfig, names: Sequence[str], models: ModelTable | None = None, *, gpus: Gpus | None = None
    ) -> None:
        self.config, self.models = config, models or ModelTable()
        self.tenants = Tenants(config)
        self.started = int(time.time())
        self.draining = False
        self.gpus = gpus or Gpus()
        self.tracing = Tracing(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
        self._names = list(names)
        self._loaded = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts: dict[str, Counts] = {}
        self.watch, self.pace = LoopWatch(), Pace()
        self._metrics = Metrics(
            self._views, vllm_names=config.vllm_metrics, gpus=self.gpus, watch=self.watch, tenants=self.tenants
        )
        self.models.on_engine(self._on_engine)

    def attach(self, llm: AsyncLLM) -> None:
        """Serve an engine that runs already, under the first of the names; the others become aliases of it."""
        self.models.adopt(self._names[0], llm)
        for alias in self._names[1:]:
            self.models.set_alias(alias, {self._names[0]: 1.0})

    def _on_engine(self, model: Served) -> None:
        self._loaded = True
        model.llm.on_events(self.counts(model.name).observer())

    # ------------------------------------------------------------ state

    @property
    def loaded(self) -> bool:
        """Whether an engine has served yet."""
        return self._loaded

    @property
    def alive(self) -> bool:
        """False before the first engine serves, once one has died and will not be started again, and from when one
        was found hung until its successor serves: what made it hang (a driver, a device) may outlast a restart."""
        return self._loaded and not any(model.state == "dead" or model.hung for model in self.models.models)

    @property
    def ready(self) -> bool:
        """Whether a request that names no model would be taken, and no model of the start is still loading."""
        if not self._loaded or self.draining:
            return False
        states = {model.state for model in self.models.models}
        return self.models.takes() and "loading" not in states

    @property
    def requests(self) -> int:
        """Requests that hold a model now, those of models on their way out too."""
        return sum(model.requests for model in [*self.models.models, *self.models.leaving])

    @property
    def names(self) -> list[str]:
        """What clients may ask for: models, then aliases."""
        return self.models.names or self._names

    @property
    def llm(self) -> AsyncLLM:
        """The default model's engine, whatever its state. Raises ApiError 503 while it loads."""
        return self.engine(None)

    def engine(self, name: str | None) -> AsyncLLM:
        """The engine behind a served name, whatever its state. Raises ApiError 503 while it loads, 404."""
        self._refuse_unloaded()
        try:
            return self.models.find(name).llm
        except UnknownModel:
            raise model_not_found(name or "", self.names) from None

    @property
    def metrics(self) -> Metrics:
        """Raises ApiError 503 while the first model loads."""
        self._refuse_unloaded()
        return self._metrics

    def _refuse_unloaded(self) -> None:
        if not self._loaded:
            raise ApiError(503, "The model is still loading.", code="loading", headers={"Retry-After": f"{RETRY_SECONDS:g}"})

    def load(self) -> dict[str, float]:
        """The answer of GET /load, over all models."""
        self._refuse_unloaded()
        stats = [view.stats for view in self._views()]
        return {
            "server_load": sum(counts.in_flight for counts in self._counts.values()),
            "running": sum(s.running for s in stats),
            "waiting": sum(s.waiting for s in stats),
            "kv_cache_usage": max((s.kv_usage for s in stats), default=0.0),
        }

    def counts(self, model: str) -> Counts:
        """What is counted of a model's name, whichever engine runs it."""
        return self._counts.setdefault(model, Counts())

    def count_answer(self, route: str, status: int) -> None:
        """route: the pattern, never the client's path."""
        if self._loaded:
            self._metrics.http[(route, str(status))] += 1

    def _views(self) -> list[View]:
        return [self._view(model) for model in self.models.models]

    def _view(self, model: Served) -> View:
        llm = model.llm if model.present else None
        return View(
            model.name,
            self.counts(model.name),
            llm.stats if llm else EngineStats(),
            llm.info if llm else None,
            alive=llm is not None and llm.alive,
            restarts=model.restarts,
            generation=model.generation,
            requests=model.requests,
            resident=model.resident_bytes(),
        )

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold on to work that nobody may be waiting for any more: the loop itself only knows it weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it, and who did not was told in the log

    # ------------------------------------------------------------ requests

    def open(self, name: str | None = None) -> AsyncLLM:
        """The engine behind a name, for a short question. Raises what refuses a request: ApiError, EngineDead, AdmissionRefused."""
        with self.lease(name) as lease:
            return lease.llm

    def lease(self, name: str | None) -> Lease:
        """Hold a model for a new request; release it when the request has ended. Raises as `open`."""
        self._refuse_unloaded()
        if self.draining:
            raise AdmissionRefused("The server is shutting down.", code="draining", retry_after=5.0)
        try:
            return self.models.lease(name)
        except UnknownModel:
            raise model_not_found(name or "", self.names) from None

    def model(self, name: str | None) -> str:
        """The served name to echo. None or "" is the default. Raises ApiError 404."""
        if not name:
            return self.models.default if self.models.names else self._names[0]
        if name not in self.names:
            raise model_not_found(name, self.names)
        return name

    def priority(self, asked: int | None, request: Request, llm: AsyncLLM | None = None) -> int:
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
        if (llm or self.llm).config.scheduling_policy != "priority":
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

    def record(self, request: Request, lease: Lease) -> Record:
        """The account of a request that begins now and holds a model, which it gives back at its end."""
        record = Record(
            self.counts(lease.model.name),
            getattr(request.scope.get("route"), "path", "other"),
            principal(request).tenant,
            log_line=not self.config.disable_log_requests,
            id=request.scope.get("octavo.request_id") or new_id(),
            model=lease.model.name,
            arrived=time.perf_counter() - request.scope.get("octavo.waited", 0.0),
        )
        record.at_end.append(lambda _: lease.release())
        tracing = self.tracing
        if tracing is not None:
            record.at_end.append(lambda ended: tracing.end(ended, request.headers))
        return record


def principal(request: Request) -> Principal:
    """Who asks; the guard has put it there."""
    found = request.scope.get("state", {}).get("principal")
    return found if isinstance(found, Principal) else Principal()


async def service(request: Request) -> Service:
    """FastAPI's dependency. Not a plain function, since those are called in a thread."""
    found: Any = request.app.state.service
    assert isinstance(found, Service)
    return found


State = Annotated[Service, Depends(service)]
