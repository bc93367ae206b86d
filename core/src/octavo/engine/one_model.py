"""OneModel: text in, text out, over one engine in a process of its own.

Owns the tokenizer, the output processor and one stream per live request. Knows no other model. Never imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

import msgspec

from octavo.cache.prefix import PUBLIC
from octavo.config import EngineConfig
from octavo.engine import messages
from octavo.engine.client import STOP_SECONDS, EngineProcess
from octavo.engine.liveness import PATIENCE
from octavo.engine.orders import Orders
from octavo.engine.prefixes import Prefix, Warmed, read_prefixes
from octavo.engine.streams import Prompt, Stream, prompt_parts
from octavo.engine.tool_parser import choose_tool_parser
from octavo.engine.totals import Totals
from octavo.errors import Aborted, AdmissionRefused, ConfigError, EngineDead, LoadError, RequestError
from octavo.interfaces import ToolFormat
from octavo.model.source import ModelSource, resolve_source
from octavo.plugins import discover
from octavo.request import EngineStats, Event, Events, ModelInfo, Request, SamplingParams, check_request
from octavo.text.chat import Messages, compile_template, render_chat
from octavo.text.output import OutputProcessor, RequestOutput
from octavo.text.tokenizer import Tokenizer, place_of

log = logging.getLogger(__name__)

Observer = Callable[[list[Event], EngineStats], None]

SHORT_TEXT = 1000
"""Characters that are tokenised at once: half a millisecond, less than the way to a thread and back beside a busy loop."""

WARM_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
WARM_OPTIONS: dict[str, Any] = {
    "priority": 0,
    "tenant": "",
    "domain": PUBLIC,
    "deadline": None,
    "weight": 1.0,
    "delta": False,
}
"""A request that only leaves its K/V behind."""


def _tokenizer(source: ModelSource, config: EngineConfig) -> Tokenizer:
    """All of it at once: whatever a first conversation had to make would hold up everybody who is served then."""
    tokenizer = Tokenizer.from_source(source, config)
    tokenizer.prepare()
    if tokenizer.chat_template is not None:
        try:
            compile_template(tokenizer.chat_template)
        except LoadError as error:  # completions need no template
            log.warning("%s: %s; conversations are refused (--chat-template FILE names another)", source.path, error)
    return tokenizer


def _tool_format(source: ModelSource, config: EngineConfig) -> ToolFormat:
    """How the model writes calls of tools. Raises PluginError, ConfigError."""
    found: ToolFormat = choose_tool_parser(config, discover(config.plugins), source).create(None)
    return found


class OneModel:
    """Made by `start`; one event loop only.

    stats is refreshed with every step. alive turns False for good when the engine dies, and every
    live request then raises EngineDead(dead_reason); `died` is set then, and not by close. explain and
    inventory are what the engine's own process decided and loaded.
    """

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, relay_log: bool = False, patience: float | None = PATIENCE
    ) -> None:
        self.config, self.source = config, source
        self.tokenizer: Tokenizer
        self.tool_format: ToolFormat
        self.info: ModelInfo
        self._totals = Totals(EngineStats())
        self.alive, self.draining = False, False
        self.dead_reason: str | None = None
        self.explain: dict[str, Any] = {}
        self.inventory: list[dict[str, Any]] = []
        self.died = asyncio.Event()
        self._engine = EngineProcess(self._on_message, self._on_death, relay_log=relay_log, patience=patience)
        self._orders = Orders(self._engine, self._refuse_if_dead)
        self._processor: OutputProcessor
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._observers: list[Observer] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Callable[[messages.Progress], None] | None = None,
        relay_log: bool = False,
        patience: float | None = PATIENCE,
    ) -> Self:
        """Resolve the model, start the engine's process and wait until it serves. relay_log: what the
        engine's process logs becomes records of this process, instead of going to its stderr. patience: seconds
        without an answer after which an engine that serves counts as dead and is killed (None: never).

        Raises ConfigError, LoadError or PluginError for what the caller can mend, EngineDead for a crash.
        """
        began = time.perf_counter()
        prefixes = await asyncio.to_thread(read_prefixes, config.warm_prefixes) if config.warm_prefixes else []
        source = await asyncio.to_thread(resolve_source, config.model, config.revision, weights=config.load_format != "dummy")
        llm = cls(config, source, relay_log=relay_log, patience=patience)
        # The engine builds while this process loads the tokenizer: neither needs the other.
        resolved = config.model_copy(update={"model": str(source.path), "revision": None})  # which is that of the path now
        starting = asyncio.create_task(llm._engine.start(resolved, on_progress))
        try:
            llm.tokenizer = await asyncio.to_thread(_tokenizer, source, config)
            llm.tool_format = await asyncio.to_thread(_tool_format, source, config)
            if isinstance(
                size := source.config.get("vocab_size"), int
            ):  # seen before the weights are read, where the config says it
                llm.tokenizer.check_fits(size, place_of(config, source))
            llm._processor = OutputProcessor(llm.tokenizer)
            ready = await starting
            llm.tokenizer.check_fits(ready.info.vocab_size, place_of(config, source))
        except BaseException:
            starting.cancel()  # a child that was started behind the close would have no parent that ends it
            await asyncio.gather(starting, return_exceptions=True)
            await llm._engine.close(grace=0.5)
            raise
        llm.info, llm.explain, llm.inventory, llm.alive = ready.info, ready.explain, ready.inventory, True
        llm.stats.free_blocks = ready.info.num_blocks
        log.info("engine ready in %.1f s (%.1f s of it in its own process)", time.perf_counter() - began, ready.seconds)
        await llm._warm_start(prefixes, on_progress)
        return llm

    async def _warm_start(self, prefixes: list[Prefix], on_progress: Callable[[messages.Progress], None] | None) -> None:
        if not prefixes:
            return
        began = time.perf_counter()
        try:
            warmed = await self.warm(prefixes, on_progress=on_progress)
        except BaseException as error:
            await self._engine.close(grace=0.5)
            if isinstance(error, RequestError):
                raise ConfigError(f"--warm-prefixes {self.config.warm_prefixes}: {error}") from error
            raise
        tokens, pinned = sum(w.tokens for w in warmed), sum(w.pinned for w in warmed)
        seconds = time.perf_counter() - began
        log.info("%d prefixes of %d tokens warmed in %.1f s, %d tokens pinned", len(warmed), tokens, seconds, pinned)

    @property
    def stats(self) -> EngineStats:
        """What the engine said last."""
        return self._totals.latest

    # ------------------------------------------------------------ requests

    async def _generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: int,
        tenant: str,
        domain: str,
        deadline: float | None,
        weight: float,
        delta: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        text, ids = await self._tokens(prompt)
        self._refuse_if_closed()
        params = check_request(ids, params, self.info)
        own_id = f"r{next(self._ids)}"
        request = Request(
            id=own_id,
            prompt=ids,
            params=params,
            eos_token_ids=self.info.eos_token_ids,
            tenant=tenant,
            domain=domain,
            priority=priority,
            deadline=deadline,
            weight=weight,
        )
        stream = Stream(own_id if request_id is None else request_id, delta)
        self._streams[own_id] = stream
        self._idle.clear()
        self._processor.add(request, text, delta)
        finished = False
        try:
            self._engine.add(request)
            while not finished:
                output = await stream.next()
                finished = output.finished
                output.request_id = stream.shown
                yield output
        finally:
            self._forget(own_id, abort=not finished)

    async def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text, ids = prompt_parts(prompt)
        return text, await self.encode(text or "") if ids is None else ids

    def _refuse_if_dead(self) -> None:
        if not self.alive:
            raise EngineDead(self.dead_reason or "the engine is not running")

    def _refuse_if_closed(self) -> None:
        self._refuse_if_dead()
        if self.draining:
            raise AdmissionRefused("the server is shutting down", code="draining", retry_after=5.0)

    def _forget(self, own_id: str, *, abort: bool) -> None:
        self._streams.pop(own_id, None)
        self._processor.remove(own_id)
        if abort and self.alive:
            self._engine.abort(own_id)
        if not self._streams:
            self._idle.set()

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a raw prompt, computed off the event loop where that takes time; the model's BOS rule applies once."""
        if len(text) <= SHORT_TEXT:
            return self.tokenizer.encode(text, add_special=add_special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)

    async def render_chat(self, messages: Messages, **options: Any) -> list[int]:
        """Token ids of a conversation through the chat template, off the event loop; see text.chat.render_chat."""
        return await asyncio.to_thread(render_chat, self.tokenizer, messages, **options)

    async def abort(self, request_id: str) -> None:
        """End every live request whose outputs carry this id: its consumer gets Aborted. Ids that nothing carries are ignored."""
        for stream in self._streams.values():
            if stream.shown == request_id:
                stream.fail(Aborted(f"request {request_id!r} was aborted"))

    # ------------------------------------------------------------ the prefix cache

    def reset_prefix_cache(self, *, pins: bool = False) -> None:
        """Forget every cached prefix. What is pinned is computed again; with `pins` that is forgotten too."""
        self._engine.reset_prefix_cache(pins=pins)

    async def prefix_cache(self) -> dict[str, Any]:
        """What the prefix cache holds and has done (engine.prefixes.PrefixCache.state). Raises EngineDead."""
        self._refuse_if_closed()
        state = await self._orders.prefix("state")
        for name in ("prefix_queries", "prefix_hits"):
            state[name] -= self._totals.left_out(name)
        state["hit_rate"] = state["prefix_hits"] / state["prefix_queries"] if state["prefix_queries"] else 0.0
        return state

    async def warm(
        self, prefixes: Sequence[Prefix], *, pin: bool = False, on_progress: Callable[[messages.Progress], None] | None = None
    ) -> list[Warmed]:
        """Compute each prefix once, in the domain that every tenant may read, and pin those that say so (with `pin`,
        all). Raises what `generate` raises, naming the prefix."""
        results = []
        for done, prefix in enumerate(prefixes):
            if on_progress is not None:
                on_progress(messages.Progress("prefixes", done, len(prefixes)))
            ids = await self._prefix_ids(prefix)
            outputs = self._generate({"prompt_token_ids": ids}, WARM_PARAMS, None, **WARM_OPTIONS)
            last = [output async for output in outputs][-1]
            if last.error:
                raise EngineDead(f"prefix {done + 1}: {last.error}")
            result = Warmed(len(ids), cached=last.num_cached_tokens)
            if pin or prefix.pin:
                self._refuse_if_closed()
                pinned = msgspec.convert(await self._orders.prefix("pin", ids), Warmed)
                result.pinned, result.note = pinned.pinned, pinned.note
                if pinned.note:
                    log.warning("prefix %d of %d tokens is not pinned: %s", done + 1, len(ids), pinned.note)
            results.append(result)
        return results

    async def unpin_prefixes(self, prefixes: Sequence[Prefix]) -> list[Warmed]:
        """Let go of pinned prefixes; they stay cached until something else needs their room."""
        self._refuse_if_closed()
        tokens = [await self._prefix_ids(prefix) for prefix in prefixes]
        return [msgspec.convert(await self._orders.prefix("unpin", ids), Warmed) for ids in tokens]

    async def _prefix_ids(self, prefix: Prefix) -> list[int]:
        if prefix.messages is not None:
            return await self.render_chat(list(prefix.messages), add_generation_prompt=False)
        return await self.encode(prefix.prompt or "")

    async def resize_cache(self, blocks: int | None, *, rest: bool = False) -> int:
        """Make the KV cache `blocks` large, or (None) as large as if the device were this model's alone; returns the
        size that it then has. `rest`: what --dynamic-memory does by itself waits for the next call. Raises
        ConfigError where the size is fixed, EngineDead."""
        return await self._orders.resize(blocks, rest=rest)

    # ------------------------------------------------------------ what the engine says

    def on_events(self, observer: Observer) -> None:
        """Call observer(events, stats) after every step. What it raises is logged, never passed on."""
        self._observers.append(observer)

    async def count_from_here(self) -> None:
        """Leave out of the totals in `stats` what the engine has done so far: a warm-up is no traffic. Raises EngineDead."""
        await self.prefix_cache()  # messages keep their order: after the answer nothing of what was aborted is on its way
        self._totals.from_here()

    def _on_message(self, kind: bytes, body: Any) -> None:
        if kind == messages.EVENTS:
            self._on_step(body)
        elif kind == messages.REFUSED:
            refusal = AdmissionRefused(body.message, code=body.code, retry_after=body.retry_after)
            if (stream := self._streams.get(body.request_id)) is not None:
                stream.fail(refusal)
        else:  # PREFIX_STATE, RESIZED
            self._orders.take(body)

    def _on_step(self, step: Events) -> None:
        self._totals.take(step.stats)
        outputs, aborts = self._processor.process(step.events)
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                output.sent = step.stats.sent
                stream.put(output)
        for request_id, sample in aborts:
            self._engine.abort(request_id, sample)
        for observer in self._observers:
            try:
                observer(step.events, step.stats)
            except Exception:
                log.exception("an observer of the engine's events failed")

    def _on_death(self, reason: str) -> None:
        self.alive, self.dead_reason = False, reason
        self._fail_all(EngineDead(reason))
        self.died.set()

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._orders.fail(error)

    # ------------------------------------------------------------ the end

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let running ones finish for `timeout` seconds, then end them with an error."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            self._fail_all(AdmissionRefused("the server is shutting down", code="draining", retry_after=5.0))

    @property
    def hung(self) -> bool:
        """Whether it died of not answering."""
        return self._engine.hung

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return self._engine.pid

    async def end(self, *, grace: float = STOP_SECONDS) -> None:
        """End the engine's process, which has `grace` seconds to leave by itself. Live requests raise EngineDead."""
        self.alive = False
        self.dead_reason = self.dead_reason or "the engine was closed"
        self._fail_all(EngineDead(self.dead_reason))
        await self._engine.close(grace)
