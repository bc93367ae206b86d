"""The server's process: a socket, engines behind it, and an orderly end.

Owns the order of start and shutdown. The socket is bound and answers 503 before a model loads, so
that a port in use is known at once and probes have something to ask. Must never leave an engine
process behind, whatever ends this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

import octavo
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.messages import Progress
from octavo.engine.models import ModelTable
from octavo.engine.served import Served
from octavo.engine.supervisor import Backoff, Supervisor
from octavo.errors import ConfigError, EngineDead, LoadError, PluginError
from octavo.model.source import resolve_source
from octavo.request import EngineStats
from octavo.server import logs, tls
from octavo.server.app import create_app
from octavo.server.connection import HttpConnection
from octavo.server.garbage import Collector
from octavo.server.models import Planned, planned
from octavo.server.service import Service

log = logging.getLogger("octavo.server")

_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 32
_MAX_FILES = 1 << 17
_SWITCH_SECONDS = 0.001  # a thread that has tokenised waits so long for a busy loop to let it say so; 5 ms by default
_FLUSH_SECONDS = 1.0  # for the last events of streams that the drain has ended
_STATS_SECONDS = 10.0

OnProgress = Callable[[Progress], None]


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    models_from: str = "--models",
    on_progress: OnProgress | None = None,
) -> int:
    """Serve until a signal ends it; returns the exit status. Main thread only. models_from: the place that errors about `models` name.

    SIGTERM or SIGINT: new requests get 503, running ones have `shutdown_timeout` seconds, then end with
    an error. A second signal ends everything at once. SIGHUP reads tenants and the TLS certificate again,
    where there are any. Raises ConfigError, LoadError or PluginError for
    what the operator can mend, EngineDead when the engine crashed while it started.
    """
    logs.configure(server_config)
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Process(planned(engine_config, server_config, models_from), server_config, on_progress).run())


def _raise_file_limit() -> None:
    """A connection is an open file, and the usual soft limit of 1,024 is one of history: take the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if most > soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, asyncio's own loop otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Http(uvicorn.Server):
    """uvicorn's server without its signal handlers (ours drain first), which takes a burst of connections a few at
    a time, so that those who are served already do not wait for all of it; the rest wait in the kernel's queue."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)  # asyncio takes its number of accepts in a row for the queue's length as well

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(self, models: list[Planned], config: ServerConfig, on_progress: OnProgress | None) -> None:
        self._planned, self._config, self._on_progress = models, config, on_progress
        self._aliases = config.served_model_name[1:]
        self._stop, self._force = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        config = self._config
        table = ModelTable(partial(AsyncLLM.start, relay_log=True, patience=config.engine_timeout or None))
        supervisor = Supervisor(table, Backoff(attempts=config.max_engine_restarts))
        names = [model.name for model in self._planned]
        app = create_app(None, config, [*names, *self._aliases], table)
        state: Service = app.state.service
        with listen(config) as sock:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            uv = _uvicorn_config(app, config)
            if (
                state.tenants.reloadable or uv.ssl is not None or not os.isatty(0)
            ):  # a terminal that closes ends what reloads nothing
                loop.add_signal_handler(signal.SIGHUP, self._reload, state, uv.ssl)
            http = _Http(uv)
            serving, watching = asyncio.create_task(http.serve(sockets=[sock])), asyncio.create_task(state.watch.run())
            serving.add_done_callback(lambda _: self._stop.set())
            try:
                log.info("Octavo %s listens on %s; loading %s", octavo.__version__, address(config, sock), ", ".join(names))
                await self._until(self._stop, self._load(table))
                if self._stop.is_set():
                    log.info("stopping before the models were loaded")
                else:
                    _warn_of_tenants(state)
                    log.info("ready: %s at %s", ", ".join(state.names), address(config, sock))
                    await self._serve(state, serving)
            finally:
                http.should_exit = True
                http.force_exit = self._force.is_set()
                watching.cancel()
                await supervisor.close()
                await self._end(table, serving)
                if state.tracing is not None:
                    await asyncio.to_thread(state.tracing.close)
        log.info("stopped")
        return 0

    async def _load(self, table: ModelTable) -> None:
        """Every model of the start, one after the other: each measures what memory the ones before it have left."""
        declared = [table.declare(model.name, model.config) for model in self._planned]
        for alias in self._aliases:
            table.set_alias(alias, {self._planned[0].name: 1.0})
        for model in declared[1:]:  # what is not there must not be said after minutes of loading the first
            config = model.config
            with self._naming(model.name):
                await asyncio.to_thread(resolve_source, config.model, config.revision, weights=config.load_format != "dummy")
        for model in declared:
            with self._naming(model.name):
                await table.load(model, on_progress=self._on_progress, warm=self._config.warm_up)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Errors inside say which of several models they are about."""
        try:
            yield
        except (ConfigError, LoadError, PluginError, EngineDead) as error:
            if len(self._planned) == 1:
                raise
            raise type(error)(f"model {name!r}: {error}") from error

    async def _serve(self, state: Service, serving: asyncio.Task[None]) -> None:
        stats = asyncio.create_task(_log_stats(state.models)) if not self._config.disable_log_stats else None
        collecting = asyncio.create_task(Collector(lambda: state.requests).run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                state.draining = True
                log.info("draining: up to %g s for %d running requests", self._config.shutdown_timeout, state.requests)
                await self._until(self._force, state.models.drain_all(self._config.shutdown_timeout))
        finally:
            for task in (stats, collecting, stop):
                if task is not None:
                    task.cancel()

    async def _end(self, table: ModelTable, serving: asyncio.Task[None]) -> None:
        """Close sockets and the engines side by side: neither needs the other."""
        closing = table.close(grace=0.0 if self._force.is_set() else 1.0)
        for result in await asyncio.gather(serving, closing, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                log.error("shutdown: %s", result)

    async def _until(self, event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, or None if `event` comes first; `work` is cancelled then."""
        task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            waiting.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)

    def _reload(self, state: Service, context: ssl.SSLContext | None) -> None:
        """SIGHUP: read again what may change while the server runs. What cannot be used changes nothing."""
        if not state.tenants.reloadable and context is None:
            log.warning("SIGHUP: there is nothing to read again: no --api-keys-file, and no TLS certificate")
        try:
            if state.tenants.reloadable:
                state.tenants.reload()
                _warn_of_tenants(state)
        except ConfigError as error:
            log.error("SIGHUP: the tenants stay as they were: %s", error)
        try:
            if context is not None:
                tls.renew(context, self._config)
                log.info("TLS certificate read again")
        except ConfigError as error:
            log.error("SIGHUP: the TLS certificate stays as it was: %s", error)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("%s again: ending at once", number.name)
            self._force.set()
        self._stop.set()


def _warn_of_tenants(state: Service) -> None:
    """What their file says and this server does not do: a mistake, or meant for a model yet to come."""
    for tenant, models in state.tenants.unserved(state.names):
        log.warning(
            "tenant %r may use %s, which this server does not serve (it has: %s)",
            tenant,
            ", ".join(models),
            ", ".join(state.names),
        )
    if state.tenants.ranked and all(model.config.scheduling_policy != "priority" for model in state.models.models):
        log.warning(
            "min_priority and max_priority of %s count with --scheduling-policy priority alone", ", ".join(state.tenants.ranked)
        )


def _uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    uv = uvicorn.Config(
        app,
        http=partial(HttpConnection, header_timeout=config.header_timeout),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=config.root_path,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(_FLUSH_SECONDS),
        **tls.options(config),
    )
    try:
        uv.load()
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {exc}") from exc
    return uv


@contextlib.contextmanager
def listen(config: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket of the configuration. Raises ConfigError when the address cannot be had."""
    if config.uds is not None:
        with _listen_unix(Path(config.uds)) as sock:
            yield sock
        return
    guarded = config.api_key or config.api_keys or config.api_keys_file or config.ssl_ca_certs
    if not guarded and not is_loopback(config.host):
        log.warning(
            "ANYBODY who can reach %s:%d can use this server: it listens beyond this machine and has no --api-key.",
            config.host or "*",
            config.port,
        )
    try:
        sock = _listen_tcp(config.host, config.port)
    except OSError as exc:
        other = "; choose another --port, or 0 for any free one" if exc.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"--host {config.host} --port {config.port}: cannot listen there: {exc.strerror or exc}{other}"
        ) from exc
    with contextlib.closing(sock):
        yield sock


def _listen_tcp(host: str, port: int) -> socket.socket:
    """The protocol is named, unlike in socket.create_server: only then does asyncio turn Nagle's algorithm off for the
    connections, and without that the second small write of an answer waits 40 ms for the client's acknowledgement."""
    info = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(info[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if info[0] == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(info[4][:2])
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _listen_unix(path: Path) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        try:
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
                path.unlink()  # left behind by a server that was killed
            sock.bind(str(path))
            sock.listen(_BACKLOG)
        except OSError as exc:
            raise ConfigError(f"--uds {path}: cannot listen there: {exc.strerror or exc}") from exc
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(config: ServerConfig, sock: socket.socket) -> str:
    """What a client would type: the real port, also when port 0 was asked for."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _log_stats(table: ModelTable) -> None:
    """A line of throughput and cache use every few seconds for every model whose engine worked."""
    before: dict[Served, EngineStats] = {}
    then = time.monotonic()
    while True:
        await asyncio.sleep(_STATS_SECONDS)
        now = time.monotonic()
        latest = {model: model.llm.stats for model in table.models if model.present}
        for model, stats in latest.items():
            _log_model(model.name if len(latest) > 1 else "", before.get(model, EngineStats()), stats, now - then)
        before, then = latest, now


def _log_model(name: str, before: EngineStats, stats: EngineStats, seconds: float) -> None:
    if stats.steps <= before.steps:
        return
    queries = stats.prefix_queries - before.prefix_queries
    hits = 100 * (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    log.info(
        "%srunning %d, waiting %d, prompt %.1f tok/s, generation %.1f tok/s, KV cache %.1f%%, prefix hits %.1f%%",
        f"{name}: " if name else "",
        stats.running,
        stats.waiting,
        (stats.prompt_tokens - before.prompt_tokens) / seconds,
        (stats.generation_tokens - before.generation_tokens) / seconds,
        100 * stats.kv_usage,
        hits,
    )
