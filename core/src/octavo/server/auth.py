"""Who is asking: API keys, denied by default.

Owns the key check of every route, as one ASGI layer in front of the router: a path is open only
if it is in OPEN, so that a new route is guarded without anybody thinking of it. Paths are compared
after percent-decoding, exactly. Whose key it is, `tenants` knows. Must never log, echo or store a key.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError
from octavo.server.tenants import Principal, Tenants

OPEN = frozenset({"/health", "/ping", "/ready"})
ADMIN = "/admin"
WATCHED = frozenset({"/metrics", "/scale"})
"""What an admin key opens beside /admin: an operator watches all tenants, and a tenant itself."""


class Guard:
    """ASGI layer that lets a request through only with the right key.

    Client routes need the key of a tenant, unless the server has none at all; everything under
    /admin needs an admin key, and without admin keys those routes are off. An admin key opens
    /admin and WATCHED, and nothing else.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self.app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there is no websocket route; refusing here keeps it that way
            return await send({"type": "websocket.close", "code": 1008})
        path = route_path(scope)
        if path not in OPEN:
            verdict = self._check(path, _bearer(scope))
            if isinstance(verdict, ApiError):
                return await verdict.response()(scope, receive, send)
            scope.setdefault("state", {})["principal"] = verdict
        await self.app(scope, receive, send)

    def _check(self, path: str, key: str | None) -> Principal | ApiError:
        if path == ADMIN or path.startswith(ADMIN + "/"):
            return self._check_admin(key)
        if path in WATCHED and key is not None and key in self._tenants.admins:
            return Principal("admin", admin=True)
        if not self._tenants:
            return self._tenants.nobody
        found = None if key is None else self._tenants.find(key)
        return _unauthorised(key) if found is None else found

    def _check_admin(self, key: str | None) -> Principal | ApiError:
        admins = self._tenants.admins
        if key is not None and key in admins:
            return Principal("admin", admin=True)
        known = not self._tenants or (key is not None and self._tenants.find(key) is not None)
        if not admins and known:
            return ApiError(403, "The /admin routes are off: start the server with --admin-api-key.", code="admin_disabled")
        if key is not None and known and self._tenants:
            return ApiError(403, "This key may not use the /admin routes; they need an admin key.", code="not_admin")
        return _unauthorised(key)


def route_path(scope: Scope) -> str:
    """The decoded path that the router will match: without --root-path, as Starlette takes it off."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def _bearer(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer <token>`, None where there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" and token.strip() else None
    return None


def _unauthorised(key: str | None) -> ApiError:
    message = "No API key: send `Authorization: Bearer <key>`." if key is None else "The API key is not valid."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
