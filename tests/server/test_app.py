"""Every route of the application is guarded, and every fault has one shape."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from octavo.config import ServerConfig
from octavo.errors import AdmissionRefused, ConfigError, EngineDead, RequestError
from octavo.server.app import create_app
from octavo.server.auth import OPEN, WATCHED
from octavo.server.clients import frame
from octavo.server.errors import to_api_error
from octavo.server.serve import is_loopback

from tests.server.harness import ADMIN_KEY, API_KEYS

CONFIG = ServerConfig(api_key=API_KEYS, admin_api_key=(ADMIN_KEY,))


@pytest.fixture
def app() -> FastAPI:
    """The application while its engine is still loading."""
    return create_app(None, CONFIG, ["tiny"])


def ask(app: FastAPI, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {key}"} if key else {})
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(go())


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, whatever kind of route it is."""

    for route in app.routes:
        path = getattr(route, "path", None)
        assert isinstance(path, str), f"{route!r} holds routes of its own: this walk would miss them"
        for method in getattr(route, "methods", None) or ["GET"]:
            yield method, re.sub(r"{[^}]*}", "x", path)


def test_the_walk_sees_the_routes(app: FastAPI) -> None:
    found = set(routes(app))
    assert {
        ("POST", "/v1/chat/completions"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/admin/status"),
        ("GET", "/metrics"),
    } <= found


def test_no_route_is_open_unless_it_is_listed(app: FastAPI) -> None:
    @app.get("/a/route/that/somebody/adds")
    async def added() -> str:
        return "in"

    for method, path in routes(app):
        if path in OPEN:
            continue
        keys = (None, "wrong") if path.startswith("/admin") or path in WATCHED else (None, "wrong", ADMIN_KEY)
        for key in keys:
            assert ask(app, method, path, key).status_code == 401, f"{method} {path} with key {key}"
        right = ADMIN_KEY if path.startswith("/admin") else API_KEYS[1]
        assert ask(app, method, path, right).status_code not in (401, 403), f"{method} {path}"


def test_the_open_routes_are_liveness_and_nothing_else() -> None:
    assert {"/health", "/ping", "/ready"} == OPEN


def test_a_root_path_opens_nothing() -> None:
    app = create_app(None, CONFIG.model_copy(update={"root_path": "/proxy"}), ["tiny"])

    def status(path: str) -> int:
        async def go() -> int:
            transport = httpx.ASGITransport(app, root_path="/proxy")
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return (await client.get(path)).status_code

        return asyncio.run(go())

    assert status("/proxy/v1/models") == status("/v1/models") == status("/proxyhealth") == 401
    assert status("/proxy/health") == 503


def test_bad_keys_stop_the_start() -> None:
    with pytest.raises(ConfigError):
        create_app(None, ServerConfig(api_key=("",)), ["tiny"])


def test_while_the_engine_loads_every_route_that_needs_it_says_so(app: FastAPI) -> None:
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/load"),
        ("POST", "/tokenize"),
    ):
        body = {"json": {"prompt": "x"}} if method == "POST" else {}
        response = ask(app, method, path, API_KEYS[0], **body)
        assert response.status_code == 503 and response.json()["error"]["code"] == "loading"
    assert ask(app, "GET", "/health").status_code == ask(app, "GET", "/ready").status_code == 503
    assert ask(app, "GET", "/version", API_KEYS[0]).status_code == 200


def test_an_unforeseen_fault_is_logged_and_the_client_learns_its_id_alone(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the password is swordfish")

    response = ask(app, "GET", "/broken", API_KEYS[0])
    error = response.json()["error"]
    assert response.status_code == 500 and error["code"] == "internal_error"
    assert "swordfish" not in response.text and "Traceback" not in response.text
    assert response.headers["x-request-id"] in error["message"]
    assert "swordfish" in caplog.text and response.headers["x-request-id"] in caplog.text
    assert sum("swordfish" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_route_with_typed_parameters_still_answers_with_the_envelope(app: FastAPI) -> None:
    @app.get("/typed")
    async def typed(number: int) -> int:
        return number

    response = ask(app, "GET", "/typed?number=x", API_KEYS[0])
    assert response.status_code == 400 and set(response.json()) == {"error"}
    assert response.json()["error"]["param"] == "number"


def test_cors_answers_browsers_only_where_it_was_asked_for(app: FastAPI) -> None:
    preflight = {"Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    assert ask(app, "OPTIONS", "/v1/completions", headers=preflight).status_code == 401
    allowed = create_app(None, CONFIG.model_copy(update={"allowed_origins": ("https://ui.example",)}), ["tiny"])
    response = ask(allowed, "OPTIONS", "/v1/completions", headers=preflight)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://ui.example"
    refused = ask(allowed, "POST", "/v1/completions", headers={"Origin": "https://ui.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://ui.example"
    other = ask(allowed, "POST", "/v1/completions", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("exc", "status", "code", "waits"),
    [
        (RequestError("x", param="n"), 400, "invalid_value", False),
        (RequestError("x", param="prompt", code="context_length_exceeded"), 400, "context_length_exceeded", False),
        (AdmissionRefused("x", code="queue_full", retry_after=2.5), 429, "queue_full", True),
        (AdmissionRefused("x", code="queue_full"), 429, "queue_full", True),
        (AdmissionRefused("x", code="no_capacity", retry_after=1), 429, "no_capacity", True),
        (AdmissionRefused("x", code="too_large"), 400, "too_large", False),
        (AdmissionRefused("x", code="draining", retry_after=5), 503, "draining", True),
        (EngineDead("x"), 503, "engine_dead", False),
        (ValueError("x"), 500, "internal_error", False),
    ],
)
def test_each_kind_of_error_has_one_status(exc: Exception, status: int, code: str, waits: bool) -> None:
    logging.getLogger("octavo.server").setLevel(logging.CRITICAL)
    try:
        error = to_api_error(exc, "id")
    finally:
        logging.getLogger("octavo.server").setLevel(logging.NOTSET)
    assert (error.status, error.code) == (status, code)
    assert ("Retry-After" in error.headers) == waits
    if waits:
        assert int(error.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)])
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org"])
def test_everything_else_is_beyond_this_machine(host: str) -> None:
    assert not is_loopback(host)


def test_the_server_process_never_imports_torch() -> None:
    import subprocess
    import sys

    code = "import sys, octavo.server.serve; print([m for m in ('torch', 'transformers', 'triton', 'cupy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_streams_events_are_one_line_each_for_every_way_of_splitting_lines() -> None:
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0xA0, 0x2028, 0x2029, 0xFEFF, 0x1F600]))
    event = frame({"text": text})
    assert event.decode().splitlines()[1:] == [""]
    assert json.loads(event.removeprefix(b"data: ")) == {"text": text}
