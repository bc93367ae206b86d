"""POST /v1/responses through OpenAI's own client, against a real server: what it answers, and what it refuses by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from octavo.server.errors import ApiError
from octavo.server.responses_body import LOGPROBS, ResponsesRequest
from octavo.server.runs import _asked
from octavo.server.wire import parse
from openai.resources.responses import Responses

from tests.server.harness import API_KEYS, NAME, Server

PROMPT = "words of a user"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=API_KEYS[0], max_retries=0) as client:
        yield client


def test_an_answer_says_what_chat_says(client: openai.OpenAI) -> None:
    answer = client.responses.create(input=PROMPT, instructions="be brief", **GREEDY)
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)
    assert chat.usage is not None and answer.usage is not None
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.output[0].role == "assistant" and answer.model == NAME and answer.store is False  # type: ignore[union-attr]


def test_an_answer_that_was_cut_short_is_incomplete_and_says_why(client: openai.OpenAI) -> None:
    answer = client.responses.create(input=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.completed_at is None
    stopped = client.responses.create(input=PROMPT, extra_body={"stop": [answer.output_text[3:6]]}, **GREEDY)
    assert stopped.status == "completed" and stopped.incomplete_details is None and stopped.completed_at is not None


def test_an_earlier_answer_is_part_of_a_conversation_as_it_came(client: openai.OpenAI) -> None:
    first = client.responses.create(input=PROMPT, **GREEDY)
    turns: Any = [
        {"role": "user", "content": PROMPT},
        *(item.model_dump() for item in first.output),
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": " more"}],
        },
    ]
    second = client.responses.create(input=turns, **GREEDY)
    messages: Any = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and more"},
    ]
    chat = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)
    assert second.output_text == chat.choices[0].message.content


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_events_of_a_stream_add_up_to_the_whole_answer(client: openai.OpenAI, logprobs: bool) -> None:
    options: dict[str, Any] = {**GREEDY, **({"include": [LOGPROBS], "top_logprobs": 2} if logprobs else {})}
    whole = client.responses.create(input=PROMPT, **options)
    events = list(client.responses.create(input=PROMPT, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [name for name in names if name != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]
    last: Any = events[-1]
    assert "".join(event.delta for event in deltas) == whole.output_text == last.response.output_text
    hidden = {"id", "created_at", "completed_at"}
    assert last.response.output[0].content == whole.output[0].content  # type: ignore[union-attr]
    assert last.response.model_dump(exclude={*hidden, "output", "usage"}) == whole.model_dump(
        exclude={*hidden, "output", "usage"}
    )
    assert last.response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
    values = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    if not logprobs:
        assert values is None
        return
    assert whole.usage is not None and len(values) == whole.usage.output_tokens  # type: ignore[arg-type]
    assert all(len(value.top_logprobs) == 2 for value in values)  # type: ignore[union-attr]
    assert [v.logprob for event in deltas for v in event.logprobs] == [v.logprob for v in values]  # type: ignore[union-attr]


def test_an_error_has_this_protocols_names_and_begins_no_stream(client: openai.OpenAI, server: Server) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": PROMPT, "max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"input": PROMPT, "top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "invalid_value"),
        ({"input": PROMPT, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"input": PROMPT, "include": ["file_search_call.results"]}, "include[0]", "unsupported"),
        ({"input": PROMPT, "temperature": -1}, "temperature", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_value"),
        ({}, "input", "missing_required_parameter"),
        ({"input": [{"type": "function_call_output", "role": "user", "content": "x"}]}, "input[0].type", "unsupported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "more": 1}]}]},
            "input[0].content[0].more",
            "unsupported",
        ),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
    ]
    for body, param, code in cases:
        for stream in (False, True):
            answer = httpx.post(
                server.url + "/v1/responses",
                json={"model": NAME, "stream": stream, **body},
                headers={"Authorization": f"Bearer {API_KEYS[0]}"},
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (body, error)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-4", input=PROMPT)
    with pytest.raises(openai.NotFoundError):  # nothing is stored, so nothing can be fetched
        client.responses.retrieve("resp_1")


def test_each_field_of_the_client_is_decided() -> None:
    sent = set(inspect.signature(Responses.create).parameters) - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert sent - set(ResponsesRequest.model_fields) - set(ResponsesRequest.unsupported) == set()


@pytest.mark.parametrize("field", sorted(ResponsesRequest.unsupported))
def test_what_is_not_served_is_400_with_the_fields_name(field: str) -> None:
    def read(value: Any) -> None:
        parse(ResponsesRequest, json.dumps({"input": "x", field: value}).encode())

    for value in ({"something": 1}, ["something"], "something", 1.5):
        with pytest.raises(ApiError) as caught:
            read(value)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported", field)
    for neutral in (None, *ResponsesRequest.unsupported[field][0]):
        read(neutral)


def test_the_log_of_a_failed_request_has_its_input_where_it_was_asked_for() -> None:
    body = parse(ResponsesRequest, json.dumps({"input": [{"role": "user", "content": "words of a user"}]}).encode())
    assert "words of a user" in _asked(body)


def test_embeddings_are_refused_with_the_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=NAME, input="x")
    assert caught.value.code == "unsupported" and "generate text" in caught.value.message
