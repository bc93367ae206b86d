"""Who is asking: API keys, denied by default.

Owns the key check of every route, as one ASGI layer in front of the router: a path is open only
if it is in OPEN, so that a new route is guarded without anybody thinking of it. Paths are compared
after percent-decoding, exactly. Must never log, echo or store a key; a principal carries
derived names only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.errors import ApiError

OPEN = frozenset({"/health", "/ping", "/ready"})
ADMIN = "/admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller.

    tenant: name for logs and fair share, "key-0" for the first key, "" where the server has no keys.
    domain: prefix-cache domain, derived from the key with a secret of this process, "" without keys.
    """

    tenant: str = ""
    domain: str = ""
    admin: bool = False


class Keys:
    """A set of keys that answers which one was presented, in time that does not depend on the keys."""

    def __init__(self, keys: Sequence[str], what: str) -> None:
        for key in keys:
            if not key.strip():
                raise ConfigError(f"{what}: an empty key would let everybody in; remove it or set a real one")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def find(self, presented: str) -> int | None:
        """Index of the key that equals `presented`; every key is compared, whatever matches first."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found


class Guard:
    """ASGI layer that lets a request through only with the right key.

    Client routes need one of `api_keys`, unless the server has none at all; everything under
    /admin needs one of `admin_keys`, and without admin keys those routes are off. An admin key
    opens /admin and nothing else.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self.app = app
        self._clients, self._admins = Keys(api_keys, "--api-key"), Keys(admin_keys, "--admin-api-key")
        if any(key in self._admins for key in api_keys):
            raise ConfigError("--admin-api-key: one key is also an --api-key, which would make every client an administrator")
        secret = secrets.token_bytes(32)
        self._principals = [
            Principal(f"key-{i}", hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()[:32])
            for i, key in enumerate(api_keys)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there is no websocket route; refusing here keeps it that way
            return await send({"type": "websocket.close", "code": 1008})
        path = _route_path(scope)
        if path not in OPEN:
            verdict = self._check(path, _bearer(scope))
            if isinstance(verdict, ApiError):
                return await verdict.response()(scope, receive, send)
            scope.setdefault("state", {})["principal"] = verdict
        await self.app(scope, receive, send)

    def _check(self, path: str, key: str | None) -> Principal | ApiError:
        if path == ADMIN or path.startswith(ADMIN + "/"):
            return self._check_admin(key)
        if not self._clients:
            return Principal()
        index = None if key is None else self._clients.find(key)
        return _unauthorised(key) if index is None else self._principals[index]

    def _check_admin(self, key: str | None) -> Principal | ApiError:
        if key is not None and key in self._admins:
            return Principal("admin", admin=True)
        known = not self._clients or (key is not None and key in self._clients)
        if not self._admins and known:
            return ApiError(403, "The /admin routes are off: start the server with --admin-api-key.", code="admin_disabled")
        if key is not None and known and self._clients:
            return ApiError(403, "This key may not use the /admin routes; they need an admin key.", code="not_admin")
        return _unauthorised(key)


def _route_path(scope: Scope) -> str:
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
