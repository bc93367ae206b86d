"""Bodies before they reach a model: types, unknown and unsupported fields, names in errors."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from octavo.errors import RequestError
from octavo.server.errors import ApiError, to_api_error
from octavo.server.native_bodies import DetokenizeRequest, GenerateRequest
from octavo.server.protocol import ChatRequest, CompletionRequest, conversation, prompts
from octavo.server.wire import parse

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hello", **fields}).encode())


def refusal(make: Any) -> ApiError:
    with pytest.raises((ApiError, RequestError)) as caught:
        make()
    return to_api_error(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"prompt": "cut',
        b"[1]",
        b"1",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_not_a_json_object_is_400_and_says_so(body: bytes) -> None:
    error = refusal(lambda: parse(CompletionRequest, body))
    assert (error.status, error.code) == (400, "invalid_json")


def test_an_unknown_field_is_named_with_the_one_that_was_meant() -> None:
    error = refusal(lambda: chat(temprature=1))
    assert (error.status, error.param, error.code) == (400, "temprature", "unknown_parameter")
    assert "temperature" in error.message


def test_a_missing_field_is_named() -> None:
    for model, field in ((ChatRequest, "messages"), (CompletionRequest, "prompt"), (DetokenizeRequest, "tokens")):
        error = refusal(lambda model=model: parse(model, b"{}"))
        assert (error.param, error.code) == (field, "missing_required_parameter")
    assert refusal(lambda: chat(messages=[{"content": "x"}])).param == "messages[0].role"
    assert refusal(lambda: chat(messages=[])).param == "messages"


def test_an_unknown_field_inside_a_message_is_named_with_its_place() -> None:
    error = refusal(lambda: chat(messages=[*HELLO, {"role": "user", "content": "x", "colour": "red"}]))
    assert error.param == "messages[1].colour"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("guided_decoding_backend", "xgrammar"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("store", True),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ 'x' * 3 }}"),
        ("service_tier", "flex"),
        ("best_of", 2),
        ("web_search_options", {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_and_never_ignored(field: str, value: Any) -> None:
    error = refusal(lambda: chat(**{field: value}))
    assert (error.status, error.param, error.code) == (400, field, "unsupported")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", None),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("tool_choice", "none"),
        ("store", False),
        ("user", "u"),
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    chat(**{field: value}).to_params()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", -1),
        ("n", 5_000_000),
        ("n", "2"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**80),
        ("seed", 2**63),
        ("seed", 2**64),
        ("seed", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [5] * 10_000),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"²": 1}),
        ("prompt_logprobs", 21),
        ("stream", "yes"),
        ("cache_salt", ""),
    ],
)
def test_every_number_out_of_range_is_400_with_its_field(field: str, value: Any) -> None:
    error = refusal(lambda: completion(**{field: value}).to_params())
    assert (error.status, error.param) == (400, field)


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_not_finite_are_refused(field: str, text: bytes) -> None:
    body = b'{"prompt": "x", "' + field.encode() + b'": ' + text + b"}"
    assert refusal(lambda: parse(CompletionRequest, body).to_params()).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2**40),
        ("seed", -1),
        ("seed", -(2**63)),
        ("top_p", 0),
        ("temperature", 0),
        ("stop", []),
    ],
)
def test_values_at_the_edges_are_accepted(field: str, value: Any) -> None:
    assert getattr(completion(**{field: value}).to_params(), field) == value


@pytest.mark.parametrize(
    "value", [[], [1, "a"], [[1], []], [[1], 2], [True], [[True]], [1.0], 5, {"a": 1}, None, [None], [["a"]]]
)
def test_a_malformed_prompt_is_refused_in_the_field_prompt(value: Any) -> None:
    assert refusal(lambda: prompts(value)).param == "prompt"


def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids() -> None:
    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]


def test_chat_logprobs_follow_openai_and_errors_use_its_names() -> None:
    assert chat(logprobs=True).to_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).to_params().logprobs == 20
    assert chat().to_params().logprobs is None
    assert refusal(lambda: chat(top_logprobs=2).to_params()).param == "top_logprobs"
    for wrong in (21, -1, 10**9):
        request = chat(logprobs=True, top_logprobs=wrong)
        error = refusal(request.to_params)
        assert request.rename(error.param) == "top_logprobs"


def test_two_limits_that_differ_are_refused_and_the_new_name_wins() -> None:
    assert chat(max_completion_tokens=5).to_params().max_tokens == 5
    assert refusal(lambda: chat(max_completion_tokens=5, max_tokens=6).to_params()).param == "max_completion_tokens"
    body = parse(GenerateRequest, b'{"prompt": "x", "max_new_tokens": 7}')
    assert body.to_params().max_tokens == 7


def test_stream_options_need_a_stream() -> None:
    assert refusal(lambda: chat(stream_options={"include_usage": True}).to_params()).param == "stream_options"
    assert refusal(lambda: chat(stream=True, stream_options={"usage": True})).param == "stream_options.usage"


def test_what_a_stream_has_no_place_for_is_refused() -> None:
    assert refusal(lambda: chat(stream=True, prompt_logprobs=1).to_params()).param == "prompt_logprobs"
    assert refusal(lambda: parse(GenerateRequest, b'{"prompt": "x", "logprobs": 1}')).param == "logprobs"


def test_streaming_cannot_pick_the_best_afterwards() -> None:
    assert refusal(lambda: completion(stream=True, n=1, best_of=2).to_params()).param == "best_of"
    assert refusal(lambda: completion(n=3, best_of=2).to_params()).param == "best_of"


def test_a_part_of_a_message_with_a_field_of_its_own_is_refused() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    error = refusal(lambda: conversation(chat(messages=[{"role": "user", "content": parts}]).messages))
    assert (error.param, error.code) == ("messages[0].content[0].cache_control", "unsupported")


def test_an_answer_of_ours_can_be_sent_back_as_it_is() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": None, "tool_calls": None, "audio": None}
    assert conversation(chat(messages=[answer]).messages) == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 1_000_000},
        {"messages": [{"role": 1, "content": "x"}] * 8000},
        {f"k{i}": 1 for i in range(300_000)},
        {"messages": [{"role": "user", "content": "x", **{f"k{i}": 1 for i in range(300_000)}}]},
        {"messages": HELLO, "logit_bias": {str(i): "x" for i in range(300_000)}},
        {"messages": HELLO, "stop_token_ids": ["x"] * 1_000_000},
    ],
    ids=["messages", "roles", "fields", "inner fields", "bias", "ids"],
)
def test_a_body_full_of_mistakes_costs_no_more_than_reading_it(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    began = time.perf_counter()
    refusal(lambda: parse(ChatRequest, raw).to_params())
    assert time.perf_counter() - began < 1.0


def test_errors_never_carry_a_long_value_back() -> None:
    error = refusal(lambda: completion(stop="x" * 100_000).to_params())
    assert len(error.message) < 300
    assert len(refusal(lambda: parse(DetokenizeRequest, json.dumps({"tokens": "y" * 100_000}).encode())).message) < 300


# ------------------------------------------------------------------ what a body may cost

SIZE = 8 << 20
FIRST = b'{"prompt": '
TALK = b'{"messages": [{"role": "user", "content": "x"}], '


def filled(head: bytes, piece: bytes, tail: bytes, count: int = 0) -> bytes:
    """head, as many pieces as fit (or `count`), tail: a body of at most SIZE bytes."""
    return head + piece * (count or (SIZE - len(head) - len(tail)) // len(piece)) + tail


HOSTILE = {
    "ids": (CompletionRequest, filled(FIRST + b"[", b"9,", b"9]}")),
    "lists": (CompletionRequest, filled(FIRST + b"[", b"[9],", b"[9]]}")),
    "empty lists": (CompletionRequest, filled(FIRST + b"[", b"[],", b"[]]}")),
    "texts": (CompletionRequest, filled(FIRST + b"[", b'"",', b'""]}')),
    "stops": (CompletionRequest, filled(b'{"prompt": "x", "stop": [', b'"x",', b'"x"]}')),
    "fields": (CompletionRequest, b"{" + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}"),
    "biases": (CompletionRequest, b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}}"),
    "depth": (CompletionRequest, FIRST + b"[" * (SIZE // 2 - 20) + b"]" * (SIZE // 2 - 20) + b"}"),
    "messages": (ChatRequest, filled(b'{"messages": [', b'{"role":"user","content":"x"},', b'{"role":"user","content":"x"}]}')),
    "tools": (ChatRequest, filled(TALK + b'"tools": [', b"{},", b"{}]}")),
    "values": (ChatRequest, filled(TALK + b'"chat_template_kwargs": {"a": [', b"{},", b"{}]}}")),
    "quotes": (CompletionRequest, filled(FIRST, b'"', b"}")),
}
LARGE = {
    "backslashes": (CompletionRequest, filled(FIRST + b'"', b"\\", b'"}')),
    "ids": (CompletionRequest, filled(FIRST + b"[", b"9,", b"9]}", 500_000)),
    "lists": (CompletionRequest, filled(FIRST + b"[", b"[9],", b"[9]]}", 19_000)),
    "texts": (CompletionRequest, filled(FIRST + b"[", b'"a text, [with] {signs}",', b'"x"]}', 39_000)),
    "one text": (CompletionRequest, filled(FIRST + b'"', b"Well, it is [so], is it {not}? ", b'"}')),
    "escapes": (CompletionRequest, filled(FIRST + b'"', b"\\u00e9", b'"}')),
    "quoted quotes": (CompletionRequest, filled(FIRST + b'"', b'She said: \\"So, [it] is.\\" ', b'"}')),
    "messages": (
        ChatRequest,
        filled(b'{"messages": [', b'{"role":"user","content":"x"},', b'{"role":"user","content":"x"}]}', 8000),
    ),
}


def cost(model: Any, body: bytes) -> float:
    """Least processor time of three readings, in seconds."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        with contextlib.suppress(ApiError):
            parse(model, body)
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(name: str) -> None:
    model, body = HOSTILE[name]
    assert len(body) <= SIZE
    assert refusal(lambda: parse(model, body)).status == 400
    assert cost(model, body) < 0.1  # parsing it takes up to two seconds


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_within_the_bounds_is_read(name: str) -> None:
    """Whatever characters its texts hold. The parser keeps everybody waiting meanwhile: it must be short."""
    model, body = LARGE[name]
    assert parse(model, body)
    assert cost(model, body) < 0.15


def test_what_is_inside_strings_does_not_count() -> None:
    text = '[{,"' * 100_000
    assert completion(prompt=text).prompt == text
    assert completion(prompt="\\" * 200_000 + '"' + "," * 600_000).prompt.endswith(",")
