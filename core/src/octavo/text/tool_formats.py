"""Tool formats: how the served families write calls of functions, for reading them and for demanding them.

Owns the markers of each format; `octavo.text.tool_parsers` reads. Named as vLLM names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from octavo.catalog import Options
from octavo.grammar import Call, Calls
from octavo.interfaces import Tool
from octavo.text.tool_parsers import SPACES, CallParser, HeadedCall


class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 and 3, Qwen 2.5 and 3."""

    control = False

    def __init__(self, options: Options, parts: None) -> None:
        pass

    def parser(self, names: Collection[str], *, most: int | None) -> CallParser:
        return CallParser(names, most, opening="<tool_call>", closing="</tool_call>")

    def grammar(self, tools: Sequence[Tool], *, many: bool, free: bool) -> Calls:
        calls = [_object(tool, "arguments", "<tool_call>\n", "\n</tool_call>") for tool in tools]
        return Calls(calls, separator="\n", many=many, trigger="<tool_call>" if free else None)


class Json:
    """{"name": ..., "arguments": {...}} and nothing around it: for a model of no format of its own."""

    control = False
    key, separator = "arguments", "\n"
    hidden: tuple[str, ...] = ()

    def __init__(self, options: Options, parts: None) -> None:
        pass

    def parser(self, names: Collection[str], *, most: int | None) -> CallParser:
        return CallParser(names, most, opening=None, hidden=self.hidden, between=SPACES + ";,")

    def grammar(self, tools: Sequence[Tool], *, many: bool, free: bool) -> Calls:
        calls = [_object(tool, self.key) for tool in tools]
        return Calls(calls, separator=self.separator, many=many, trigger='{"name": "' if free else None)


class Llama3Json(Json):
    """{"name": ..., "parameters": {...}}, several with semicolons between: Llama 3.1 to 3.3."""

    key, separator = "parameters", "; "
    hidden = ("<|python_tag|>",)


def _token(words: str) -> str:
    """A control token of DeepSeek's: wide bars, and the sign that SentencePiece writes for a space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


class DeepSeekV3:
    """A name and a block of JSON between control tokens: DeepSeek V3 and R1."""

    control = True
    _BEGIN, _END = _token("tool calls begin"), _token("tool calls end")
    _CALL, _NAME, _CLOSE = _token("tool call begin"), _token("tool sep"), _token("tool call end")
    before_name, before_json, after_json, separator = "function" + _NAME, "\n```json\n", "\n```", "\n"
    head, last = re.compile(r"\s*function" + _NAME + r"\s*(\S+?)\s*```json\s"), "```json\n"

    def __init__(self, options: Options, parts: None) -> None:
        pass

    def parser(self, names: Collection[str], *, most: int | None) -> CallParser:
        return CallParser(
            names,
            most,
            opening=self._CALL,
            closing=self.after_json.strip() + self._CLOSE,
            hidden=(self._BEGIN, self._END),
            reader=lambda: HeadedCall(self.head, self.last),
        )

    def grammar(self, tools: Sequence[Tool], *, many: bool, free: bool) -> Calls:
        calls = [
            Call(f"{self._CALL}{self.before_name}{tool.name}{self.before_json}", tool.parameters, self.after_json + self._CLOSE)
            for tool in tools
        ]
        return Calls(calls, self._BEGIN, self.separator, self._END, many, self._BEGIN if free else None)


class DeepSeekV31(DeepSeekV3):
    """The same with the name first and no block: DeepSeek V3.1 and later."""

    before_name, before_json, after_json, separator = "", DeepSeekV3._NAME, "", ""
    head, last = re.compile(r"\s*(\S+?)\s*" + DeepSeekV3._NAME), DeepSeekV3._NAME


def _object(tool: Tool, key: str, before: str = "", after: str = "") -> Call:
    return Call(f'{before}{{"name": {json.dumps(tool.name)}, "{key}": ', tool.parameters, "}" + after)
