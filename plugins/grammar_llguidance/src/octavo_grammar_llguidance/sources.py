"""Octavo's kinds of grammar as text that llguidance compiles.

Imports no octavo part but the grammar's own types. ValueError says what is wrong with a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import msgspec
from llguidance import LLMatcher, grammar_from
from octavo.grammar import Calls, Grammar


def source_of(grammar: Grammar, control: Mapping[str, int]) -> str:
    """control: texts of control tokens, which literals of "calls" may hold."""
    if grammar.kind == "json_object":
        return json_source({"type": "object"})
    if grammar.kind == "json_schema":
        return json_source(json.loads(grammar.text))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = json.loads(grammar.text)
        if not texts:
            raise ValueError("there is nothing to choose from")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, texts)))
    if grammar.kind == "grammar":
        return grammar_from("grammar", grammar.text)
    return LLMatcher.grammar_from_lark(calls_source(msgspec.json.decode(grammar.text, type=Calls), control))


WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Between the parts of JSON. Without a bound a model may go on with spaces for as long as it is let."""


def json_source(schema: object) -> str:
    """Raises ValueError for what is no schema at all."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, got {json.dumps(schema):.60}")
    if schema is False:
        raise ValueError("the schema is false, which nothing satisfies")
    return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), defaults=WHITESPACE)


def quoted(text: str) -> str:
    """A string of Lark; an empty one is left out of a sequence."""
    return json.dumps(text, ensure_ascii=False)


ANY = {"type": "object"}


def calls_source(calls: Calls, control: Mapping[str, int]) -> str:
    """Lark for text with calls of functions."""
    names = sorted(control, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names))) if names else None

    def literal(text: str) -> str:
        """Text in which control tokens stand for themselves."""
        parts, at = [], 0
        for match in pattern.finditer(text) if pattern else ():
            parts += [quoted(text[at : match.start()])] * (match.start() > at) + [f"<[{control[match.group()]}]>"]
            at = match.end()
        return " ".join(parts + [quoted(text[at:])] * (at < len(text)))

    def call(number: int, skip: int = 0) -> str:
        """The call without its first characters."""
        one = calls.calls[number]
        return f"{literal(one.begin[skip:])} %json {json.dumps(one.schema or ANY)} {literal(one.end)}"

    numbers = range(len(calls.calls))
    rules = [f"call: {' | '.join(f'call_{i}' for i in numbers)}", *(f"call_{i}: {call(i)}" for i in numbers)]
    more = f"({literal(calls.separator)} call)*" if calls.many else ""
    if calls.trigger is None:
        return "\n".join([f"start: {literal(calls.before)} call {more} {literal(calls.after)}", *rules])
    return "\n".join([*_triggered(calls, literal, call, more), *rules])


def _triggered(calls: Calls, literal: Callable[[str], str], call: Callable[[int, int], str], more: str) -> list[str]:
    """Any text, and calls from the trigger on: the text up to it is one lazy lexeme, or ends with its control token."""
    trigger = calls.trigger or ""
    for one in calls.calls:
        if not (calls.before + one.begin).startswith(trigger) or len(trigger) > len(calls.before) > 0:
            raise ValueError(f"the trigger {trigger!r} does not begin {calls.before + one.begin!r}")
    token = literal(trigger)
    head = f"head: TEXT {token}" if token.startswith("<[") else f"head[lazy]: TEXT {token}"
    if calls.before:
        first = [f"first: {literal(calls.before[len(trigger) :])} call"]
    else:
        first = [f"first: {' | '.join(f'first_{i}' for i in range(len(calls.calls)))}"]
        first += [f"first_{i}: {call(i, len(trigger))}" for i in range(len(calls.calls))]
    body = f"head first {more} {literal(calls.after)}"
    again = f"({body})*" if calls.many else f"({body})?"
    return [f"start: {again} tail", "tail: TEXT", "TEXT: /(.|\\n)*/", head, *first]
