"""What clients may send to OpenAI's endpoints: one model each, the only table of field names, types and meanings.

Owns the request bodies of chat and completions, and what those of other endpoints share with them. Ranges of
sampling parameters are not repeated here: `SamplingParams` and `check_request` check them, and `params` maps their
names back to the client's. Must never accept a field without honouring it: those we cannot honour are in a model's
`unsupported` table.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from octavo.errors import RequestError
from octavo.grammar import Grammar
from octavo.request import SamplingParams
from octavo.server.errors import ApiError, unsupported
from octavo.server.formats import Formed, ResponseFormat
from octavo.server.limits import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PROMPTS
from octavo.server.tools import Tooled
from octavo.server.wire import Wire

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_DEADLINE = 86400  # seconds
NO_TOOLS = "/v1/chat/completions has tools; here there are none"


def _container(*kinds: type) -> BeforeValidator:
    """Elements are checked by SamplingParams, which stops at the first wrong one and counts before it looks."""

    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, kinds):
            raise ValueError("must be " + " or ".join("a list" if kind is list else "a string" for kind in kinds))
        return value

    return BeforeValidator(check)


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "Text, a list of texts, token ids, or a list of lists of token ids.",
}
_PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {**_PART, "additionalProperties": False}}, {"type": "null"}],
    "description": "Text, or a list of text parts; null for an assistant message with tool_calls.",
}
_BIAS = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ],
    "description": "Token id -> what is added to its logit.",
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}
Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Content = Annotated[Any, WithJsonSchema(_CONTENT)]
Texts = Annotated[Any, _container(str, list), WithJsonSchema(_TEXTS)]
Ids = Annotated[Any, _container(list), WithJsonSchema(_IDS)]


class StreamOptions(Wire):
    """include_usage: one last chunk with `usage`. continuous_usage_stats: running usage on every chunk."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {"include_obfuscation": ((False,), "chunks are not padded")}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Wire):
    """The sampling fields that every generating endpoint has, under OpenAI's and vLLM's names."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any] | None, WithJsonSchema(_BIAS)] = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Texts = None
    stop_token_ids: Ids = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    model: str | None = None
    priority: int | None = None
    deadline: float | None = Field(None, gt=0, le=MAX_DEADLINE, allow_inf_nan=False)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    stream: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens that the client asked for itself, under whatever name."""
        return self.max_tokens

    def rename(self, param: str | None) -> str | None:
        """The client's own name of a SamplingParams field, for errors."""
        return param

    def params(self, **over: Any) -> SamplingParams:
        """The SamplingParams of this body; `over` replaces or adds fields. Raises RequestError."""
        values = {name: getattr(self, name) for name in _PARAMS if getattr(self, name, None) is not None}
        values["max_tokens"] = self.max_tokens
        if self.logit_bias is not None:
            values["logit_bias"] = _bias(self.logit_bias)
        values.update(over)
        return SamplingParams(**values)


_PARAMS = [
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "prompt_logprobs",
]  # fmt: skip


def _bias(raw: dict[str, Any]) -> dict[int, float]:
    """JSON keys are strings; a token id is a plain decimal number."""
    if len(raw) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(raw)}", param="logit_bias", code="invalid_value"
        )
    bias = {}
    for key, value in raw.items():
        if not (key.isascii() and key.lstrip("-").isdecimal() and len(key) <= 20):
            raise RequestError(f"logit_bias: keys must be token ids, got {key!r:.40}", param="logit_bias", code="invalid_value")
        bias[int(key)] = value
    return bias


class _OpenAI(Sampling, Formed):
    """Fields of both OpenAI endpoints that are not about sampling.

    `user`, `safety_identifier` and `prompt_cache_key` identify the end user or hint at caching; they
    change no output, and the prefix cache needs no hint.
    """

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def forms(self) -> list[tuple[str, Grammar]]:
        asked = self.response_format and self.response_format.grammar("response_format")
        return [*([("response_format", asked)] if asked else []), *super().forms()]

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only allowed with stream = true", param="stream_options", code="invalid_value")


_NO_BEAMS = "there is no beam search"
VLLM: dict[str, tuple[tuple[Any, ...], str]] = {
    **Formed.guided,
    "allowed_token_ids": ((), "logit_bias is what steers tokens"),
    "bad_words": (([],), "logit_bias is what steers tokens"),
    "use_beam_search": ((False,), _NO_BEAMS),
    "length_penalty": ((1.0, 1), _NO_BEAMS),
    "early_stopping": ((False,), _NO_BEAMS),
    "truncate_prompt_tokens": ((), "prompts are never cut; shorten it yourself"),
    "return_token_ids": ((False,), "answers hold text; /tokenize gives ids"),
    "return_tokens_as_token_ids": ((False,), "answers hold text; /tokenize gives ids"),
    "spaces_between_special_tokens": ((True,), "text is what the tokens say"),
    "request_id": ((), "ids are the server's own; an X-Request-Id header is echoed"),
    "logits_processors": (([],), "no code of a client is run"),
    "kv_transfer_params": ((), "the cache is this server's own"),
    "mm_processor_kwargs": (({},), "there are no images and no audio"),
    "vllm_xargs": (({},), "there are no further arguments"),
}
"""Fields of vLLM's two endpoints that are none of OpenAI's."""


class CompletionRequest(_OpenAI):
    """POST /v1/completions. prompt: a string, a list of strings, a list of token ids, or a list of those."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **VLLM,
        "suffix": (("",), "no model here inserts text; remove the field"),
        "prompt_embeds": ((), "prompts are text or token ids"),
    }  # fmt: skip

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def to_params(self) -> SamplingParams:
        """max_tokens is None where the client left it out. max_tokens 0 (with echo) becomes 1: see `prompt_only`."""
        self.check_stream()
        if self.stream and (self.best_of or 0) > (self.n or 1):
            raise ApiError(
                400, "best_of: streaming cannot pick the best afterwards; use best_of = n", param="best_of", code="invalid_value"
            )
        over: dict[str, Any] = {"logprobs": self.logprobs, "grammar": self.grammar}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            over["prompt_logprobs"] = self.logprobs
        if self.prompt_only:
            over["max_tokens"] = 1
        return self.params(**over)

    @property
    def prompt_only(self) -> bool:
        """max_tokens 0 with echo asks for the prompt and its logprobs alone."""
        return self.max_tokens == 0 and bool(self.echo)


class Message(Wire):
    """One chat message. What may be in `content` and `tool_calls` is checked where templates are rendered
    (`octavo.text.chat`), so that Python callers and HTTP clients meet one rule."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "function_call": ((), "use tool_calls"),
        "audio": ((), "there is no audio"),
    }

    role: str = Field(min_length=1, max_length=64)
    content: Content = None
    name: str | None = Field(None, max_length=64)
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: str | None = None
    annotations: list[Any] | None = None

    def to_template(self, where: str) -> dict[str, Any]:
        """The message for `octavo.text.chat.render_chat`. An answer of ours comes back with a few fields that
        say nothing (`refusal`, `annotations`): they are dropped. Raises ApiError."""
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            extra = [key for key in part if key not in ("type", "text")] if isinstance(part, dict) and "text" in part else ()
            if extra:
                raise unsupported(f"{where}.content[{i}].{extra[0]:.40}", "a text part has `type` and `text` and nothing else")
        content = self.refusal if self.content is None and self.role == "assistant" else self.content
        fields = {"content": content, "name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, **{key: value for key, value in fields.items() if value is not None}}


Messages = Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as `render_chat` takes them. Raises ApiError."""
    return [message.to_template(f"messages[{i}]") for i, message in enumerate(messages)]


class ChatRequest(_OpenAI, Tooled):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **VLLM,
        **Tooled.refused,
        "modalities": ((["text"],), "only text can be produced"),
        "audio": ((), "there is no audio"),
        "prediction": ((), "there is no predicted output"),
        "reasoning_effort": (("none",), "this model has no reasoning effort"),
        "verbosity": (("medium",), "this model has no verbosity"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "store": ((False,), "nothing is stored"),
        "metadata": (({},), "nothing is stored"),
        "web_search_options": ((), "there is no web search"),
        "prompt_cache_retention": ((), "the prefix cache decides by itself"),
        "prompt_cache_options": ((), "the prefix cache decides by itself"),
        "moderation": ((), "nothing is moderated"),
        "chat_template": ((), "templates are server configuration (--chat-template)"),
        "documents": (([],), "there is no retrieval"),
        "echo": ((False,), "use /v1/completions"),
        "best_of": ((1,), "use /v1/completions"),
        "add_special_tokens": ((False,), "the template says which special tokens a conversation has"),
        "include_reasoning": ((True,), "this model's reasoning is part of its text"),
        "continue_final_message": ((False,), "an answer cannot be continued; use /v1/completions"),
    }  # fmt: skip

    messages: Messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def to_params(self) -> SamplingParams:
        """Raises ApiError or RequestError, with the chat protocol's own field names."""
        self.check_stream()
        limit = self.asked_tokens
        if self.max_tokens is not None and limit != self.max_tokens:
            raise ApiError(
                400,
                f"max_completion_tokens: {limit} and max_tokens {self.max_tokens} differ; send one",
                param="max_completion_tokens",
                code="invalid_value",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: only allowed with logprobs = true", param="top_logprobs", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "a chat stream has no place for them")
        over = {
            "max_tokens": limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "grammar": self.grammar,
        }
        return self.params(**over)

    def rename(self, param: str | None) -> str | None:
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if param == "prompt" else param


def prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion body: text, token ids, or a list of either. Raises ApiError with param "prompt"."""

    def bad(message: str) -> ApiError:
        return ApiError(400, f"prompt: {message}", param="prompt", code="invalid_value")

    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise bad("the list is empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds == {str}:
        return list(value)
    if kinds != {list}:
        raise bad("strings and token ids cannot be mixed, and token ids are integers")
    for i, ids in enumerate(value):
        if not ids:
            raise bad(f"prompt {i} is an empty list; at least one token id is needed")
        if set(map(type, ids)) != {int}:
            raise bad(f"prompt {i} must be a list of integer token ids")
    return list(value)
