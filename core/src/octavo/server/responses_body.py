"""What clients may send to POST /v1/responses.

Owns its body and how its input becomes a conversation. Of the protocol's tools, stored conversations and reasoning nothing is
served: those fields are in the `unsupported` table. Ranges of sampling parameters are those of `protocol`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from octavo.grammar import Grammar
from octavo.request import SamplingParams
from octavo.server.errors import ApiError, unsupported
from octavo.server.formats import Formed, Schema, json_grammar
from octavo.server.limits import MAX_MESSAGES
from octavo.server.protocol import NO_TOOLS, VLLM, Message, Sampling
from octavo.server.wire import Wire

LOGPROBS = "message.output_text.logprobs"
_NOT_KEPT = "nothing is stored; send the whole conversation as `input`"
_PARTS = ("input_text", "output_text", "text")


class InputMessage(Wire):
    """One message: of the user, of the system or developer, or an earlier answer of ours as it was."""

    role: str = Field(min_length=1, max_length=64)
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})]
    type: str | None = None
    id: str | None = Field(None, max_length=256)
    status: str | None = None
    phase: str | None = None

    def to_template(self, where: str) -> dict[str, Any]:
        """The message for `octavo.text.chat.render_chat`. Raises ApiError."""
        if self.type not in (None, "message"):
            raise unsupported(f"{where}.type", f"{self.type[:40]!r} items are not; messages are")
        if not isinstance(self.content, list):
            return Message(role=self.role, content=self.content).to_template(where)
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(self.content)]
        return Message(role=self.role, content=parts).to_template(where)


def _part(part: Any, where: str) -> dict[str, Any]:
    """A part of a message as `Message` takes it; what an answer's part says beside its text is dropped."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type") not in _PARTS:
        kind = part.get("type") if isinstance(part, dict) else None
        raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} parts are not; input_text and output_text with a `text` are")
    extra = [name for name in part if name not in ("type", "text", "annotations", "logprobs")]
    if extra:
        raise unsupported(f"{where}.{extra[0]:.40}", "a part has `type` and `text` and nothing else")
    return {"type": "text", "text": part["text"]}


def _listed(value: Any) -> Any:
    """A text is what a user says."""
    if value is not None and not isinstance(value, (str, list)):
        raise ValueError("must be a string or a list of messages")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_INPUT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES}],
    "description": "What a user says, or a list of messages {role, content}.",
}
Input = Annotated[
    list[InputMessage],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_listed),
    WithJsonSchema(_INPUT),
]


class TextFormat(Wire):
    """OpenAI's `response_format` in this protocol's shape. strict: schemas are enforced either way."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: Schema = Field(None, alias="schema")
    strict: bool | None = None

    def form(self, where: str) -> Grammar | None:
        """Raises ApiError."""
        if self.type != "json_schema":
            return Grammar.json_object() if self.type == "json_object" else None
        missing = [name for name, value in (("name", self.name), ("schema", self.schema_)) if value is None]
        if missing:
            param = f"{where}.{missing[0]}"
            raise ApiError(400, f"{param}: this field is required", param=param, code="missing_required_parameter")
        return json_grammar(self.schema_, f"{where}.schema")


class Text(Wire):
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {"verbosity": (("medium",), "this model has no verbosity")}

    format: TextFormat | None = None


class ResponsesRequest(Sampling, Formed):
    """POST /v1/responses: one answer to a conversation. instructions: a system message before it."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **VLLM,
        "tools": (([],), NO_TOOLS),
        "tool_choice": (("none", "auto"), NO_TOOLS),
        "parallel_tool_calls": ((True, False), NO_TOOLS),
        "max_tool_calls": ((), NO_TOOLS),
        "background": ((False,), "an answer comes on the connection that asked for it"),
        "background_options": ((), "an answer comes on the connection that asked for it"),
        "store": ((False,), _NOT_KEPT),
        "previous_response_id": ((), _NOT_KEPT),
        "conversation": ((), _NOT_KEPT),
        "prompt": ((), _NOT_KEPT),
        "metadata": (({},), "nothing is stored"),
        "context_management": (([],), "prompts are never cut; shorten it yourself"),
        "truncation": (("disabled",), "prompts are never cut; shorten it yourself"),
        "reasoning": (({}, {"effort": "none"}), "this model has no reasoning effort"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "stream_options": (({}, {"include_obfuscation": False}), "chunks are not padded"),
        "prompt_cache_options": ((), "the prefix cache decides by itself"),
        "prompt_cache_retention": ((), "the prefix cache decides by itself"),
        "moderation": ((), "nothing is moderated"),
        "image": ((), "there are no images"),
        "access_programs": ((), "there are none"),
        "n": ((1,), "there is one answer a request"),
        "max_tokens": ((), "its name is max_output_tokens here"),
    }

    input: Input
    instructions: str | None = None
    text: Text | None = None
    max_output_tokens: int | None = None
    include: Annotated[list[str] | None, FailFast()] = Field(None, max_length=16)
    top_logprobs: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens

    def forms(self) -> list[tuple[str, Grammar]]:
        form = self.text.format.form("text.format") if self.text is not None and self.text.format is not None else None
        return [*([("text.format", form)] if form else []), *super().forms()]

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as `render_chat` takes them. Raises ApiError."""
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*before, *(message.to_template(f"input[{i}]") for i, message in enumerate(self.input))]

    def to_params(self) -> SamplingParams:
        """Raises ApiError or RequestError, with this protocol's own field names."""
        for i, name in enumerate(self.include or ()):
            if name != LOGPROBS:
                raise unsupported(f"include[{i}]", f"{name[:60]!r} is not; {LOGPROBS} is")
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs is not None and not wanted:
            message = f"top_logprobs: only allowed with {LOGPROBS} in include"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        return self.params(
            max_tokens=self.max_output_tokens, logprobs=(self.top_logprobs or 0) if wanted else None, grammar=self.grammar
        )

    def rename(self, param: str | None) -> str | None:
        names = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}
        return names.get(param or "", param)
