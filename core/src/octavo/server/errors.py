"""Errors on the wire: which exception becomes which status and which envelope.

Owns the mapping, in one place, from every exception to `{"error": {"message", "type", "param",
"code"}}`. Must never put a traceback, a path of this machine or an API key into an answer: what is
unknown is logged here and reaches the client as "internal error" with the request's id.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.errors import Aborted, AdmissionRefused, EngineDead, OctavoError, RequestError, UnknownModel

log = logging.getLogger("octavo.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}
_REFUSED = {"queue_full": 429, "no_capacity": 429, "too_large": 400, "draining": 503, "grammar_failed": 500}


class ApiError(OctavoError):
    """An error as the client sees it: HTTP status and the four fields of the envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def envelope(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer, for a request whose answer has not begun."""
        return Response(json.dumps(self.envelope), self.status, headers=self.headers, media_type="application/json")

    def event(self) -> bytes:
        """The one error event that ends a stream which has begun; no `[DONE]` follows it."""
        return b"data: " + json.dumps(self.envelope).encode() + b"\n\n"


class DeadlineExceeded(OctavoError):
    """The request's own deadline passed before its answer was complete."""


class GenerationFailed(OctavoError):
    """The engine ended one sample with an error (for instance logits that are not finite)."""


class Cut(OctavoError):
    """The request was ended before it was complete and not by its client: drain, or an abort from outside."""


def model_not_found(name: str, served: list[str]) -> ApiError:
    shown = name if len(name) <= 100 else name[:100] + "..."
    return ApiError(
        404,
        f"The model {shown!r} does not exist. This server has: {', '.join(served)}.",
        param="model",
        code="model_not_found",
    )


def unsupported(param: str, why: str) -> ApiError:
    """A field that is part of the protocol but that this server cannot honour: never ignored."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported")


def to_api_error(exc: BaseException, request_id: str = "") -> ApiError:
    """The ApiError of any exception. An unforeseen one is logged with its traceback, here and nowhere else."""
    match exc:
        case ApiError():
            return exc
        case RequestError():
            return ApiError(400, exc.message, param=exc.param, code=exc.code or "invalid_value")
        case AdmissionRefused():
            status = _REFUSED.get(exc.code, 503)
            wait = exc.retry_after
            if wait is None and status in (429, 503):
                wait = 1.0
            headers = {"Retry-After": str(max(1, math.ceil(wait)))} if wait is not None and status != 400 else {}
            return ApiError(status, exc.message, code=exc.code, headers=headers)
        case UnknownModel():
            return ApiError(404, str(exc), param="model", code="model_not_found")
        case EngineDead():
            return ApiError(503, f"The engine has stopped: {exc}", code="engine_dead")
        case DeadlineExceeded():
            # the client's library must not try again by itself: it would only be late once more
            return ApiError(
                504,
                "The deadline passed before the answer was complete.",
                param="deadline",
                code="deadline_exceeded",
                headers={"x-should-retry": "false"},
            )
        case Cut() | Aborted():
            return ApiError(503, str(exc), code="aborted")
        case GenerationFailed():
            return ApiError(500, str(exc), code="generation_failed")
        case RequestValidationError():  # a path or query parameter; bodies are read by `wire`
            first: Any = exc.errors()[0]
            param = str(first["loc"][-1])
            return ApiError(400, f"{param}: {first['msg']}", param=param, code="invalid_value")
        case HTTPException():
            return ApiError(exc.status_code, str(exc.detail), code=_CODES.get(exc.status_code), headers=dict(exc.headers or {}))
    log.error("request %s failed", request_id or "-", exc_info=exc)
    return ApiError(500, f"Internal error. The server's log has the details under request {request_id}.", code="internal_error")
