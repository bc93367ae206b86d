"""The client at the other end: whether it is still there, and the answers that stream to it.

Owns the watch over disconnects, for plain and for streaming answers, and the frames of server-sent
events. FastAPI cancels only streaming bodies, so nothing here relies on it. Must never leave a
generation running for a client that has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import to_api_error
from octavo.server.records import Record

DONE = b"data: [DONE]\n\n"
CLOSE_EXTENSION = "octavo.close"
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection before the answer began; there is nobody to tell."""


class Closable(Protocol):
    async def close(self) -> None: ...


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected. Only after the body has been read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connected:
    """`async with Connected(receive):` ends the block with ClientGone as soon as the client has gone away, by cancelling
    whatever it waits for. Only after the request's body has been read to its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._watch = asyncio.create_task(_gone(self._receive))
        self._watch.add_done_callback(self._on_end)
        return self

    def _on_end(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            self._gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watch.remove_done_callback(self._on_end)
        self._watch.cancel()
        if self._gone and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise ClientGone from error


_SEPARATORS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def frame(chunk: Any) -> bytes:
    """One server-sent event. Its lines end at line feeds alone, but many clients also split at Unicode's other
    line separators: those are spelt as escapes."""
    data: bytes = _encode(chunk)
    for character, escape in _SEPARATORS:
        if character in data:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """A stream of server-sent events that ends in one of three ways.

    Success: `[DONE]` after the last chunk. An error: one error event, no `[DONE]`, and the connection
    is closed, so that no client can take the stream for a complete one. The client goes away: `source`
    is closed at once, which aborts the generation. `frames` yields bytes, any number of events a piece.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], source: Closable, record: Record) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._source, self._record = frames, source, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Connected(receive):
                await self._write(scope, send)
        except ClientGone:
            self._record.outcome = "disconnected"
        except asyncio.CancelledError:
            self._record.outcome = "aborted"
            raise
        finally:
            await self._source.close()
            self._record.close()

    async def _write(self, scope: Scope, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._frames:
                await body(data)
        except Exception as exc:
            error = to_api_error(exc, self._record.id)
            self._record.fail(error.code, exc)
            close: Callable[[], None] | None = scope.get("extensions", {}).get(CLOSE_EXTENSION)
            if close is not None:
                close()
            await body(error.event(), more=False)
        else:
            await body(DONE, more=False)
