"""Connections: HTTP/1.1 on one socket, with bounds on what a client may send before its request is known.

Owns the limits of a request's head, in bytes and in seconds, and the answer to what is not HTTP at all.
Bodies are bounded where they are read (`limits`). Must never wait for a client without a deadline.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.clients import CLOSE_EXTENSION
from octavo.server.errors import ApiError
from octavo.server.limits import MAX_HEAD

_STATUS = {400: "Bad Request", 408: "Request Timeout"}


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with additions: streams can close their connection after an error, even a
    request that is not HTTP gets the error envelope, and a request's head is bounded in size and time."""

    def __init__(self, *args: Any, header_timeout: float, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._header_timeout = header_timeout
        self._head: int | None = 0  # bytes of the request's head so far, None once it is complete
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)
        # A connection and its last request refer to each other: apart, both go at once, without a search for cycles.
        self.cycle, self.scope = None, None  # type: ignore[assignment]
        self.pipeline.clear()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._start_head_timer()
        extensions: dict[str, Any] = {CLOSE_EXTENSION: self.shutdown}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_head_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response(f"The request's line and headers are larger than {MAX_HEAD} bytes.")

    def _start_head_timer(self) -> None:
        """From the connection's first moment, and from the first byte of each later request; between two
        requests it is uvicorn's keep-alive timer that runs."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if not self._head or answering:  # it has sent nothing, or an answer to an earlier request is on its way
            self.transport.close()
        else:
            message = f"The request's line and headers did not arrive within {self._header_timeout:g} s (--header-timeout)."
            self._refuse(ApiError(408, message, code="header_timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = bytes(error.response().body)
        lines = [
            f"HTTP/1.1 {error.status} {_STATUS[error.status]}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
