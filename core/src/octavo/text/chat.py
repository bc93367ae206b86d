"""Chat messages to prompt ids: validation of messages, the template, and who may write special tokens.

Owns the shape of a message. Special tokens come from the template; the same text in a message's
content, tool calls or tools is text. Does no input or output; rendering takes milliseconds, but
belongs off an event loop. Never imports torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import LoadError, RequestError
from octavo.model.tokenizer_files import template_for
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.text.tracked import mark, trusted_spans

ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
"""Roles that may be part of a marker, as in '<|' + role + '|>'. Any other role is the client's text."""

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "bos_token", "eos_token", "pad_token"}
)
"""Template variables that `template_kwargs` may not set."""

Messages = Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, through the model's chat template (its `tool_use` one if tools are
    given and it has one). They are what transformers' apply_chat_template gives, except that text
    from the client never becomes a control token.

    Raises RequestError, with `param` naming the message, or with the template's own message.
    """
    text = render_text(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, template_kwargs=template_kwargs
    )
    return tokenizer.encode_trusted(text, trusted_spans(text))


def render_text(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The rendered text; `octavo.text.tracked` knows which of it came from the client."""
    template = _template(tokenizer, bool(tools))
    checked = check_messages(messages)
    extra = dict(template_kwargs or {})
    if wrong := RESERVED.intersection(extra):
        raise RequestError(
            f"chat_template_kwargs may not set {sorted(wrong)[0]!r}: templates and their own variables are server configuration",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    named = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text, "pad_token": tokenizer.pad_text}
    values: dict[str, Any] = {key: text for key, text in named.items() if text}
    values["add_generation_prompt"] = add_generation_prompt
    client = {**extra, "messages": checked, "tools": list(tools) if tools else None}
    try:
        values.update((key, mark(value, _is_role)) for key, value in client.items())
        chars = _chars(client)
    except RecursionError:
        raise _wrong("messages", "are nested too deeply") from None
    return template.render(values, chars=chars)


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's template (its `tool_use` one, if it has one) shows tools to the model. Raises RequestError where there is none."""
    return _template(tokenizer, True).reads("tools")


def check_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages in the form that templates read: content is text (parts joined, null beside tool calls
    is empty), and the arguments of tool calls are objects. RequestError names the message and field."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _wrong("messages", "must be a list with at least one message")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, f"must be an object with `role` and `content`, got {type(message).__name__}")
    checked = {str(key): value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", f"must be a non-empty string, got {role!r:.60}")
    calls = checked.get("tool_calls")
    if calls:
        checked["tool_calls"] = _check_calls(calls, f"{where}.tool_calls")
    else:
        checked.pop("tool_calls", None)
    content = checked.get("content")
    if content is None:
        if not calls and "function_call" not in checked:
            raise _wrong(f"{where}.content", "is missing; only an assistant message with tool_calls may leave it out")
        content = ""
    checked["content"] = _join_parts(content, f"{where}.content")
    return checked


def _join_parts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(where, f"must be a string or a list of text parts, got {type(content).__name__}")
    texts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text") else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise _wrong(f"{where}[{number}]", f"only text parts {{'type': 'text', 'text': ...}} are supported, got {kind!r:.60}")
        texts.append(text)
    return "".join(texts)


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(where, "must be a list of tool calls")
    checked = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{number}]", "must be an object with `function.name` and `function.arguments`")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise _wrong(f"{where}[{number}].function.arguments", f"is not JSON: {error}") from error
        checked.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return checked


def _template(tokenizer: Tokenizer, with_tools: bool) -> ChatTemplate:
    source = template_for(tokenizer.chat_templates, tools=with_tools)
    if source is None:
        raise RequestError(
            "this model has no chat template; send a raw prompt to the completions API, or start with --chat-template FILE",
            param="messages",
            code="chat_template_missing",
        )
    try:
        return compile_template(source)
    except LoadError as error:
        raise RequestError(str(error), param="messages", code="chat_template_error") from error


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """The compiled template, kept. LoadError if it does not compile."""
    return ChatTemplate(source)


def _is_role(key: str | None, text: str) -> bool:
    return key == "role" and text in ROLES


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(k) + _chars(v) for k, v in value.items())
    return sum(map(_chars, value)) if isinstance(value, Sequence) else 16


def _wrong(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")
