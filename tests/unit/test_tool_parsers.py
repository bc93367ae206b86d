"""Calls in an answer: what is one, what is text, the same however the text is cut, in time linear in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.builtin import register_tool_parsers
from octavo.catalog import Options
from octavo.interfaces import Tool, ToolFormat, ToolParser
from octavo.text.tool_formats import DeepSeekV3, DeepSeekV31, Hermes, Json, Llama3Json

FORMATS: dict[str, type[Any]] = {
    "hermes": Hermes,
    "json": Json,
    "llama3_json": Llama3Json,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
}
NAMES = ("f", "g")
CALLS, CALLS_END, CALL, SEP, CALL_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
)
WRITTEN: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", '{"x": 1}')]),
        (
            'So: <tool_call>{"name": "f", "arguments": {"x": "a}<tool_call>\\"", "y": [1, {"z": 2}]}}</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            "So: ",
            [("f", '{"x": "a}<tool_call>\\"", "y": [1, {"z": 2}]}'), ("g", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"id": 3, "name": "f"}</tool_call> done', "done", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', '<tool_call>{"name": "h", "arguments": {}}</tool_call>', []),
        ('<tool_call>no</tool_call> <tool_call>{"name": "g", "arguments": {}}', "<tool_call>no</tool_call> ", [("g", "{}")]),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("a <tool", "a <tool", []),
        ("a < b and <tools> <tool_cal l>", "a < b and <tools> <tool_cal l>", []),
    ],
    "json": [
        ('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('Well, {"name": "f", "arguments": {}}', 'Well, {"name": "f", "arguments": {}}', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("  \n", "  \n", []),
        ("", "", []),
    ],
    "llama3_json": [
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('{"name": "f", "arguments": {}} and more', " and more", [("f", "{}")]),
    ],
    "deepseek_v3": [
        (
            f'Hm.{CALLS}{CALL}function{SEP}f\n```json\n{{"a": "```"}}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}',
            "Hm.",
            [("f", '{"a": "```"}'), ("g", "{}")],
        ),
        (f"{CALLS}{CALL}whatever", f"{CALL}whatever", []),
    ],
    "deepseek_v31": [
        (f'{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ],
}  # fmt: skip
EXAMPLES = [(name, *case) for name, cases in WRITTEN.items() for case in cases]


def format_of(name: str) -> ToolFormat:
    made: ToolFormat = FORMATS[name](Options(), None)
    return made


def read(parser: ToolParser, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls; a call's name comes once, with its first piece."""
    content: list[str] = []
    calls: list[tuple[str, str]] = []
    for text, news in (*map(parser.feed, pieces), parser.end()):
        content.append(text)
        for piece in news:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            assert piece.index == len(calls) - 1
            calls[piece.index] = name, arguments + piece.arguments
    return "".join(content), calls


def test_every_format_is_registered_under_its_name() -> None:
    assert {provider.name for provider in register_tool_parsers()} == set(FORMATS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_calls_are_told_from_text(name: str, text: str, content: str, calls: Sequence[tuple[str, str]]) -> None:
    assert read(format_of(name).parser(NAMES, most=None), [text]) == (content, calls)
    assert read(format_of(name).parser(NAMES, most=None), list(text)) == (content, calls)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_a_text_is_cut(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(WRITTEN)))
    scraps = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"a": [1, "}"]}',
        "}",
        '"',
        "\\",
        " ",
        "\n",
        ";",
        "<|python_tag|>",
    ]
    scraps += [
        CALLS,
        CALL,
        SEP,
        CALL_END,
        CALLS_END,
        "function",
        "f",
        "```json\n",
        "```",
        "x",
        *(text for text, _, _ in WRITTEN[name]),
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(format_of(name).parser(NAMES, most=None), [text])
    assert read(format_of(name).parser(NAMES, most=None), pieces) == whole
    assert read(format_of(name).parser(NAMES, most=None), list(text)) == whole


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_after_the_first_are_text_where_there_may_be_one(name: str) -> None:
    text, _, calls = next(case for case in WRITTEN[name] if len(case[2]) == 2)
    content, found = read(format_of(name).parser(NAMES, most=1), [text])
    assert found == calls[:1] and "g" in content


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_demands_is_what_the_parser_reads(name: str) -> None:
    made = format_of(name)
    calls = made.grammar([Tool("f", {"type": "object"}), Tool("g")], many=True, free=False)
    assert [call.schema for call in calls.calls] == [{"type": "object"}, None] and calls.trigger is None
    written = calls.separator.join(call.begin + json.dumps({"n": 1}) + call.end for call in calls.calls)
    assert read(made.parser(NAMES, most=None), [calls.before + written + calls.after]) == (
        "",
        [("f", '{"n": 1}'), ("g", '{"n": 1}')],
    )
    free = made.grammar([Tool("f")], many=True, free=True)
    assert free.trigger and (free.before + free.calls[0].begin).startswith(free.trigger)


HOSTILE = {
    "an opening marker and 20,000 spaces": ("hermes", "<tool_call>" + " " * 20_000),
    "5,000 half-open calls": ("hermes", "<tool_call>" * 5_000),
    "calls that end in their keys": ("hermes", '<tool_call>{"a":' * 3_000),
    "calls that end in their arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"x":' * 1_000),
    "beginnings of a marker": ("hermes", "<" * 30_000),
    "brackets": ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 20_000),
    "backslashes": ("hermes", '<tool_call>{"name": "f", "arguments": "' + "\\" * 20_000),
    "spaces alone": ("json", " " * 20_000),
    "objects": ("json", '{"name": "f", "arguments": {}}' * 1_000),
    "tags": ("llama3_json", "<|python_tag|>" * 3_000),
    "a head of spaces": ("deepseek_v3", CALL + " " * 20_000),
    "5,000 half-open heads": ("deepseek_v3", CALL * 3_000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_text_that_is_made_to_hold_a_parser_up_is_read_at_once(what: str) -> None:
    """One character a piece, as a stream may come; the best of three, since the machine may be busy."""
    name, text = HOSTILE[what]

    def seconds(text: str) -> float:
        parser = format_of(name).parser(NAMES, most=None)
        began = time.process_time()
        for char in text:
            parser.feed(char)
        parser.end()
        return time.process_time() - began

    assert min(seconds(text) for _ in range(3)) < 0.1 * max(1.0, len(text) / 50_000)
