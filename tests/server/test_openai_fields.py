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
from octavo.grammar import Grammar
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
        "response_format": None,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "top_logprobs": None,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    },
    CompletionRequest: {
        "prompt": "x",
        "model": "m",
        "stream": True,
        "response_format": None,
        "stream_options": None,
        "echo": True,
        "user": "u",
    },
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
    if field not in ("prompt", "tool_choice"):  # whose shape is checked with the model at hand
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


BOTH = pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, Grammar.json(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
            Grammar.json(SCHEMA),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar.regex("[a-z]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"guided_json": SCHEMA}, Grammar.json(SCHEMA)),
        ({"guided_regex": "a|b"}, Grammar.regex("a|b")),
        ({"guided_choice": ["a"]}, Grammar.choice(["a"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar.regex("a")),
    ],
)
@BOTH
def test_the_form_of_an_answer_reaches_the_sampler(model: type[Wire], fields: dict[str, Any], form: Grammar | None) -> None:
    assert read(model, **fields).to_params().grammar == form


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": [1]}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **SCHEMA}}},
            "response_format.json_schema.type",
            "unknown_parameter",
        ),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema", "unknown_parameter"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n", "schema": {}}}}, "response_format.json_schema", "invalid_value"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "unsupported"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_parameter"),
        ({"guided_json": [1]}, "guided_json", "invalid_value"),
        ({"guided_choice": "a"}, "guided_choice", "invalid_value"),
        ({"guided_regex": "a" * 600_000}, "guided_regex", "invalid_value"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "invalid_value"),
    ],
)  # fmt: skip
@BOTH
def test_a_form_that_is_none_is_400_with_the_place(model: type[Wire], fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, **fields).to_params()
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


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


VLLM = ["guided_decoding_backend", "guided_whitespace_pattern", "allowed_token_ids", "bad_words", "length_penalty"]


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
