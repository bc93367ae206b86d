"""What a wrong request is answered with, over real sockets: the envelope, the status, and a server that goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, GREEDY, TEXT, ask, error_of
from tests.server.conftest import CONTEXT
from tests.server.harness import NAME, Server


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", [512]), ("prompt", [-1]), ("prompt", [2**63]), ("prompt", [2**70]), ("prompt", []), ("prompt", [[1], []]),
     ("stop_token_ids", [512]), ("logit_bias", {"512": 1}), ("logit_bias", {"99999": 5}), ("n", 129), ("max_tokens", 0)],
)  # fmt: skip
def test_an_id_or_a_size_out_of_range_is_400_and_the_next_request_works(client: httpx.Client, field: str, value: Any) -> None:
    for extra in ({}, {"stream": True}, {"min_tokens": 3}):
        response = client.post("/v1/completions", json={**TEXT, field: value, **extra})
        assert (response.status_code, error_of(response)["param"]) == (400, field)
        assert response.headers["content-type"] == "application/json"
    ask(client, "/v1/completions", TEXT)


@pytest.mark.parametrize("wrong", [[512], [9] * (CONTEXT + 1)])
def test_of_several_prompts_the_one_that_is_wrong_is_named(client: httpx.Client, wrong: list[int]) -> None:
    response = client.post("/v1/completions", json={**TEXT, "prompt": [[9], [9], wrong]})
    assert response.status_code == 400 and error_of(response)["message"].endswith(" (prompt 2 of the list)")
    response = client.post("/v1/completions", json={**TEXT, "prompt": [wrong]})
    assert response.status_code == 400 and "of the list" not in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": list(range(5)), "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/responses", {"input": "x", "top_p": 2}),
        ("/generate", {"prompt": "x", "temperature": -1}),
    ],
)
def test_a_wrong_request_for_a_stream_is_answered_plainly_and_no_stream_begins(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    error_of(response)


def test_an_empty_prompt_is_the_begin_token_alone(client: httpx.Client) -> None:
    for prompt in ("", [""]):
        assert ask(client, "/v1/completions", {**TEXT, "prompt": prompt})["usage"]["prompt_tokens"] == 1
    response = client.post("/v1/completions", json={**TEXT, "prompt": "", "add_special_tokens": False})
    assert error_of(response)["param"] == "prompt"


def test_too_many_samples_in_one_request_are_refused(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={**TEXT, "prompt": ["x"] * 9, "n": 128})
    assert error_of(response)["param"] == "n"
    response = client.post("/v1/completions", json={**TEXT, "prompt": ["x"] * 1025})
    assert error_of(response)["param"] == "prompt"


def test_a_prompt_and_an_explicit_limit_beyond_the_context_are_400(client: httpx.Client) -> None:
    for body in ({"prompt": [9] * (CONTEXT + 1)}, {"prompt": [9] * CONTEXT}, {"prompt": [9] * 10, "max_tokens": CONTEXT - 9}):
        response = client.post("/v1/completions", json=body)
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    long = {"messages": [{"role": "user", "content": "x" * (CONTEXT + 1)}]}
    response = client.post("/v1/chat/completions", json=long)
    assert (error_of(response)["code"], error_of(response)["param"]) == ("context_length_exceeded", "messages")
    assert (
        "5000"
        in error_of(client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 5000, "max_tokens": None}))[
            "message"
        ]
    )


def test_an_omitted_limit_is_what_the_context_leaves(client: httpx.Client) -> None:
    room = 5
    answer = ask(client, "/v1/completions", {"prompt": [9] * (CONTEXT - room), **GREEDY})
    assert answer["usage"]["completion_tokens"] == room
    messages = [{"role": "user", "content": "x" * (CONTEXT - 60)}]
    answer = ask(client, "/v1/chat/completions", {"messages": messages, **GREEDY})
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert ask(client, "/v1/completions", {"prompt": "x", **GREEDY})["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
    ],
)
def test_what_does_not_exist_answers_with_the_envelope(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status and error_of(response)["code"] == code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
def test_every_body_route_refuses_what_is_not_json(client: httpx.Client, path: str) -> None:
    for content in (b"", b"{", b"[1]", b"\xff"):
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and error_of(response)["code"] == "invalid_json"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = client.post(path, content=b"{}", headers={"Content-Type": kind})
        assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type"


def test_a_body_without_a_content_type_is_json(client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=json.dumps(TEXT).encode()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404_and_the_served_name_works(client: httpx.Client, path: str) -> None:
    field = {"/v1/chat/completions": "messages", "/detokenize": "tokens"}.get(path, "prompt")
    value = {"messages": CHAT["messages"], "tokens": [9], "prompt": "x"}[field]
    response = client.post(path, json={field: value, "model": "gpt-4"})
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"
    limit = {} if "tokenize" in path else {"max_tokens": 2}
    assert client.post(path, json={field: value, "model": NAME, **limit}).status_code == 200


def test_a_template_that_refuses_gives_its_own_words(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "developer", "content": "x"}]})
    assert response.status_code == 400 and "Unknown role: developer" in error_of(response)["message"]


def test_messages_take_text_parts_and_calls_without_text(client: httpx.Client) -> None:
    def count(message: dict[str, Any]) -> int:
        found: int = ask(client, "/tokenize", {"messages": [message]})["count"]
        return found

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert count({"role": "user", "content": parts}) in (count({"role": "user", "content": t}) for t in ("onetwo", "one\ntwo"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert count({"role": "assistant", "content": None, "tool_calls": [call]}) == count({"role": "assistant", "content": ""})
    for content in (None, [{"type": "image_url", "image_url": {"url": "x"}}], 5, [5]):
        response = client.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": content}]})
        assert response.status_code == 400 and error_of(response)["param"].startswith("messages[0].content")


@pytest.mark.parametrize("kwargs", [{"chat_template": "{{ 1 }}"}, {"messages": []}, {"bos_token": "x"}])
def test_a_request_cannot_bring_a_template(client: httpx.Client, kwargs: dict[str, Any]) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": kwargs})
    assert response.status_code == 400 and error_of(response)["param"] == "chat_template_kwargs"


def test_an_invalid_http_request_still_gets_the_envelope(server: Server) -> None:
    with socket.create_connection(server.address, timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400") and b'"invalid_http"' in answer


@pytest.mark.parametrize(
    "endless", [b"GET /" + b"x" * 70_000, b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000]
)
def test_a_head_that_never_ends_is_cut(server: Server, endless: bytes) -> None:
    with socket.create_connection(server.address, timeout=10) as sock:
        sock.sendall(endless)
        answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400") and b"headers are larger" in answer
