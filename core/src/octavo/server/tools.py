"""Tools of a chat: what clients may send, what the answer must then be, and how calls in it are spelt.

Owns the fields of the protocol and the choice between text and calls. How a model writes calls is its tool format's
(`octavo.interfaces.ToolFormat`); that they are right where they must be is the grammar's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, WithJsonSchema

from octavo.engine.async_llm import AsyncLLM
from octavo.grammar import Grammar, GrammarError
from octavo.interfaces import CallPiece, Said, Tool, ToolFormat, ToolParser
from octavo.server.errors import ApiError, unsupported
from octavo.server.wire import Wire
from octavo.text.chat import takes_tools

MAX_TOOLS = 128
_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
        {"type": "null"},
    ]
}


class Function(Wire):
    """strict: arguments are held to `parameters` also where the model decides by itself whether to call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(Wire):
    type: Literal["function"]
    function: Function


class _Named(Wire):
    name: str


class _Choice(Wire):
    type: Literal["function"]
    function: _Named


Tools = Annotated[list[ToolParam] | None, FailFast(), Field(max_length=MAX_TOOLS)]


class Tooled(Wire):
    """The fields of a chat about tools."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "functions": (([],), "use tools"),
        "function_call": (("none", "auto"), "use tool_choice"),
    }

    tools: Tools = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None

    def tooling(self, llm: AsyncLLM, *, formed: bool) -> Tooling | None:
        """What the tools mean with this model; None without any. formed: the answer has a form of its own. Raises ApiError."""
        choice = self._choice()
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise _bad("tool_choice", "is only for requests with tools")
            return None
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _bad("tools", f"two tools are named {twice!r}")
        if not takes_tools(llm.tokenizer):
            raise unsupported(
                "tools", "this model's chat template has no place for them; start the server with a --chat-template that has"
            )
        choice = choice or "auto"
        if choice == "auto" and not llm.config.enable_auto_tool_choice:
            raise unsupported(
                "tool_choice",
                "'auto', which is the default, needs a server started with --enable-auto-tool-choice; "
                "'required', 'none' or the name of a function work without",
            )
        if isinstance(choice, _Choice) and choice.function.name not in names:
            raise _bad("tool_choice.function.name", f"{choice.function.name!r:.80} is none of the tools")
        if formed and choice != "none":
            raise unsupported(
                "response_format", "it and tools that may be called cannot both be honoured; send tool_choice 'none'"
            )
        shown = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if choice == "none":
            return Tooling(shown, llm.tool_format)
        offered = [
            tool.function for tool in self.tools if not isinstance(choice, _Choice) or tool.function.name == choice.function.name
        ]
        return Tooling(
            shown,
            llm.tool_format,
            offered=tuple(offered),
            many=self.parallel_tool_calls is not False and not isinstance(choice, _Choice),
            free=choice == "auto",
        )

    def _choice(self) -> str | _Choice | None:
        value = self.tool_choice
        if value is None or value in ("none", "auto", "required"):
            return value  # type: ignore[no-any-return]
        if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
            extra = [name for name in value if name not in ("type", "function")]
            function = value["function"]
            if not extra and set(function) == {"name"} and isinstance(function["name"], str):
                return _Choice(type="function", function=_Named(name=function["name"]))
        if isinstance(value, dict) and value.get("type") in ("allowed_tools", "custom"):
            raise unsupported("tool_choice.type", f"{value['type']!r} is not; 'function' is")
        raise _bad("tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


@dataclass(frozen=True)
class Tooling:
    """The tools of one request. shown: as the template gets them. offered: those that may be called (none: the answer is text); many:
    whether by more than one call; free: whether by none."""

    shown: list[dict[str, Any]]
    format: ToolFormat
    offered: tuple[Function, ...] = ()
    many: bool = False
    free: bool = True

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be. Where the model decides whether to call, only if some tool is strict. Raises ApiError."""
        if not self.offered or (self.free and not any(tool.strict for tool in self.offered)):
            return None
        # beside a strict tool, one that is not may be called with any object
        tools = [Tool(tool.name, tool.parameters if tool.strict or not self.free else None) for tool in self.offered]
        try:
            return Grammar.calls(self.format.grammar(tools, many=self.many, free=self.free))
        except GrammarError as error:
            raise _bad("tools", str(error)) from error

    def reading(self) -> CallReading | None:
        """How the calls of one sample are read."""
        if not self.offered:
            return None
        return CallReading(self.format.parser([tool.name for tool in self.offered], most=None if self.many else 1))


class CallReading:
    """One sample's text, taken apart into content and calls."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.called = False

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Content, and `tool_calls` as a message has them."""
        content, pieces = _joined(self._parser.feed(text), self._parser.end())
        names: list[str] = []
        arguments: list[list[str]] = []
        for piece in pieces:
            if piece.name is not None:
                names.append(piece.name)
                arguments.append([])
            arguments[piece.index].append(piece.arguments)
        self.called = bool(names)
        calls = zip(names, arguments, strict=True)
        return content, [_call(name, "".join(parts)) for name, parts in calls]

    def delta(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content, and `tool_calls` as a chunk has them: id and name once, then pieces of arguments."""
        said = self._parser.feed(text)
        content, pieces = _joined(said, self._parser.end()) if ended else said
        self.called = self.called or bool(pieces)
        return content, [_piece(piece) for piece in pieces]

    def reason(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self.called else finish


def _joined(*said: Said) -> Said:
    return "".join(text for text, _ in said), [piece for _, pieces in said for piece in pieces]


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _piece(piece: CallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **_call(piece.name, piece.arguments)}


def template_tools(tools: Sequence[ToolParam] | None, llm: AsyncLLM) -> list[dict[str, Any]] | None:
    """Tools for a template alone: /tokenize. Raises ApiError."""
    found = Tooled(tools=list(tools), tool_choice="none").tooling(llm, formed=False) if tools else None
    return found.shown if found else None
