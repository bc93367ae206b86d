"""Tokenizer and state routes, priorities, a full queue, and a connection that is used again."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, ask, error_of
from tests.server.conftest import CONTEXT, QUEUE
from tests.server.harness import NAME, Server, post_raw, until


def test_tokenize_and_detokenize_are_inverse_and_have_vllms_shape(client: httpx.Client) -> None:
    answer = ask(client, "/tokenize", {"prompt": "hello é <|im_end|>", "add_special_tokens": False, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == CONTEXT
    assert ask(client, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": "hello é <|im_end|>"}
    assert ask(client, "/tokenize", {"prompt": "x"})["tokens"][0] == 1
    assert ask(client, "/tokenize", {"prompt": "x"})["token_strs"] is None


@pytest.mark.parametrize("tokens", [[512], [-1], ["a"], "text", [1.5]])
def test_detokenize_refuses_what_is_no_token(client: httpx.Client, tokens: Any) -> None:
    assert error_of(client.post("/detokenize", json={"tokens": tokens}))["param"].startswith("tokens")


def test_tokenizing_a_chat_counts_what_the_chat_costs(client: httpx.Client) -> None:
    count = ask(client, "/tokenize", {"messages": CHAT["messages"]})["count"]
    assert count == ask(client, "/v1/chat/completions", CHAT)["usage"]["prompt_tokens"]
    error = error_of(client.post("/tokenize", json={"prompt": "x", "messages": CHAT["messages"]}))
    assert error["param"] == "prompt"


def test_models_have_their_served_name_even_with_a_slash(client: httpx.Client) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == NAME and card["max_model_len"] == CONTEXT
    assert client.get(f"/v1/models/{NAME}").json() == card


def test_state_routes(client: httpx.Client) -> None:
    assert client.get("/health").content == b"" and client.head("/ping").status_code == 200
    assert set(client.get("/load").json()) == {"server_load", "running", "waiting", "kv_cache_usage"}
    assert client.get("/version").json()["version"]
    schema = client.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert "prompt" in schema["components"]["schemas"][body.rsplit("/", 1)[1]]["properties"]


def test_metrics_count_requests_and_hold_no_text_of_clients(client: httpx.Client) -> None:
    secret = "a-secret-that-must-not-show"
    ask(client, "/v1/completions", {**TEXT, "prompt": secret, "user": secret})
    client.post(f"/v1/{secret}", json={"model": secret})
    client.post("/v1/completions", json={**TEXT, "model": secret})
    page = client.get("/metrics").text
    assert secret not in page
    assert f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{NAME}"}}' in page
    for name in ("octavo_time_to_first_token_seconds", "octavo_request_queue_seconds", "vllm:request_prefill_time_seconds"):
        line = next(row for row in page.splitlines() if row.startswith(name + "_count"))
        assert float(line.split()[-1]) > 0
    assert 'octavo_http_responses_total{route="/v1/completions",status="404"}' in page


def test_priorities_are_honoured_within_what_the_server_allows(client: httpx.Client) -> None:
    for value in (0, 3, -5):
        ask(client, "/v1/completions", {**TEXT, "priority": value})
    assert error_of(client.post("/v1/completions", json={**TEXT, "priority": -6}))["param"] == "priority"
    for value, status in (("2", 200), ("-6", 400), ("high", 400)):
        response = client.post("/v1/completions", json=TEXT, headers={"x-octavo-priority": value})
        assert response.status_code == status


def test_a_full_queue_is_429_with_a_time_to_wait_and_clears_by_itself(server: Server, client: httpx.Client) -> None:
    server.idle(20)
    body = {**TEXT, "max_tokens": 4000, "stream": True}
    socks = [post_raw(server, "/v1/completions", body) for _ in range(8)]
    until(lambda: server.gauges()["running"] == 8, 10, "the batch is full")
    socks += [post_raw(server, "/v1/completions", body) for _ in range(QUEUE)]
    until(lambda: server.gauges()["waiting"] == QUEUE, 20, "the queue is full")
    for extra in ({}, {"stream": True}, {"prompt": ["one", "two"]}):
        response = client.post("/v1/completions", json={**TEXT, **extra})
        assert response.status_code == 429 and error_of(response)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    for sock in socks:
        sock.close()
    server.idle(2)
    ask(client, "/v1/completions", TEXT)


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        (
            "POST",
            "/v1/audio/speech",
            {"input": "x"},
            "This server has no route POST /v1/audio/speech; GET /docs shows those that there are.",
        ),
        ("PUT", "/v1/completions", None, "/v1/completions takes POST, not PUT."),
        ("POST", "/v1/chat/completions", {"messages": []}, "messages: must not be empty"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs: must be an integer in [0, 20], got 21",
        ),
        ("POST", "/generate", {"prompt": "x", "max_new_tokens": -1}, "max_new_tokens: must be"),
    ],
)
def test_an_error_names_what_the_client_wrote(server: Server, method: str, path: str, body: Any, message: str) -> None:
    with server.client() as client:
        error = client.request(method, path, json=body).json()["error"]
    assert error["message"].startswith(message)


def test_a_connection_that_is_used_again_is_answered_at_once(server: Server) -> None:
    """An answer leaves in two writes: with Nagle's algorithm the second waits 40 ms for the client's delayed acknowledgement."""
    with server.client() as client:
        client.get("/version").raise_for_status()
        waits = []
        for _ in range(20):
            began = time.perf_counter()
            client.get("/version").raise_for_status()
            waits.append(time.perf_counter() - began)
    assert sorted(waits)[len(waits) // 2] < 0.035, waits
