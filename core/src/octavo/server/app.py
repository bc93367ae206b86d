"""The application: routes, the layers around them, and the one place where exceptions become answers.

Owns the order of the layers, outermost first: the envelope (every fault becomes our error shape, every
answer is counted and carries a request id), CORS where it was asked for, the guard, the router. Must
never contain a route's logic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import octavo
from octavo.config import ServerConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.models import ModelTable
from octavo.errors import OctavoError
from octavo.server import admin, admin_models, completions, native, openapi, prefix, scale
from octavo.server.auth import ADMIN, OPEN, Guard, route_path
from octavo.server.clients import ClientGone
from octavo.server.errors import to_api_error
from octavo.server.limits import MAX_REQUEST_ID, EarlyAnswer
from octavo.server.logs import request_id
from octavo.server.pace import Rank
from octavo.server.records import new_id
from octavo.server.service import Service

_ECHOED = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")


def create_app(llm: AsyncLLM | None, config: ServerConfig, names: Sequence[str], models: ModelTable | None = None) -> FastAPI:
    """The server's application for the engine `llm`, which clients know by `names` (the first is the main one).

    llm may be None: everything answers 503 until an engine of `models` serves, or until
    `app.state.service.attach(llm)`. Raises ConfigError for unusable keys.
    """
    service = Service(config, names, models)
    if llm is not None:
        service.attach(llm)
    app = FastAPI(
        title="Octavo",
        version=octavo.__version__,
        redirect_slashes=False,
        exception_handlers={
            HTTPException: _answer,
            OctavoError: _answer,
            RequestValidationError: _answer,
            ClientGone: _nobody,
            ClientDisconnect: _nobody,
        },
    )
    app.state.service = service
    for router in (native.router, completions.router, admin.router, admin_models.router, prefix.router, scale.router):
        app.router.routes.extend(router.routes)  # flat, so that a walk over app.routes sees every one
    app.openapi = openapi.describe(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, tenants=service.tenants)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-octavo-model"],
        )
    app.add_middleware(Envelope, service=service)
    return app


async def _answer(request: Request, exc: Exception) -> Response:
    if isinstance(exc, HTTPException) and exc.status_code in (404, 405) and exc.detail == HTTPStatus(exc.status_code).phrase:
        exc = HTTPException(exc.status_code, _no_route(request, exc.headers or {}), exc.headers)
    error = to_api_error(exc, request.scope.get("octavo.request_id", ""))
    return EarlyAnswer(error) if error.status in (408, 413) else error.response()


def _no_route(request: Request, headers: Mapping[str, str]) -> str:
    """What the router could not find, instead of the bare name of the status."""
    path, allowed = route_path(request.scope)[:100], headers.get("Allow")
    if allowed:
        return f"{path} takes {allowed}, not {request.method[:20]}."
    return f"This server has no route {request.method[:20]} {path}; GET /docs shows those that there are."


async def _nobody(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)  # for the count of answers; the socket is gone


class Envelope:
    """The outermost layer: a turn for every request, an id on every answer, a count of it, and no exception past this point."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = route_path(scope)
        ahead = path in OPEN or path == ADMIN or path.startswith(ADMIN + "/")
        scope["octavo.waited"] = await self._service.pace.turn(Rank.AHEAD if ahead else Rank.NEW)
        own_id = scope["octavo.request_id"] = new_id()
        request_id.set(own_id)  # a server answers every request in a task of its own
        shown = (_client_id(scope) or own_id).encode()
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", shown), *_model(scope)]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception as exc:
            error = to_api_error(exc, own_id)
            if status:
                raise  # the answer has begun: the connection is cut, which the client sees
            await error.response()(scope, receive, tagged)
        finally:
            self._count(scope, status)

    def _count(self, scope: dict[str, Any] | Scope, status: int) -> None:
        self._service.count_answer(getattr(scope.get("route"), "path", "other"), status)


def _model(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Which model answered, behind an alias or a default: names are the operator's, but may be of any letters."""
    name = str(scope.get("octavo.model", ""))
    return [(b"x-octavo-model", quote(name, safe="/:@+ ").encode())] if name else []


def _client_id(scope: Scope) -> str | None:
    """The client's X-Request-Id, if it is short and printable; only ever echoed."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _ECHOED.fullmatch(text) else None
    return None
