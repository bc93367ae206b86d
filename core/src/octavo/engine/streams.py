"""Stream: the outputs of one live request between the engine's listener and its consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.text.output import RequestOutput, merge_deltas

Prompt = str | Sequence[int] | Mapping[str, Any]


def prompt_parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """(text, None) or (text or None, token ids). Raises RequestError for anything else."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                f"prompt: a mapping holds `prompt` or `prompt_token_ids`, got {sorted(prompt)}",
                param="prompt",
                code="invalid_value",
            )
        ids = prompt.get("prompt_token_ids")
        return prompt.get("prompt"), None if ids is None else list(ids)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"prompt: must be text, token ids or a mapping, got {type(prompt).__name__}", param="prompt", code="invalid_value"
        )
    return None, list(prompt)


class Stream:
    """At most one pending output: what comes before the consumer looks is merged into it (deltas) or
    replaced by it (everything so far). shown: the id that its outputs carry."""

    def __init__(self, shown: str, delta: bool) -> None:
        self.shown, self._delta = shown, delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        pending = self._pending
        self._pending = output if pending is None or not self._delta else merge_deltas(pending, output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """What is pending is still delivered, then `next` raises."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> RequestOutput:
        while self._pending is None:
            if self._error is not None:
                raise self._error
            await self._news.wait()
            self._news.clear()
        output, self._pending = self._pending, None
        return output
