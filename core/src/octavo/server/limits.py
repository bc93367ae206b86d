"""Sizes that a client may not exceed before anything is parsed, tokenised or allocated.

Owns the reading of request bodies and the caps on lists in a request. Limits of single sampling
parameters are in `octavo.request`; limits that depend on the model are in `check_request`.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError

MAX_SAMPLES = 1024  # sequences of one HTTP request: prompts x max(n, best_of)
MAX_PROMPTS = 1024
MAX_PROMPT_VALUES = 1 << 19  # log-probabilities of one prompt: its tokens x (1 + alternatives)
MAX_MESSAGES = 8192
MAX_LOGIT_BIAS = 4096
MAX_HEAD = 64 << 10  # bytes of a request's line and headers
MAX_REQUEST_ID = 128  # characters of a client's X-Request-Id that is echoed
_DRAIN_SECONDS = 2.0
_JSON = ("", "application/json")


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The request's body, at most `limit` bytes. Raises ApiError 413 as soon as it is known to be
    larger (from Content-Length, else while it arrives), 415 for a body that is declared not to be JSON,
    and 408 when it has not arrived after `seconds`: however slowly it drips, a body has so long and no longer.

    A body without a content type is taken as JSON. One declared as text or as a form is not: that is
    what a web page can send across origins without being asked.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"Content-Type must be application/json, got {kind[:80]!r}.", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit)
    except TimeoutError:
        message = f"The request body did not arrive within {seconds:g} s (--body-timeout)."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


class EarlyAnswer(Response):
    """An answer to a request whose body is still arriving: sent whole at once, then what the client is
    still sending is taken and thrown away, for a bounded time, so that it reads the answer instead of
    finding its connection reset; then the connection is closed."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.response().body, error.status, headers=error.headers, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes (--max-body-bytes).",
        code="body_too_large",
        headers={"Connection": "close"},
    )
