"""The key check in front of every route, as a layer of its own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.auth import Guard
from octavo.server.tenants import Keys, Tenants
from starlette.types import Receive, Scope, Send

KEYS, ADMINS = ("first-secret", "second-secret"), ("admin-secret",)


class Inner:
    """The application behind the guard: answers 200 and remembers who got through."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append((scope["path"], scope.get("state", {}).get("principal")))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


def guard(inner: Any, keys: tuple[str, ...] = (), admins: tuple[str, ...] = ()) -> Guard:
    return Guard(inner, Tenants(ServerConfig(api_key=keys, admin_api_key=admins)))


def ask(
    path: str, header: str | None = None, *, keys: tuple[str, ...] = KEYS, admins: tuple[str, ...] = ADMINS, method: str = "GET"
) -> Any:
    inner = Inner()
    headers = {} if header is None else {"Authorization": header}

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(guard(inner, keys, admins))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    response = asyncio.run(go())
    assert (response.status_code == 200) == bool(inner.seen)
    response.extensions["principal"] = inner.seen[0][1] if inner.seen else None
    return response


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_only_the_liveness_routes_are_open(path: str) -> None:
    assert ask(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/models", "/v1/x/", "//v1/x", "/%76%31/models", "/v1%2Fmodels", "/docs", "/openapi.json", "/metrics", "/load", "/version",
     "/admin/plugins", "/admin", "/health/", "/health/..", "/health/../v1/models", "//health", "/HEALTH", "/health;x", "/%2Fhealth",
     "/unknown/route"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_every_other_path_is_closed_however_it_is_spelt(path: str, method: str) -> None:
    for header in (
        None,
        "Bearer wrong",
        "Bearer ",
        "Basic first-secret",
        "first-secret",
        "Bearer first-secre",
        "Bearer first-secret1",
    ):
        response = ask(path, header, method=method)
        assert response.status_code == 401
        assert method == "HEAD" or response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", ["Bearer first-secret", "bearer second-secret", "BEARER  first-secret "])
def test_any_of_the_keys_opens_client_routes(header: str) -> None:
    assert ask("/v1/models", header).status_code == 200


def test_admin_routes_need_an_admin_key_which_opens_what_operators_watch_and_nothing_else() -> None:
    assert ask("/admin/status", "Bearer admin-secret").status_code == 200
    assert ask("/admin/status", "Bearer first-secret").status_code == 403
    assert ask("/v1/models", "Bearer admin-secret").status_code == 401
    for path in ("/metrics", "/scale"):
        assert ask(path, "Bearer admin-secret").extensions["principal"].admin
        assert not ask(path, "Bearer first-secret").extensions["principal"].admin
        assert ask(path + "/", "Bearer admin-secret").status_code == 401


def test_without_admin_keys_admin_routes_are_off() -> None:
    assert ask("/admin/status", "Bearer first-secret", admins=()).status_code == 403
    assert ask("/admin/status", admins=()).status_code == 401
    assert ask("/admin/status", keys=(), admins=()).status_code == 403


def test_without_any_keys_client_routes_are_open() -> None:
    assert ask("/v1/models", keys=(), admins=()).status_code == 200


def test_each_key_is_a_tenant_with_a_cache_domain_of_its_own_that_is_not_the_key() -> None:
    one = ask("/v1/models", "Bearer first-secret").extensions["principal"]
    two = ask("/v1/models", "Bearer second-secret").extensions["principal"]
    assert one.tenant != two.tenant and one.domain != two.domain and one.domain
    assert "secret" not in repr(one) + repr(two)
    assert ask("/v1/models", keys=(), admins=()).extensions["principal"].domain == ""


@pytest.mark.parametrize("keys", [("",), ("good", "  ")])
def test_an_empty_key_stops_the_start(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="empty key"):
        guard(Inner(), keys)


def test_a_key_for_clients_and_administrators_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="administrator") as caught:
        guard(Inner(), ("same-secret",), ("same-secret",))
    assert "same-secret" not in str(caught.value)


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.tenants as tenants

    calls = []
    real = tenants.hmac.compare_digest
    monkeypatch.setattr(tenants.hmac, "compare_digest", lambda a, b: calls.append(1) or real(a, b))
    keys = Keys.plain(["a", "b", "c"], "--api-key")
    for presented in ("a", "c", "wrong"):
        calls.clear()
        keys.find(presented)
        assert len(calls) == 3


def test_keys_are_in_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask("/v1/models?api_key=first-secret", "Bearer first-secret")
        ask("/v1/models", "Bearer a-wrong-secret")
    assert "first-secret" not in "".join(r.getMessage() for r in caplog.records if r.name.startswith("octavo"))
    assert "a-wrong-secret" not in caplog.text


def test_a_websocket_is_refused_before_the_application_sees_it() -> None:
    inner, sent = Inner(), []

    async def go() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await guard(inner)({"type": "websocket", "path": "/health", "headers": []}, receive, send)

    asyncio.run(go())
    assert sent == [{"type": "websocket.close", "code": 1008}] and not inner.seen
