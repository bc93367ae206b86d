"""ModelTable: which names there are, which engine answers to each, and how engines come and go under load.

Owns names, aliases with weights, leases (the requests that hold a model) and the ledger of bytes. A
name changes hands in one step of the event loop, and an engine ends only when nobody holds it, so a
switch loses no request. Knows no HTTP, no key and no prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from pydantic import ValidationError

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.client import STOP_SECONDS
from octavo.engine.messages import Progress
from octavo.engine.served import Lease, Served
from octavo.engine.split import Split
from octavo.engine.warmup import warm_up
from octavo.errors import ConfigError, EngineDead, UnknownModel
from octavo.wording import complaints, hint

log = logging.getLogger(__name__)

Start = Callable[..., Awaitable[AsyncLLM]]
"""How an engine is started: AsyncLLM.start, or a test's stand-in."""

INHERITED: frozenset[object] = frozenset({"device", "scheduler", "plugins"})
"""Groups of settings that a further model takes over from the first where it says nothing itself."""
OWN = frozenset({"model_adapter", "attention_backend"})
"""Settings of those groups that belong to one model all the same."""
ALSO_INHERITED = frozenset({"enable_prefix_caching", "gpu_memory_utilization"})


def beside(base: EngineConfig, model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration of a further model: `settings` over what it takes from `base`. Raises ConfigError."""
    taken = {name: getattr(base, name) for name in base.model_fields_set if _inherited(name)}
    try:
        return EngineConfig(**{**taken, **settings, "model": model})
    except ValidationError as error:
        raise ConfigError(complaints("model.", EngineConfig, error)) from error


def successor(old: EngineConfig, model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration of a model that takes a name over: whatever is not given is the old one's, but for the revision of another
    model. Raises ConfigError."""
    kept = {name: getattr(old, name) for name in old.model_fields_set if name != "revision" or model == old.model}
    try:
        return EngineConfig(**{**kept, **settings, "model": model})
    except ValidationError as error:
        raise ConfigError(complaints("model.", EngineConfig, error)) from error


def _inherited(name: str) -> bool:
    extra = EngineConfig.model_fields[name].json_schema_extra
    group = extra.get("group") if isinstance(extra, dict) else None
    return name in ALSO_INHERITED or (group in INHERITED and name not in OWN)


class ModelTable:
    """Made empty. `start` starts an engine; whoever `on_engine` was given is called with every model whose engine begins to serve.

    Engines load one after the other: each measures what memory the others have left. Errors: ConfigError
    for what the caller can mend (nothing has changed then), UnknownModel for a name that there is not.
    """

    def __init__(self, start: Start = AsyncLLM.start) -> None:
        self._start = start
        self._models: dict[str, Served] = {}
        self._splits: dict[str, Split] = {}
        self._default: str | None = None
        self._leaving: set[Served] = set()  # replaced or removed, with requests that are not finished
        self._loading = asyncio.Lock()
        self._generation = 0
        self._listeners: list[Callable[[Served], None]] = []
        self._farewells: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ looking

    @property
    def names(self) -> list[str]:
        """What a client may ask for: models, then aliases."""
        return [*self._models, *self._splits]

    @property
    def default(self) -> str:
        """The model of requests that name none. Raises UnknownModel while the table is empty."""
        if self._default is None:
            raise UnknownModel("there is no model yet")
        return self._default

    @property
    def models(self) -> list[Served]:
        """Every model with a name, in the order of arrival."""
        return list(self._models.values())

    @property
    def leaving(self) -> list[Served]:
        """Models without a name whose last requests are not finished."""
        return list(self._leaving)

    @property
    def aliases(self) -> dict[str, dict[str, float]]:
        return {name: split.weights for name, split in self._splits.items()}

    def get(self, name: str) -> Served:
        """The model of that name (not an alias). Raises UnknownModel."""
        if name not in self._models:
            raise UnknownModel(f"model {name!r}: there is no such model{hint(name, self._models)}")
        return self._models[name]

    def find(self, name: str | None) -> Served:
        """The model that the next request for `name` would go to; moves no alias on. Raises UnknownModel."""
        name = name or self.default
        split = self._splits.get(name)
        return self.get(name if split is None else split.heaviest)

    def takes(self, name: str | None = None) -> bool:
        """Whether a request for a name, an alias or (None) the default would be taken now. Raises UnknownModel."""
        name = name or self.default
        targets = self._splits[name].weights if name in self._splits else [name]
        return any(self.get(target).refusal() is None for target in targets)

    def lease(self, name: str | None = None) -> Lease:
        """Hold the model behind a name, an alias or (None) the default, for a new request.

        An alias passes over targets that take no requests now. Raises UnknownModel, or what refuses
        the request: AdmissionRefused, EngineDead.
        """
        name = name or self.default
        split = self._splits.get(name)
        if split is not None:
            name = split.next(lambda target: self.get(target).refusal() is None)
        model = self.get(name)
        refusal = model.refusal()
        if refusal is not None:
            raise refusal
        return Lease(model)

    def on_engine(self, listener: Callable[[Served], None]) -> None:
        self._listeners.append(listener)

    # ------------------------------------------------------------ coming

    def adopt(self, name: str, llm: AsyncLLM) -> Served:
        """Enter an engine that serves already."""
        self._refuse_taken(name)
        model = self._enter(name, llm.config)
        self._serve(model, llm)
        return model

    def declare(self, name: str, config: EngineConfig) -> Served:
        """Enter a name whose engine is still to be loaded: requests for it are told to wait."""
        self._refuse_taken(name)
        return self._enter(name, config)

    async def load(self, model: Served, *, on_progress: Callable[[Progress], None] | None = None, warm: bool = False) -> None:
        """Start the engine of a declared model. Raises what `start` raises; the model is then still loading."""
        async with self._loading:
            llm = await self._start(self._with_reserve(model.config), on_progress=on_progress)
        model.warm = warm
        await self._warm_fresh(model, llm, on_progress)
        self._serve(model, llm)

    async def _warm_fresh(self, model: Served, llm: AsyncLLM, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Warm an engine that has no name yet, where that is wanted. If it fails the engine is ended."""
        if not model.warm:
            return
        began = time.perf_counter()
        try:
            await warm_up(llm, on_progress=on_progress)
            await llm.count_from_here()
        except BaseException:
            await llm.end(grace=0.5)
            raise
        log.info("model %r warmed up in %.1f s", model.name, time.perf_counter() - began)

    async def load_again(self, model: Served) -> None:
        """Start a successor of a crashed engine: a new load, so a new generation. Raises what `start` raises."""
        async with self._loading:
            llm = await self._start(self._with_reserve(model.config))
        await self._warm_fresh(model, llm)
        if self._models.get(model.name) is not model:
            await llm.end(grace=0.5)
            raise ConfigError(f"model {model.name!r} was removed while it started again")
        self._generation += 1
        model.generation, model.error = self._generation, None
        self._serve(model, llm)

    async def add(self, name: str, config: EngineConfig, *, warm: bool = True) -> Served:
        """Load a model beside the others and let it answer to `name`. Raises what `start` raises; nothing has changed then."""
        model = self.declare(name, config)
        try:
            await self.load(model, warm=warm)
        except BaseException as error:
            self._models.pop(name, None)
            self._default = self._default if self._default != name else next(iter(self._models), None)
            log.error("model %r was not added: %s", name, str(error) or "its load was given up")
            raise
        return model

    async def replace(
        self, name: str, config: EngineConfig, *, warm: bool = True, timeout: float = 30.0, make_room: bool = False
    ) -> Served:
        """Load another engine for a name that there is, and give it the name once it serves.

        The old engine's requests have `timeout` seconds to finish; it ends when they have. If the new
        one does not start, the old one goes on. make_room: the old engine's cache is shrunk first to
        what its requests hold, and the new one's grows into the device when the old one has ended; both must be
        elastic (--dynamic-memory). Raises what `start` raises.
        """
        old = self.get(name)
        self._generation += 1
        new = Served(name, config, self._generation)
        before = await self._shrink(old, config) if make_room else 0
        try:
            await self.load(new, warm=warm)
        except BaseException:
            if make_room:
                with contextlib.suppress(EngineDead):  # what is wrong with the new one is the news
                    await old.llm.resize_cache(before)
            raise
        last = self._models.get(name)
        self._models[name] = new  # from here on every request goes to the new one
        if last is not None:
            farewell = self._bid_farewell(last, timeout)
            if make_room:
                self._task(self._grow(new, farewell))
        return new

    async def _shrink(self, old: Served, config: EngineConfig) -> int:
        """Give back what the requests of `old` do not hold; returns how many blocks it had."""
        if not (config.dynamic_memory and old.config.dynamic_memory):
            raise ConfigError(
                "make_room needs --dynamic-memory for the old model and the new one: one gives its cache up, the other grows"
            )
        before = old.llm.stats.total_blocks or old.llm.info.num_blocks
        left = await old.llm.resize_cache(1, rest=True)
        log.info(
            "model %r (load %d): %d of %d KV blocks make room for its successor", old.name, old.generation, before - left, before
        )
        return before

    async def _grow(self, new: Served, farewell: asyncio.Task[None]) -> None:
        await asyncio.wait({farewell})
        with contextlib.suppress(EngineDead):  # its successor is built with what there is then
            blocks = await new.llm.resize_cache(None)
            log.info("model %r (load %d) has %d KV blocks now that it is alone", new.name, new.generation, blocks)

    async def warm(self, name: str, prompts: list[str] | None = None) -> int:
        """Run prompts through a model before clients do; returns how many of their tokens were computed."""
        with self.lease(name) as lease:
            return await warm_up(lease.llm, prompts)

    # ------------------------------------------------------------ names

    def set_default(self, name: str) -> None:
        """`name`, a model or an alias, answers requests that name none. Raises UnknownModel, ConfigError."""
        refusal = self.find(name).refusal()
        if refusal is not None:
            raise ConfigError(f"{name!r} cannot be the default: {refusal}")
        self._default = name

    def set_alias(self, alias: str, weights: Mapping[str, float]) -> None:
        """Let `alias` stand for one model, or for several in proportion to their weights. Replaces what it stood for."""
        if alias in self._models:
            raise ConfigError(f"alias {alias!r}: a model has this name")
        for target in weights:
            self.get(target)
        split = Split(weights)
        self._splits[alias] = split

    def drop_alias(self, alias: str) -> None:
        if alias not in self._splits:
            raise UnknownModel(f"alias {alias!r}: there is no such alias{hint(alias, self._splits)}")
        if alias == self._default:
            raise ConfigError(f"alias {alias!r} is the default: set another default first")
        del self._splits[alias]

    # ------------------------------------------------------------ going

    async def drain(self, name: str, timeout: float) -> bool:
        """Take no new requests for a model and wait until nobody holds it; whether that came within `timeout` seconds.
        The engine stays: `resume` opens it again."""
        model = self.get(name)
        if model.state != "serving":
            raise ConfigError(f"model {name!r} is {model.state}: only a serving model can be drained")
        self._refuse_needed(name)
        model.state = "drained"
        return await _within(model.idle, timeout)

    def resume(self, name: str) -> None:
        """Take requests again after a drain. Raises ConfigError where there is nothing to take them."""
        model = self.get(name)
        if model.state not in ("drained", "serving"):
            raise ConfigError(f"model {name!r} is {model.state}: only a drained model can be resumed")
        if not model.llm.alive:
            raise ConfigError(f"model {name!r}: its engine died while it was drained; remove it and add it again")
        model.state = "serving"

    async def remove(self, name: str, timeout: float) -> None:
        """Forget a name, let its requests finish for `timeout` seconds (then they end with an error), end its engine."""
        model = self.get(name)
        if model.state == "loading":
            raise ConfigError(f"model {name!r} is still loading")
        self._refuse_needed(name)
        del self._models[name]
        await self._bid_farewell(model, timeout)

    async def close(self, grace: float = STOP_SECONDS) -> None:
        """End every engine, those without a name too, `grace` seconds each to leave by itself."""
        for task in self._farewells:
            task.cancel()
        everyone = [*self._models.values(), *self._leaving]
        await asyncio.gather(*(m.llm.end(grace=grace) for m in everyone if m.present), return_exceptions=True)

    async def drain_all(self, timeout: float) -> None:
        """Refuse new requests of every model, let running ones finish for `timeout` seconds, end them with an error."""
        everyone = [*self._models.values(), *self._leaving]
        await asyncio.gather(*(m.llm.drain(timeout) for m in everyone if m.present and m.llm.alive))

    # ------------------------------------------------------------ memory

    def _with_reserve(self, config: EngineConfig) -> EngineConfig:
        """`config`, told to leave alone what other engines were promised but do not hold yet: an untouched
        block of a CPU's cache looks like free memory."""
        owed = sum(
            max(m.planned_bytes() - m.resident_bytes(), 0)
            for m in [*self._models.values(), *self._leaving]
            if m.present and m.llm.explain.get("device", {}).get("type") == "cpu"
        )
        return config.model_copy(update={"reserved_memory_bytes": config.reserved_memory_bytes + owed}) if owed else config

    # ------------------------------------------------------------ inside

    def _enter(self, name: str, config: EngineConfig) -> Served:
        self._generation += 1
        model = self._models[name] = Served(name, config, self._generation)
        self._default = self._default or name
        return model

    def _serve(self, model: Served, llm: AsyncLLM) -> None:
        model.put(llm, "serving")
        log.info("model %r serves (load %d)", model.name, model.generation)
        for listener in self._listeners:
            listener(model)

    def _refuse_taken(self, name: str) -> None:
        if not name.strip():
            raise ConfigError("a model needs a name")
        if name in self._models or name in self._splits:
            raise ConfigError(f"model {name!r}: the name is taken")

    def _refuse_needed(self, name: str) -> None:
        """Refuse to take away what requests are sent to."""
        if name == self._default:
            raise ConfigError(f"model {name!r} is the default: set another default first")
        pointing = [alias for alias, split in self._splits.items() if name in split.weights]
        if pointing:
            raise ConfigError(
                f"model {name!r} is behind {', '.join(f'alias {alias!r}' for alias in pointing)}: change that first"
            )

    def _bid_farewell(self, model: Served, timeout: float) -> asyncio.Task[None]:
        return self._task(self._farewell(model, timeout))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that outlives whoever asked for it; `close` ends it."""
        task = asyncio.create_task(work)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
        return task

    async def _farewell(self, model: Served, timeout: float) -> None:
        self._leaving.add(model)
        model.state = "drained"
        try:
            if not await _within(model.idle, timeout) and model.present:
                await model.llm.drain(0.0)  # what is left ends with an error event
                await _within(model.idle, STOP_SECONDS)
            if model.present:
                await model.llm.end()
            log.info("model %r (load %d) is gone", model.name, model.generation)
        except EngineDead as error:
            log.error("model %r (load %d) is not gone, and holds its memory: %s", model.name, model.generation, error)
        finally:
            self._leaving.discard(model)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether `event` is set within `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
