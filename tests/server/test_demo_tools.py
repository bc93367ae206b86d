"""Tools with the demo model, asked through the `openai` package: choices, parallel calls, streams, conversations with calls in them.

The model calls nothing of its own accord, so calls are demanded, or shown to it first.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.server.harness import NAME, Server

pytest.importorskip("llguidance")

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"], "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
ASK: Any = [{"role": "user", "content": "The weather in Oslo, and the time there?"}]


def call_of(id: str, name: str, **arguments: Any) -> Any:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


SHOWN: Any = [
    {"role": "user", "content": "What is the weather in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [call_of("a", "get_weather", city="Zürich", days=1)]},
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [call_of("b", "get_weather", city="Oslo", days=1)]},
    {"role": "user", "content": "What is the weather in Zürich?"},
]
"""Calls as this server would have made them: the model copies them."""

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
PINGS: Any = [{"type": "function", "function": {"name": name, "parameters": NOTHING}} for name in ("ping", "pong")]
STRICT: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
ASKED: dict[str, dict[str, Any]] = {
    "named": {"messages": ASK, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
    "one": {"messages": ASK, "tool_choice": "required", "parallel_tool_calls": False},
    "many": {"messages": ASK, "tool_choice": "required", "temperature": 1.0, "seed": 1, "n": 2, "max_tokens": 70},
    "cut": {"messages": ASK, "tool_choice": "required", "max_tokens": 12},
    "auto": {"messages": SHOWN},
    "strict": {"messages": SHOWN, "tools": STRICT},
    "none": {"messages": SHOWN, "tool_choice": "none", "max_tokens": 12},
}


@pytest.fixture(scope="module")
def client(demo_client: openai.OpenAI) -> openai.OpenAI:
    return demo_client


@pytest.fixture(scope="module")
def answers(client: openai.OpenAI) -> dict[str, Future[Any]]:
    """All of ASKED at once."""
    with ThreadPoolExecutor(len(ASKED)) as threads:
        found = {name: threads.submit(ask, client, **fields) for name, fields in ASKED.items()}
    return found


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, **{"tools": TOOLS, "temperature": 0, "max_tokens": 60, **fields})


def calls(choice: Any) -> list[tuple[str, Any]]:
    """Names and arguments; every call has an id of its own and arguments of its schema."""
    found = choice.message.tool_calls or []
    assert len({call.id for call in found}) == len(found) and all(call.type == "function" for call in found)
    for call in found:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def test_a_named_function_is_called(answers: dict[str, Future[Any]]) -> None:
    (choice,) = answers["named"].result().choices
    ((name, arguments),) = calls(choice)
    assert name == "get_time" and arguments["zone"] in ("CET", "UTC")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_some_function_is_called_where_a_call_is_required(answers: dict[str, Future[Any]]) -> None:
    (choice,) = answers["one"].result().choices
    assert len(calls(choice)) == 1 and choice.finish_reason == "tool_calls"


def test_several_calls_are_several_and_each_sample_has_its_own(answers: dict[str, Future[Any]]) -> None:
    for choice in answers["many"].result().choices:
        found = choice.message.tool_calls
        complete = found if choice.finish_reason == "tool_calls" else found[:-1]
        assert found and len({call.id for call in found}) == len(found)
        for call in complete:
            jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))


def test_a_limit_in_the_middle_of_a_call_says_length(answers: dict[str, Future[Any]]) -> None:
    (choice,) = answers["cut"].result().choices
    assert choice.finish_reason == "length" and not (choice.message.content or "").startswith("<tool_call>{")


@pytest.mark.parametrize("name", ["auto", "strict"])
def test_a_model_that_decides_to_call_calls(answers: dict[str, Future[Any]], name: str) -> None:
    (choice,) = answers[name].result().choices
    assert calls(choice)[0] == ("get_weather", {"city": "Zürich", "days": 1}) and choice.finish_reason == "tool_calls"


def test_without_a_choice_calls_are_text(answers: dict[str, Future[Any]]) -> None:
    (choice,) = answers["none"].result().choices
    assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "fields",
    [ASKED["auto"], {"messages": ASK, "tools": PINGS, "tool_choice": "required", "max_tokens": 48}],
    ids=["auto", "required"],
)
def test_a_stream_names_each_call_once_and_its_pieces_are_the_whole(
    client: openai.OpenAI, answers: dict[str, Future[Any]], fields: dict[str, Any]
) -> None:
    whole = ask(client, **fields).choices[0]
    ids, names, arguments, content, finish = [], [], [], "", []
    for chunk in ask(client, stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
            for piece in choice.delta.tool_calls or []:
                if piece.id is not None:
                    assert piece.index == len(ids) and piece.type == "function"
                    ids.append(piece.id)
                    names.append(piece.function.name)
                    arguments.append("")
                else:
                    assert piece.function.name is None
                assert piece.index == len(ids) - 1
                arguments[piece.index] += piece.function.arguments or ""
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == list(
        zip(names, arguments, strict=True)
    )
    assert len(set(ids)) == len(ids) and (content or None) == whole.message.content and finish == [whole.finish_reason]


def test_an_answer_with_calls_is_part_of_the_next_request_as_it_came(
    client: openai.OpenAI, answers: dict[str, Future[Any]]
) -> None:
    message = answers["one"].result().choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain, 7 degrees"}
    answer = ask(client, messages=[*ASK, message, result], tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > answers["one"].result().usage.prompt_tokens


def test_tokenize_shows_the_prompt_with_its_tools(demo_server: Server) -> None:
    with demo_server.client() as http:
        counts = [
            http.post("/tokenize", json={"messages": ASK, **more}).json()["count"]
            for more in ({}, {"tools": TOOLS}, {"tools": []})
        ]
    assert counts[1] > counts[0] + 50 and counts[2] == counts[0]


def function(**fields: Any) -> Any:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type", "unsupported"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": function(name="no spaces")}, "tools[0].function.name", "invalid_value"),
        ({"tools": function(returns={})}, "tools[0].function.returns", "unknown_parameter"),
        ({"tools": function(parameters={"type": "objekt"}), "tool_choice": "required"}, "tools", "invalid_grammar"),
        ({"tools": function(parameters={"type": "objekt"}, strict=True)}, "tools", "invalid_grammar"),
        ({"tools": TOOLS * 100}, "tools", "invalid_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "unsupported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_400_with_the_place(
    client: openai.OpenAI, stream: bool, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=ASK, stream=stream, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)
