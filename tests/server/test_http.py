"""The protocol over real sockets: shapes, errors and limits."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import CONTEXT, QUEUE
from tests.server.harness import API_KEYS, NAME, Server, events, post_raw, until

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello world"}], **GREEDY, "max_tokens": 12}
TEXT = {"prompt": "hello world", **GREEDY, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def ask(client: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def alike(one: Any, two: Any) -> bool:
    """Equal, numbers to 1e-4: the last bits of a sum depend on what shares the batch, tokens do not."""
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) < 1e-4
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(alike, one, two))
    return bool(one == two)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error


# ------------------------------------------------------------------ streams say what whole answers say


@pytest.mark.parametrize(
    "options", [{}, {"n": 3, "seed": 7, "temperature": 1}, {"stop": "e"}, {"logprobs": True, "top_logprobs": 2}]
)
def test_a_chat_stream_joined_is_the_whole_answer(client: httpx.Client, options: dict[str, Any]) -> None:
    body = {**CHAT, **options}
    whole = ask(client, "/v1/chat/completions", body)
    chunks = stream(client, "/v1/chat/completions", body)
    assert chunks[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            joined = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert alike(joined, choice["logprobs"]["content"])


@pytest.mark.parametrize(
    "options", [{}, {"n": 2, "seed": 7, "temperature": 1}, {"logprobs": 3}, {"logprobs": 2, "echo": True}, {"echo": True}]
)
@pytest.mark.parametrize(
    "prompt", ["hello world", ["one", "two", "three"], [10, 20, 30], [[10], [20, 30]]], ids=["text", "texts", "ids", "lists"]
)
def test_a_completion_stream_joined_is_the_whole_answer(client: httpx.Client, prompt: Any, options: dict[str, Any]) -> None:
    body = {**TEXT, "prompt": prompt, **options}
    whole = ask(client, "/v1/completions", body)
    chunks = stream(client, "/v1/completions", body)
    count = (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1) * options.get("n", 1)
    assert [c["index"] for c in whole["choices"]] == list(range(count))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = list(itertools.chain.from_iterable(c["logprobs"][field] for c in mine))
                assert alike(joined, choice["logprobs"][field])


def test_generate_streams_the_texts_that_it_answers_whole(client: httpx.Client) -> None:
    body = {"prompt": "hello", "max_new_tokens": 8, "n": 2, "seed": 3}
    whole = ask(client, "/generate", body)
    chunks = stream(client, "/generate", body)
    texts = ["".join(c["text"] for c in chunks[:-1] if c["index"] == i) for i in range(2)]
    assert texts == whole["text"] and chunks[-1] == "[DONE]"
    assert whole["usage"]["completion_tokens"] == 16


def test_usage_is_the_last_chunk_and_counts_a_prompt_once(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": ["one", "two"], "n": 2, "stream_options": {"include_usage": True}}
    chunks = stream(client, "/v1/completions", body)
    del body["stream_options"]
    whole = ask(client, "/v1/completions", body)
    usage = chunks[-2]["usage"]
    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"] == [] and all(c["usage"] is None for c in chunks[:-2])
    assert usage["completion_tokens"] == 4 * 12
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    solo = sum(ask(client, "/v1/completions", {**TEXT, "prompt": p})["usage"]["prompt_tokens"] for p in ("one", "two"))
    assert usage["prompt_tokens"] == solo


def test_running_usage_grows_to_the_final_one(client: httpx.Client) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = stream(client, "/v1/chat/completions", {**CHAT, **options})
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts == sorted(counts) and counts[-1] == 12


# ------------------------------------------------------------------ logprobs


def test_chat_logprobs_hold_the_token_its_bytes_and_as_many_alternatives_as_asked(client: httpx.Client) -> None:
    for top in (None, 0, 2, 20):
        options = {} if top is None else {"top_logprobs": top}
        choice = ask(client, "/v1/chat/completions", {**CHAT, "logprobs": True, **options})["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 12
        raw = b"".join(bytes(entry["bytes"]) for entry in content)
        assert raw.decode("utf-8", "replace") == choice["message"]["content"]
        for entry in content:
            assert len(entry["top_logprobs"]) == (top or 0)
            assert entry["logprob"] <= 0
            if top:
                assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy takes the best
    assert ask(client, "/v1/chat/completions", CHAT)["choices"][0]["logprobs"] is None


def test_a_token_that_is_part_of_a_character_shows_its_bytes(client: httpx.Client) -> None:
    body = {**CHAT, "logit_bias": {str(8 + 0xE2 - 0): 0.0}, "logprobs": True, "max_tokens": 60}
    content = ask(client, "/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    partial = [entry for entry in content if entry["token"].startswith("bytes:")]
    assert partial, "a random byte-level model emits broken UTF-8 within 60 tokens"
    for entry in partial:
        assert entry["token"] == "bytes:" + "".join(f"\\x{b:02x}" for b in entry["bytes"])


def test_completion_logprobs_of_zero_still_hold_the_chosen_tokens_value(client: httpx.Client) -> None:
    logprobs = ask(client, "/v1/completions", {**TEXT, "logprobs": 0})["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 12
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[value] for value in logprobs["token_logprobs"]]


def test_text_offsets_count_from_the_start_of_the_prompt(client: httpx.Client) -> None:
    plain = ask(client, "/v1/completions", {**TEXT, "logprobs": 0})["choices"][0]
    echoed = ask(client, "/v1/completions", {**TEXT, "logprobs": 0, "echo": True})["choices"][0]
    assert plain["logprobs"]["text_offset"][0] == len(TEXT["prompt"])
    assert echoed["text"] == TEXT["prompt"] + plain["text"]
    assert echoed["logprobs"]["text_offset"][-12:] == plain["logprobs"]["text_offset"]
    assert echoed["logprobs"]["text_offset"][0] == 0 and echoed["logprobs"]["token_logprobs"][0] is None
    offsets, tokens = echoed["logprobs"]["text_offset"], echoed["logprobs"]["tokens"]
    for before, offset, token in zip(["", *tokens], offsets, tokens, strict=False):
        if token.isascii() and not token.startswith(("bytes:", "<|")) and not before.startswith("bytes:"):
            assert echoed["text"][offset : offset + len(token)] == token


def test_echo_alone_is_the_prompt_and_its_values(client: httpx.Client) -> None:
    answer = ask(client, "/v1/completions", {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1})
    choice = answer["choices"][0]
    assert choice["text"] == TEXT["prompt"] and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


def test_values_of_a_prompt_come_once_in_a_stream_and_equal_the_whole_answers(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": [9] * 200, "prompt_logprobs": 3, "n": 2}
    whole = ask(client, "/v1/completions", body)["choices"]
    chunks = [c["choices"][0] for c in stream(client, "/v1/completions", body)[:-1]]
    for index in (0, 1):
        found = [c["prompt_logprobs"] for c in chunks if c["index"] == index and "prompt_logprobs" in c]
        assert len(found) == 1 and alike(found[0], whole[index]["prompt_logprobs"]) and len(found[0]) == 200


def test_more_values_of_a_prompt_than_one_answer_holds_are_refused() -> None:
    from octavo.errors import RequestError
    from octavo.request import ModelInfo, SamplingParams
    from octavo.server.limits import MAX_PROMPT_VALUES
    from octavo.server.runs import resolve

    info = ModelInfo(
        model="m", vocab_size=512, max_model_len=1 << 20, num_blocks=1, block_size=1, kv_cache_tokens=1, dtype="float32"
    )
    ids = [9] * (MAX_PROMPT_VALUES // 21)
    assert resolve(ids, SamplingParams(prompt_logprobs=20), info).prompt_logprobs == 20
    with pytest.raises(RequestError) as caught:
        resolve([*ids, 9, 9], SamplingParams(prompt_logprobs=20), info)
    assert caught.value.param == "prompt_logprobs"


def test_logprobs_are_those_of_transformers(client: httpx.Client, long_tiny: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [1, 40, 50, 60, 300, 310]
    answer = ask(client, "/v1/completions", {**TEXT, "prompt": ids, "echo": True, "logprobs": 1, "add_special_tokens": False})
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    found = ask(client, "/v1/completions", {**TEXT, "prompt": ids, "prompt_logprobs": 0})["choices"][0]["prompt_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(long_tiny, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for _ in range(12):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logits[i - 1, token]) for i, token in enumerate(ids) if i]
    assert values[0] is None and found[0] is None
    assert values[1:] == pytest.approx(expected, abs=1e-3)
    assert [entry[str(token)]["logprob"] for entry, token in zip(found[1:], ids[1:6], strict=True)] == pytest.approx(
        expected[:5], abs=1e-3
    )


# ------------------------------------------------------------------ n > 1 and identity


def test_samples_of_a_seeded_request_are_its_solo_runs_with_seed_plus_index(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": list(range(20, 37)), "temperature": 1, "seed": 11}
    together = [c["text"] for c in ask(client, "/v1/completions", {**body, "n": 4})["choices"]]
    alone = [ask(client, "/v1/completions", {**body, "seed": 11 + i})["choices"][0]["text"] for i in range(4)]
    assert together == alone and len(set(together)) > 1


def test_samples_that_end_at_different_times_keep_their_own_index(client: httpx.Client) -> None:
    """Random text meets the stop soon in one sample and late, or never, in another."""
    body = {**CHAT, "temperature": 1, "seed": 3, "n": 4, "max_tokens": 60, "stop": ["a", "1"]}
    whole = ask(client, "/v1/chat/completions", body)["choices"]
    chunks = [c["choices"][0] for c in stream(client, "/v1/chat/completions", body)[:-1]]
    ends = [(i, c["index"]) for i, c in enumerate(chunks) if c["finish_reason"]]
    assert sorted(index for _, index in ends) == [0, 1, 2, 3] and len({c["message"]["content"] for c in whole}) > 1
    for at, index in ends:
        assert not [c for c in chunks[at + 1 :] if c["index"] == index], "nothing follows a sample's end"
        text = "".join(c["delta"].get("content") or "" for c in chunks if c["index"] == index)
        assert (text, chunks[at]["finish_reason"]) == (whole[index]["message"]["content"], whole[index]["finish_reason"])


def test_unseeded_samples_differ(client: httpx.Client) -> None:
    texts = [c["text"] for c in ask(client, "/v1/completions", {**TEXT, "temperature": 1, "n": 4})["choices"]]
    assert len(set(texts)) > 1


def test_best_of_returns_the_most_likely_of_its_samples(client: httpx.Client) -> None:
    body = {**TEXT, "temperature": 1, "seed": 5, "logprobs": 0}
    every = ask(client, "/v1/completions", {**body, "n": 6})["choices"]
    best = ask(client, "/v1/completions", {**body, "n": 2, "best_of": 6})["choices"]
    by_mean = sorted(every, key=lambda c: -sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]))
    assert [c["text"] for c in best] == [c["text"] for c in by_mean[:2]]
    assert [c["index"] for c in best] == [0, 1]


def test_live_requests_may_share_a_client_id_which_is_only_echoed(server: Server) -> None:
    def one(results: list[httpx.Response]) -> None:
        with server.client() as client:
            results.append(client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "same"}))

    results: list[httpx.Response] = []
    threads = [threading.Thread(target=one, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.status_code for r in results] == [200] * 4
    assert {r.headers["x-request-id"] for r in results} == {"same"}
    assert len({r.json()["id"] for r in results}) == 4
    assert "same" not in server.text


@pytest.mark.parametrize("wrong", ["x" * 200, "a b", "é"])
def test_a_client_id_that_is_no_id_is_replaced_by_ours(client: httpx.Client, wrong: str) -> None:
    response = client.get("/v1/models", headers={"X-Request-Id": wrong.encode()})
    assert response.headers["x-request-id"].isalnum()


# ------------------------------------------------------------------ errors


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


# ------------------------------------------------------------------ sizes


@pytest.fixture(scope="module")
def limit() -> int:
    from octavo.config import ServerConfig

    return ServerConfig().max_body_bytes


def head(path: str, *lines: str) -> bytes:
    rows = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Authorization: Bearer {API_KEYS[0]}",
        "Content-Type: application/json",
        *lines,
    ]
    return ("\r\n".join(rows) + "\r\n\r\n").encode()


def rest_of(sock: socket.socket, seconds: float) -> bytes:
    """What arrives until the server closes, which it must within `seconds`."""
    sock.settimeout(seconds)
    return b"".join(iter(lambda: sock.recv(65536), b""))


def test_a_body_that_declares_too_much_is_refused_before_it_arrives(server: Server) -> None:
    with socket.create_connection(server.address) as sock:
        began = time.monotonic()
        sock.sendall(head("/v1/completions", f"Content-Length: {64 << 20}"))
        answer = b""
        while b"body_too_large" not in answer:
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413") and time.monotonic() - began < 1
        rest_of(sock, 5)  # and the connection is closed


def test_a_body_of_64_mib_is_refused_while_it_arrives_and_the_client_reads_the_answer(server: Server, limit: int) -> None:
    for lines in ((f"Content-Length: {64 << 20}",), ("Transfer-Encoding: chunked",)):
        with socket.create_connection(server.address) as sock:
            sock.sendall(head("/v1/completions", *lines))
            piece = b"x" * (1 << 20)
            sent = 0
            try:
                for _ in range(64):
                    sock.sendall(piece if "Content" in lines[0] else b"%x\r\n%s\r\n" % (len(piece), piece))
                    sent += len(piece)
            except OSError:
                pass  # the server has stopped listening to it
            assert sent > limit
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_longer_than_it_declares_is_cut_where_it_says(server: Server) -> None:
    body = json.dumps(TEXT).encode()
    with socket.create_connection(server.address) as sock:
        sock.sendall(head("/v1/completions", f"Content-Length: {len(body) - 5}") + body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_body_of_the_allowed_size_is_read(client: httpx.Client, limit: int) -> None:
    content = json.dumps({"prompt": "x"}).encode()
    response = client.post("/tokenize", content=content + b" " * (limit - len(content)))
    assert response.status_code == 200
    assert client.post("/tokenize", content=content + b" " * (limit - len(content) + 1)).status_code == 413


def test_health_answers_while_a_body_of_8_mb_is_tokenised(server: Server) -> None:
    prompt = "and the page of a token from Paris " * 220_000
    slowest, asked = 0.0, 0
    with post_raw(server, "/v1/completions", {"prompt": prompt[:8_000_000]}) as sock:
        sock.setblocking(False)
        while True:
            began = time.monotonic()
            assert server.status("/health") == 200
            slowest, asked = max(slowest, time.monotonic() - began), asked + 1
            try:
                first = sock.recv(1024)
                break
            except BlockingIOError:
                time.sleep(0.05)
    assert b"400 Bad Request" in first
    assert asked > 2 and slowest < 1.0


# ------------------------------------------------------------------ tokenizer and state routes


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
        ("POST", "/v1/audio/speech", {"input": "x"}, "This server has no route POST /v1/audio/speech."),
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
