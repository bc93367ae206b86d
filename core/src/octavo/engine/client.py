"""EngineProcess: an engine in a process of its own, seen from an asyncio loop.

Owns the child process and the socket to it. Delivers every message to one listener, in order, and
notices when the child dies however it dies. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any

import zmq
import zmq.asyncio

from octavo.config import SECRET_VARIABLES, EngineConfig
from octavo.engine import messages
from octavo.engine.liveness import STACKS, Liveness
from octavo.engine.messages import pack, unpack
from octavo.engine.relay import LIMIT, relay
from octavo.engine.signals import held_signals
from octavo.engine.turns import Portion
from octavo.errors import ConfigError, EngineDead, LoadError, OctavoError, PluginError
from octavo.request import Events, Request

log = logging.getLogger(__name__)

LEAST_EVENTS, MOST_EVENTS = 32, 128
"""Events that are delivered in one turn of the loop, by how long turns are."""

STOP_SECONDS = 3.0
"""How long a child gets to leave by itself after CLOSE."""

STACK_SECONDS = 0.5
"""How long a hung child gets to write where it hangs."""

_USERS: dict[str, type[OctavoError]] = {kind.__name__: kind for kind in (ConfigError, LoadError, PluginError)}
"""Errors of a child that are its user's to mend, by the name that travels."""

KILL_SECONDS = 10.0
"""How long the system gets to end a child that was killed."""


def _parts(step: Events, portion: Portion) -> Iterator[Events]:
    """The events of a step in order, a portion for each turn of the loop, each part with the engine's state."""
    first, count = 0, portion.first()
    while True:
        yield Events(step.events[first : first + count], step.stats)
        first += count
        if first >= len(step.events):
            return
        count = portion.next()


class EngineProcess:
    """start() returns once the engine serves. `on_message(kind, body)` gets EVENTS, REFUSED, PREFIX_STATE and RESIZED;
    `on_death(reason)` is called once if the engine ends without being asked to, or has answered nothing for `patience` seconds
    (None: however long it takes), when it is killed; `hung` is True then."""

    def __init__(
        self,
        on_message: Callable[[bytes, Any], None],
        on_death: Callable[[str], None],
        *,
        relay_log: bool = False,
        patience: float | None = None,
    ) -> None:
        self._on_message, self._on_death, self._relay_log = on_message, on_death, relay_log
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = self._dead = self._cleared = False
        self.hung = False
        self._liveness = None if patience is None else Liveness(patience, lambda: self._send(messages.PING, None))
        self._patience = patience
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._progress: Callable[[messages.Progress], None] | None = None
        self._last_words: messages.Dead | None = None
        self._log: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, config: EngineConfig, progress: Callable[[messages.Progress], None] | None = None) -> messages.Ready:
        """Spawn the child and wait until it serves. Raises ConfigError, LoadError or PluginError with the child's own
        words when the configuration, the model or a plugin is at fault, EngineDead when it crashed."""
        self._progress = progress
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        with held_signals():
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "octavo.engine.process", address, *(["relay"] if self._relay_log else [])),
                env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
                stderr=asyncio.subprocess.PIPE if self._relay_log else None,
                limit=LIMIT,
            )
        # A PAIR socket waits for its peer: a child that dies before it connects must be seen while we wait.
        # They outlive whoever asked for this engine: what they log is not part of that request.
        self._tasks = [
            asyncio.create_task(work, context=Context()) for work in (self._introduce(config), self._read(), self._watch())
        ]
        if self._process.stderr is not None:
            self._log = asyncio.create_task(relay(self._process.stderr), context=Context())
        try:
            ready = await self._ready
        except BaseException:
            await self.close(grace=0.5)  # it serves nobody yet: nothing to be gentle about
            raise
        if self._liveness is not None:  # from here on: a model may take as long to load as it takes
            self._tasks.append(asyncio.create_task(self._guard(self._liveness), context=Context()))
        return ready

    async def _introduce(self, config: EngineConfig) -> None:
        await self._socket.send_multipart(pack(messages.CONFIG, config.model_dump_json(exclude_unset=True)))

    def add(self, request: Request) -> None:
        self._send(messages.ADD, request)

    def abort(self, request_id: str, sample: int | None = None) -> None:
        self._send(messages.ABORT, messages.Abort(request_id, sample))

    def reset_prefix_cache(self, *, pins: bool = False) -> None:
        self._send(messages.RESET, messages.Reset(pins))

    def resize(self, order: messages.Resize) -> None:
        """Its answer comes as RESIZED."""
        self._send(messages.RESIZE, order)

    def prefix(self, order: messages.PrefixOrder) -> None:
        """Its answer comes as PREFIX_STATE."""
        self._send(messages.PREFIX, order)

    def _send(self, kind: bytes, body: Any) -> None:
        if not self._closing:
            # Without a high-water mark a PAIR socket never blocks, so the future is done at once.
            self._socket.send_multipart(pack(kind, body))

    async def _read(self) -> None:
        """Deliver messages in order. If a listener raises, nobody would hear of the engine again: that is a death."""
        portion = Portion(LEAST_EVENTS, MOST_EVENTS)
        try:
            while True:
                kind, body = unpack(await self._socket.recv_multipart())
                if self._liveness is not None:
                    self._liveness.heard()
                for part in _parts(body, portion) if kind == messages.EVENTS else (body,):
                    self._deliver(kind, part)
                    # A message that is there already comes without a turn of the loop, and every sequence's news wakes
                    # a task: a fast engine with many sequences would hold everybody else up.
                    await asyncio.sleep(0)
        except Exception as error:
            log.exception("a message of the engine could not be taken in")
            reason = f"its messages can no longer be taken in: {type(error).__name__}: {error}"
            if not self._ready.done():
                self._ready.set_exception(EngineDead(reason))
            else:
                self._die(reason)

    def _die(self, reason: str) -> None:
        if not self._closing and not self._dead:
            self._dead = True
            log.error("engine process %s died: %s", self.pid, reason)
            self._on_death(reason)

    async def _guard(self, liveness: Liveness) -> None:
        """Kill an engine that hangs. Its requests end at once, even if the kill takes its time."""
        await liveness.run()
        if self._closing or self._process is None or self._process.returncode is not None:
            return
        log.error("engine process %s has not answered for %g s: it is killed; its stacks follow", self.pid, self._patience)
        self.hung = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACKS)
            await asyncio.sleep(STACK_SECONDS)
            self._process.kill()
        self._die(f"it hung: no answer for {self._patience:g} s (--engine-timeout)")

    def _deliver(self, kind: bytes, body: Any) -> None:
        if kind == messages.PROGRESS:
            if self._progress:
                self._progress(body)
        elif kind == messages.READY:
            self._ready.set_result(body)
        elif kind == messages.DEAD:
            self._last_words = body
        elif kind == messages.PONG:
            pass  # that it came is all it says
        else:
            self._on_message(kind, body)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # let the reader take its last words
        words = self._last_words
        reason = words.reason if words else f"the engine process ended with exit status {code}"
        if not self._ready.done():
            kind = _USERS.get(words.error, ConfigError) if words and words.error else EngineDead
            self._ready.set_exception(kind(reason))
        elif not self.hung:  # the guard says why
            self._die(reason)

    async def close(self, grace: float = STOP_SECONDS) -> None:
        """End the child: `grace` seconds to leave by itself, then SIGKILL (it ignores SIGTERM). Idempotent. Raises
        EngineDead where even that does not end it within KILL_SECONDS (its driver holds it): call again later."""
        if self._process is not None and self._process.returncode is None:
            self._send(messages.CLOSE, None)
        self._closing = True
        if self._process is not None:
            await self._end(self._process, 0.0 if self.hung else grace)
        if self._cleared:
            return
        self._cleared = True
        if self._log is not None:  # its stderr closes with the child: what is left is logged
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._log, 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, process: asyncio.subprocess.Process, grace: float) -> None:
        try:
            await asyncio.wait_for(process.wait(), grace)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            await asyncio.wait_for(process.wait(), KILL_SECONDS)
        except TimeoutError:
            raise EngineDead(f"process {process.pid} does not end, not even when it is killed") from None
