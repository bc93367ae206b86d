"""What clients may send to Octavo's own endpoints, as `protocol` has it for OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field

from octavo.request import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.limits import MAX_MESSAGES
from octavo.server.protocol import Message, Prompt, Sampling
from octavo.server.tools import Tools
from octavo.server.wire import Wire


class GenerateRequest(Sampling):
    """POST /generate: one prompt (text or token ids), or a list of them, and sampling fields."""

    prompt: Prompt
    max_new_tokens: int | None = None
    best_of: int | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_new_tokens

    def to_params(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_new_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_new_tokens and max_tokens differ; send one", param="max_new_tokens", code="invalid_value")
        return self.params(max_tokens=self.asked_tokens)

    def rename(self, param: str | None) -> str | None:
        return "max_new_tokens" if param == "max_tokens" and self.max_new_tokens is not None else param


class TokenizeRequest(Wire):
    """POST /tokenize, vLLM's shape: either `prompt` or `messages`."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "chat_template": ((), "templates are server configuration (--chat-template)"),
        "continue_final_message": ((False,), "an answer cannot be continued"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, FailFast()] = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """POST /detokenize, vLLM's shape."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
