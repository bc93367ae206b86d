"""Whatever our own OpenAPI document allows, and whatever it forbids, is answered: never a 500, always in the shape
that the document promises. The cases are schemathesis'."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from octavo.config import ServerConfig
from octavo.server.app import create_app
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.server.harness import ADMIN_KEY, NAME, SMALL_KEY, Server

load_all_checks()
DOCUMENT = create_app(None, ServerConfig(), ["tiny"]).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {f"{op.method.upper()} {op.path}": op for op in (found.ok() for found in SCHEMA.get_all_operations())}
CLIENTS = sorted(name for name in OPERATIONS if "/admin" not in name)
ADMINS = sorted(set(OPERATIONS) - set(CLIENTS))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
BODIES = [name for name in OPERATIONS if name.startswith(("POST", "PUT"))]


def ask(server: Server, case: Any, key: str = SMALL_KEY) -> None:
    """One case, of clients with a key whose answers are short. A tiny deadline may pass: that is an answer, and no fault."""
    response = case.call(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    late = response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    assert response.status_code < 500 or late, f"{response.status_code} {response.text}\n{case.as_curl_command()}"
    case.validate_response(response, checks=[response_schema_conformance, status_code_conformance, content_type_conformance])


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("name", CLIENTS)
def test_no_request_makes_the_server_fail(server: Server, name: str, mode: GenerationMode) -> None:
    operation = OPERATIONS[name]
    if mode is GenerationMode.NEGATIVE and name not in BODIES:
        pytest.skip("nothing in it can be wrong")

    @settings(
        max_examples=EXAMPLES if name in BODIES else 2,
        deadline=None,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        ask(server, case)
        if mode is GenerationMode.POSITIVE and "chat" in name and isinstance(case.body, dict):
            case.body["messages"] = [
                {"role": "user", "content": "hello"}
            ]  # roles are the template's decision, not the document's
            ask(server, case)

    send()
    assert server.process.poll() is None


@pytest.fixture(scope="module")
def administered(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: what administrators may do is not for others to share."""
    running = Server(tiny, tmp_path_factory.mktemp("administered") / "log", "--admin-api-key", ADMIN_KEY)
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.mark.parametrize("name", ADMINS)
def test_no_order_of_an_administrator_makes_the_server_fail(administered: Server, name: str) -> None:
    """Names are drawn too: with the model's own name in half of the cases, more than "there is no such model" is answered."""

    @settings(
        max_examples=EXAMPLES // 4,
        deadline=None,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[name].as_strategy(generation_mode=GenerationMode.POSITIVE), known=st.booleans())
    def send(case: Any, known: bool) -> None:
        if known and "name" in case.path_parameters:
            case.path_parameters["name"] = NAME
        if known and "model" in case.query:
            case.query["model"] = NAME
        ask(administered, case, ADMIN_KEY)

    send()
    assert administered.process.poll() is None
    with administered.client(ADMIN_KEY) as admin:  # a drain that was drawn is not the end
        admin.post(f"/admin/models/{NAME}/resume")
        answer = admin.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_the_document_is_whole() -> None:
    """Every reference leads somewhere, every guarded route says so, and every body has its fields."""
    names = set(DOCUMENT["components"]["schemas"])
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))) <= names
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert ("security" in operation) == (path not in ("/health", "/ping", "/ready")), path
            assert "422" not in operation["responses"] and operation.get("description"), f"{method} {path}"
    chat = DOCUMENT["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False and chat["required"] == ["messages"]
    assert {"minimum": 0.0, "maximum": 1.0, "type": "number"} in chat["properties"]["top_p"]["anyOf"]
    assert {"minimum": -(2**63), "maximum": 2**63 - 1, "type": "integer"} in chat["properties"]["seed"]["anyOf"]
    assert "`functions`" in chat["description"] and "tools" in chat["properties"]
