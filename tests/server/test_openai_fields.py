"""Every field that the installed `openai` client can send is honoured or refused by name, never ignored.

The walk takes the client's own signatures, so that a new version of it with a new field fails here until
somebody has decided what the field means.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, get_args

import openai.types.chat as types
import pytest
from octavo.request import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.protocol import ChatRequest, CompletionRequest, Message, StreamOptions
from octavo.server.wire import Wire, parse
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions

NOT_IN_THE_BODY = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
MESSAGES = [{"role": "user", "content": "x"}]

# Field -> a value that is not the default, and what must come of it.
SAMPLING: dict[str, tuple[Any, Any]] = {
    "frequency_penalty": (0.5, SamplingParams(frequency_penalty=0.5, max_tokens=None)),
    "logit_bias": ({"7": 3.0}, SamplingParams(logit_bias={7: 3.0}, max_tokens=None)),
    "max_tokens": (5, SamplingParams(max_tokens=5)),
    "n": (3, SamplingParams(n=3, max_tokens=None)),
    "presence_penalty": (0.5, SamplingParams(presence_penalty=0.5, max_tokens=None)),
    "seed": (5, SamplingParams(seed=5, max_tokens=None)),
    "stop": (["a", "b"], SamplingParams(stop=["a", "b"], max_tokens=None)),
    "temperature": (0.5, SamplingParams(temperature=0.5, max_tokens=None)),
    "top_p": (0.5, SamplingParams(top_p=0.5, max_tokens=None)),
}
HONOURED: dict[type[Wire], dict[str, tuple[Any, Any]]] = {
    ChatRequest: {
        **SAMPLING,
        "logprobs": (True, SamplingParams(logprobs=0, max_tokens=None)),
        "max_completion_tokens": (5, SamplingParams(max_tokens=5)),
    },
    CompletionRequest: {
        **SAMPLING,
        "best_of": (2, SamplingParams(best_of=2, max_tokens=None)),
        "logprobs": (2, SamplingParams(logprobs=2, max_tokens=None)),
    },
}
# What is not about sampling. Its effect is a test of its own, over HTTP; `user` and the like have none by agreement.
ELSEWHERE: dict[type[Wire], dict[str, Any]] = {
    ChatRequest: {
        "messages": MESSAGES,
        "model": "m",
        "stream": True,
        "stream_options": None,
        "top_logprobs": None,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    },
    CompletionRequest: {"prompt": "x", "model": "m", "stream": True, "stream_options": None, "echo": True, "user": "u"},
}
BASE: dict[type[Wire], dict[str, Any]] = {ChatRequest: {"messages": MESSAGES}, CompletionRequest: {"prompt": "x"}}
ENDPOINTS: list[tuple[Any, type[Wire]]] = [(Chat, ChatRequest), (Completions, CompletionRequest)]


def sent(client: Any) -> set[str]:
    return set(inspect.signature(client.create).parameters) - NOT_IN_THE_BODY


def read(model: type[Wire], /, **fields: Any) -> Any:
    return parse(model, json.dumps({**BASE[model], **fields}).encode())


@pytest.mark.parametrize(("client", "model"), ENDPOINTS)
def test_each_field_of_the_client_is_decided(client: Any, model: type[Wire]) -> None:
    decided = set(HONOURED[model]) | set(ELSEWHERE[model]) | set(model.unsupported)
    assert sent(client) - decided == set(), "new fields of the client: honour them, or list them in `unsupported`"


@pytest.mark.parametrize(("model", "field"), [(model, field) for model, fields in HONOURED.items() for field in fields])
def test_a_sampling_field_reaches_the_sampler(model: type[Wire], field: str) -> None:
    value, expected = HONOURED[model][field]
    assert read(model, **{field: value}).to_params() == expected
    assert read(model).to_params() != expected


@pytest.mark.parametrize(("model", "field"), [(model, field) for model, fields in ELSEWHERE.items() for field in fields])
def test_any_other_field_is_read_and_checked(model: type[Wire], field: str) -> None:
    value = ELSEWHERE[model][field]
    read(model, **{field: value})
    if field != "prompt":  # whose shape is checked with the model at hand
        with pytest.raises(ApiError) as caught:
            read(model, **{field: 5.5})
        assert caught.value.param == field


@pytest.mark.parametrize(("model", "field"), [(model, field) for _, model in ENDPOINTS for field in model.unsupported])
def test_what_is_not_served_is_400_with_the_fields_name(model: type[Wire], field: str) -> None:
    for value in ({"something": 1}, ["something"], "something", 1.5):
        with pytest.raises(ApiError) as caught:
            read(model, **{field: value})
        error = caught.value
        assert (error.status, error.code, error.param) == (400, "unsupported", field) and field in error.message
    for neutral in (None, *model.unsupported[field][0]):
        read(model, **{field: neutral})


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "schema": {}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        {"type": "grammar"},
        {"type": "text", "more": 1},
        {},
        "json",
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_no_response_format_but_text_is_taken(model: type[Wire], response_format: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, response_format=response_format)
    assert (caught.value.code, caught.value.param) == ("unsupported", "response_format")
    read(model, response_format={"type": "text"})


@pytest.mark.parametrize("kind", get_args(types.ChatCompletionMessageParam))
def test_each_field_of_a_message_is_decided(kind: Any) -> None:
    known = set(Message.model_fields) | set(Message.unsupported)
    assert set(kind.__annotations__) - known == set()
    for field in set(kind.__annotations__) & set(Message.unsupported):
        with pytest.raises(ApiError) as caught:
            read(ChatRequest, messages=[*MESSAGES, {"role": "assistant", "content": "x", field: {"a": 1}}])
        assert (caught.value.code, caught.value.param) == ("unsupported", f"messages[1].{field}")


def test_each_field_of_the_stream_options_is_decided() -> None:
    assert set(types.ChatCompletionStreamOptionsParam.__annotations__) <= {
        *StreamOptions.model_fields,
        *StreamOptions.unsupported,
    }


@pytest.mark.parametrize("extra", sorted(set(types.ChatCompletionContentPartTextParam.__annotations__) - {"type", "text"}))
def test_a_text_part_is_text_and_nothing_else(extra: str) -> None:
    body = read(ChatRequest, messages=[{"role": "user", "content": [{"type": "text", "text": "x", extra: {"a": 1}}]}])
    with pytest.raises(ApiError) as caught:
        body.messages[0].to_template("messages[0]")
    assert (caught.value.code, caught.value.param) == ("unsupported", f"messages[0].content[0].{extra}")


VLLM = ["guided_json", "guided_regex", "guided_choice", "structured_outputs", "allowed_token_ids", "bad_words", "length_penalty"]


@pytest.mark.parametrize("name", [*VLLM, "truncate_prompt_tokens", "return_token_ids", "request_id", "logits_processors"])
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_field_of_vllm_that_is_not_served_is_said_to_be_so_and_not_to_be_unknown(model: type[Wire], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, **{name: ["something"]})
    assert (caught.value.code, caught.value.param) == ("unsupported", name)


@pytest.mark.parametrize("name", ["guided", "thinking", "extra_body", "Temperature", ""])
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_field_that_nobody_knows_is_an_error_with_its_name(model: type[Wire], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, **{name: None})
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", name)
