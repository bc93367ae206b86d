"""Answers of a given form by the demo model, asked through the `openai` package: JSON schemas, patterns, choices, grammars.

The model is small and knows little JSON by itself: what is right here is right because it is enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.harness import NAME, Server

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.fixture(scope="module")
def client(demo_client: openai.OpenAI) -> openai.OpenAI:
    return demo_client


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "müde, aber ok", "日本語", None, 7]},
        "trips": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "mood", "trips"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"enum": ["Zürich", "Oslo"]}, "day": {"type": "integer", "minimum": -9, "maximum": 90}},
            "required": ["city", "day"],
            "additionalProperties": False,
        }
    },
}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 5}
ON_ONE_LINE = 'Describe a person as compact JSON on one line, such as {"name": "Bo", "age": 40}.'
WARM: Any = {"temperature": 1.0, "seed": 11}
COLD: Any = {"temperature": 0}


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


ASKED: dict[str, dict[str, Any]] = {
    "person": {"messages": said(ON_ONE_LINE), "response_format": schema_format(PERSON), **COLD},
    "warm": {"messages": said(ON_ONE_LINE), "response_format": schema_format(PERSON), "n": 2, "top_p": 0.95, **WARM},
    "digits": {"messages": said("Some digits as JSON."), "response_format": schema_format(DIGITS), "presence_penalty": 1.0, **WARM},
    "place": {"messages": said("A place as JSON."), "response_format": schema_format(PERSON["$defs"]["place"]), **COLD},
    "object": {"messages": said('Answer with JSON such as {"city": "Paris"}.'), "response_format": {"type": "json_object"}, **COLD},
    "regex": {"messages": said("A phone number."), "extra_body": {"structured_outputs": {"regex": r"\+[0-9]{2} [0-9]{3}-[0-9]{4}"}}, **WARM},
    "choice": {"messages": said("Is it raining?"), "extra_body": {"structured_outputs": {"choice": ["sí", "no", "日本"]}, "min_tokens": 9, "ignore_eos": True}, **COLD},
    "grammar": {"messages": said("Some SQL."), "extra_body": {"guided_grammar": 'start: "SELECT " col ("," col)* " FROM t"\ncol: /[a-z]{1,3}/'}, **WARM},
    "stop": {"messages": said("Count."), "extra_body": {"structured_outputs": {"regex": "one, two, three, four"}}, "stop": [", three"], **COLD},
    "logprobs": {"messages": said("Yes or no?"), "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}, "logprobs": True, "top_logprobs": 2, **COLD},
    "short": {"messages": said(ON_ONE_LINE), "response_format": schema_format(PERSON), "max_tokens": 9, **COLD},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(client: openai.OpenAI) -> Iterator[dict[str, Future[Any]]]:
    """All of ASKED at once: a dozen rows of one batch."""
    with ThreadPoolExecutor(len(ASKED)) as threads:
        yield {
            name: threads.submit(client.chat.completions.create, model=NAME, **{"max_tokens": 120, **fields})
            for name, fields in ASKED.items()
        }


def texts(answers: dict[str, Future[Any]], name: str, finish: str = "stop") -> list[str]:
    choices = answers[name].result().choices
    assert [choice.finish_reason for choice in choices] == [finish] * ASKED[name].get("n", 1)
    return [choice.message.content for choice in choices]


@pytest.mark.parametrize(("name", "schema"), [("person", PERSON), ("warm", PERSON), ("digits", DIGITS)])
def test_an_answer_validates_against_its_schema(answers: dict[str, Future[Any]], name: str, schema: Any) -> None:
    for text in texts(answers, name):
        jsonschema_rs.validate(schema, json.loads(text))


def test_a_stream_says_what_the_whole_answer_says(answers: dict[str, Future[Any]], client: openai.OpenAI) -> None:
    assert all(answer.result() for answer in answers.values())  # alone, so that sums have one order
    fields = {"model": NAME, "max_tokens": 60, **ASKED["place"]}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = [choice for chunk in client.chat.completions.create(stream=True, **fields) for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in chunks) == whole.message.content
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == [whole.finish_reason] == ["stop"]
    jsonschema_rs.validate(PERSON["$defs"]["place"], json.loads(whole.message.content))


def test_a_json_object_is_an_object_and_need_not_be_empty(answers: dict[str, Future[Any]]) -> None:
    (text,) = texts(answers, "object")
    value = json.loads(text)
    assert isinstance(value, dict) and value


def test_patterns_choices_and_grammars_hold_for_the_whole_answer(answers: dict[str, Future[Any]]) -> None:
    assert re.fullmatch(r"\+[0-9]{2} [0-9]{3}-[0-9]{4}", texts(answers, "regex")[0])
    assert texts(answers, "choice")[0] in ("sí", "no", "日本")
    assert re.fullmatch(r"SELECT [a-z]{1,3}(,[a-z]{1,3})* FROM t", texts(answers, "grammar")[0])


def test_a_stop_string_ends_an_answer_of_a_form(answers: dict[str, Future[Any]]) -> None:
    assert texts(answers, "stop") == ["one, two"]


def test_a_limit_leaves_the_beginning_of_an_answer_and_says_so(answers: dict[str, Future[Any]]) -> None:
    (text,) = texts(answers, "short", "length")
    assert re.match(r"\{\s*\"name\"", text) and not text.endswith("}")


def test_logprobs_are_there_whatever_the_form_left(answers: dict[str, Future[Any]]) -> None:
    choice = answers["logprobs"].result().choices[0]
    assert choice.message.content in ("yes", "no") and choice.finish_reason == "stop"
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


class Size(BaseModel):
    unit: Literal["cm", "Zoll"]
    value: int = Field(ge=0, le=99)


class Box(BaseModel):
    sides: list[Size] = Field(min_length=2, max_length=2)
    kind: Literal["box"]


def test_the_client_s_own_parsing_of_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=NAME, messages=said("A box."), response_format=Box, max_tokens=150, **COLD)
    assert isinstance(answer.choices[0].message.parsed, Box)


def test_completions_and_responses_take_a_form_too(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=NAME, prompt="The sky is", max_tokens=9, extra_body={"guided_choice": [" blue", " grey"]}, **COLD
    )
    assert text.choices[0].text in (" blue", " grey")
    shape = {
        "type": "json_schema",
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["n"],
            "additionalProperties": False,
        },
    }
    answer = client.responses.create(model=NAME, input="A digit.", text={"format": shape}, max_output_tokens=100, temperature=0)
    assert answer.status == "completed" and json.loads(answer.output_text)["n"] in range(10)
    assert answer.text.format.type == "json_schema"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="x", text={"format": {**shape, "schema": {"type": "objekt"}}})
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "text.format")


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [{"type": "object", "properties": {"a": schema}, "required": ["a"]}, {"type": "integer"}]}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": schema_format({"type": "objekt"})}, "response_format", "objekt"),
        ({"response_format": schema_format(nested(40))}, "response_format", "recursion limit"),
        ({"response_format": schema_format({"$ref": "#/$defs/gone"})}, "response_format", "gone"),
        ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex", "unclosed group"),
        ({"extra_body": {"guided_grammar": "start: nowhere"}}, "guided_grammar", "nowhere"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice", "nothing to choose"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_enforced_is_400_at_admission(
    client: openai.OpenAI, stream: bool, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.chat.completions.create(model=NAME, messages=said("x"), stream=stream, max_tokens=4, **fields)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", param)


def test_a_pattern_that_costs_others_dearly_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=said("x"), max_tokens=5, extra_body={"structured_outputs": {"regex": "((a|b)*)+c"}}, **COLD
    )
    assert re.fullmatch("[ab]*c?", answer.choices[0].message.content or "")


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(client: openai.OpenAI, server: Server) -> None:
    server.idle(20)
    blocks = server.gauges()["free_blocks"]
    for _ in range(3):
        stream = client.chat.completions.create(model=NAME, stream=True, max_tokens=300, **ASKED["person"])
        for _ in range(4):
            next(iter(stream))
        stream.close()
    server.idle(10, blocks)
