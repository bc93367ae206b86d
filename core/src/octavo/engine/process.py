"""The engine's own process: builds one engine, then alternates between messages and steps.

Started by `octavo.engine.client.EngineProcess` as ``python -m octavo.engine.process ADDRESS [relay]``. Its
configuration arrives as the first message. Ends when told, when the socket's owner dies, or when
the engine does; never outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine import messages
from octavo.engine.liveness import STACKS
from octavo.engine.messages import pack, unpack
from octavo.engine.relay import send_records
from octavo.engine.signals import leave_signals_to_parent
from octavo.errors import ConfigError, OctavoError
from octavo.request import Events

if TYPE_CHECKING:
    from octavo.engine.admissions import Admissions
    from octavo.engine.engine import Engine

log = logging.getLogger("octavo.engine.process")  # it runs as __main__

PARENT_CHECK = 1.0
"""Seconds between checks, while idle, that the parent still lives."""

GRAMMAR_CHECK = 0.002
"""Seconds between looks at whether a grammar is compiled, while there is nothing else to do."""

SLOW_STEP = 0.1
"""Seconds from which on a step is worth a line of the log at level debug: everybody waited for it."""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux); the idle loop checks as well."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class EngineLoop:
    """Serves one engine on one PAIR socket."""

    def __init__(self, socket: zmq.Socket[bytes], parent: int) -> None:
        self._socket, self._parent = socket, parent
        self._open = True

    def run(self, config: EngineConfig) -> None:
        began = time.perf_counter()

        from octavo.engine.build import build_engine
        from octavo.plugins import discover

        catalog = discover(config.plugins)
        log.info("torch and plugins were loaded in %.1f s", time.perf_counter() - began)
        engine = build_engine(config, catalog, progress=self._progress)
        gc.collect()
        gc.freeze()  # the model and the catalogue are garbage for nobody: keep the collector off them
        ready = messages.Ready(engine.info, engine.explain, catalog.inventory(), time.perf_counter() - began)
        self._send(messages.READY, ready)
        doors = self._doors(engine)
        while self._open:
            if not engine.busy:
                self._await_message(GRAMMAR_CHECK if doors.waiting else PARENT_CHECK)
            began, worked = time.perf_counter(), time.thread_time()
            self._drain_messages(engine, doors)
            doors.turn()
            if engine.busy:
                events = engine.step()
                events.stats.sent = time.perf_counter()
                self._send(messages.EVENTS, events)
                took = time.perf_counter() - began
                if took > SLOW_STEP:
                    _say_slow(events, took, engine.waited, time.thread_time() - worked)
        engine.close()

    def _progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        self._send(messages.PROGRESS, messages.Progress(stage, done, total))

    def _send(self, kind: bytes, body: object) -> None:
        self._socket.send_multipart(pack(kind, body))

    def _doors(self, engine: Engine) -> Admissions:
        from octavo.engine.admissions import Admissions

        return Admissions(engine, lambda refused: self._send(messages.REFUSED, refused))

    def _await_message(self, seconds: float) -> None:
        """For so long, or as long as it takes if nothing else is to be looked at."""
        while not self._socket.poll(int(seconds * 1000)):
            if os.getppid() != self._parent:
                log.error("the parent process %d is gone: leaving", self._parent)
                self._open = False
            if not self._open or seconds < PARENT_CHECK:
                return

    def _drain_messages(self, engine: Engine, doors: Admissions) -> None:
        while self._open and self._socket.poll(0):
            kind, body = unpack(self._socket.recv_multipart())
            if kind == messages.ADD:
                doors.add(body)
            elif kind == messages.ABORT:
                doors.abort(body.request_id)
                engine.abort(body.request_id, body.sample)
                self._send(messages.EVENTS, Events([], engine.stats()))
            elif kind == messages.RESET:
                engine.prefixes.reset(pins=body.pins)
            elif kind == messages.PREFIX:
                self._send(messages.PREFIX_STATE, messages.PrefixState(body.id, _prefix(engine, body)))
            elif kind == messages.RESIZE:
                self._send(messages.RESIZED, _resized(engine, body))
                self._send(messages.EVENTS, Events([], engine.stats()))
            elif kind == messages.PING:
                self._send(messages.PONG, None)
            elif kind == messages.CLOSE:
                self._open = False


def _say_slow(events: Events, took: float, waited: float, worked: float) -> None:
    """took: seconds of the step with its messages; waited: of them for the device; worked: processor time of this thread. Little
    of the last two: it was kept from running, or waited for something else, such as a compiler."""
    stats = events.stats
    log.debug(
        "step %d took %.0f ms (%.0f waiting for the device, %.0f of processor time): %d tokens, %d sequences running, %d waiting",
        stats.steps,
        1000 * took,
        1000 * waited,
        1000 * worked,
        stats.step_tokens,
        stats.running,
        stats.waiting,
    )


def _prefix(engine: Engine, order: messages.PrefixOrder) -> dict[str, Any]:
    if order.action == "state":
        return engine.prefixes.state()
    answer = engine.prefixes.pin(order.tokens) if order.action == "pin" else engine.prefixes.unpin(order.tokens)
    built: dict[str, Any] = msgspec.to_builtins(answer)
    return built


def _resized(engine: Engine, order: messages.Resize) -> messages.Resized:
    try:
        return messages.Resized(order.id, engine.resize_cache(order.blocks, rest=order.rest))
    except ConfigError as fixed:
        return messages.Resized(order.id, 0, str(fixed))


def main(address: str) -> int:
    parent = os.getppid()
    die_with_parent()
    leave_signals_to_parent()
    faulthandler.register(STACKS)  # to stderr, so to the log
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.connect(address)
    try:
        kind, body = socket.recv_multipart()
        if kind == messages.CONFIG:  # else the parent has failed meanwhile, and wants no engine any more
            config = EngineConfig.model_validate_json(msgspec.msgpack.decode(body, type=str))
            EngineLoop(socket, parent).run(config)
        return 0
    except OctavoError as error:
        socket.send_multipart(pack(messages.DEAD, messages.Dead(str(error), type(error).__name__)))
    except Exception as error:
        log.exception("the engine died")
        socket.send_multipart(pack(messages.DEAD, messages.Dead(f"{type(error).__name__}: {error}")))
    finally:
        socket.close()
        context.term()
    return 1


if __name__ == "__main__":
    level = os.environ.get("OCTAVO_LOG_LEVEL", "info")
    if level.upper() not in logging.getLevelNamesMapping():
        sys.exit(f"OCTAVO_LOG_LEVEL={level}: must be debug, info, warning or error")
    if "relay" in sys.argv[2:]:
        send_records(level)
    else:
        logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main(sys.argv[1]))
