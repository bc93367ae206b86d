"""How POST /v1/responses spells what was generated, whole and as events.

Owns the JSON of that protocol. The last event of a stream carries the very object that the whole answer is.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from octavo.request import TokenLogprobs
from octavo.server.answers import Deltas, Usage
from octavo.server.clients import frame
from octavo.server.generation import Job
from octavo.server.logprobs import chat_logprobs
from octavo.server.responses_body import ResponsesRequest
from octavo.text.output import CompletionOutput, RequestOutput
from octavo.text.tokenizer import Tokenizer


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """What was asked for, as the protocol echoes it."""
    asked = body.text.format if body.text is not None else None
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


class ResponsesAnswer:
    """One job with one sample: one message with one part of text."""

    def __init__(self, request_id: str, model: str, jobs: Sequence[Job], tokenizer: Tokenizer, body: ResponsesRequest) -> None:
        self._tokenizer, self._usage = tokenizer, Usage(jobs)
        self._wants_logprobs = jobs[0].params.logprobs is not None
        self._item = f"msg_{request_id}"
        self._numbers = 0
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": jobs[0].params.temperature,
            "top_p": jobs[0].params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "user": body.user,
            "text": {"format": _format(body)},
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "metadata": {},
            "error": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self._usage.add(0, outputs[0])
        sample = outputs[0].outputs[0]
        return self._ended(sample.text, self._values(sample.token_logprobs or ()), sample.finish_reason)

    async def frames(self, deltas: Deltas) -> AsyncIterator[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        begun = self._response("in_progress", [])
        head = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        head += self._event("response.output_item.added", output_index=0, item=self._message([], "in_progress"))
        head += self._in_item("response.content_part.added", part=part)
        texts: list[str] = []
        values: list[dict[str, Any]] = []
        reason: str | None = None
        async for _, output in deltas:
            self._usage.add(0, output)
            for sample in output.outputs:
                data, head = head + self._delta(sample, texts, values), b""
                reason = sample.finish_reason or reason
                if data:
                    yield data
        yield self._end("".join(texts), values, reason)

    def _delta(self, sample: CompletionOutput, texts: list[str], values: list[dict[str, Any]]) -> bytes:
        new = self._values(sample.token_logprobs or ())
        if not sample.text and not new:
            return b""
        texts.append(sample.text)
        values += new
        return self._in_item("response.output_text.delta", delta=sample.text, logprobs=new)

    def _end(self, text: str, values: list[dict[str, Any]], reason: str | None) -> bytes:
        answer = self._ended(text, values, reason)
        item = answer["output"][0]
        return b"".join(
            (
                self._in_item("response.output_text.done", text=text, logprobs=values),
                self._in_item("response.content_part.done", part=item["content"][0]),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{answer['status']}", response=answer),
            )
        )

    def _ended(self, text: str, values: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        status = "incomplete" if reason == "length" else "completed"
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self._wants_logprobs:
            part["logprobs"] = values
        usage = self._usage.to_json()
        return {
            **self._response(status, [self._message([part], status)]),
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "incomplete_details": None, "usage": None}

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _values(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_logprobs(self._tokenizer, entries)["content"]
        return found

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        """An event about the one part of the one message."""
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = b"event: " + kind.encode() + b"\n" + frame({"type": kind, "sequence_number": self._numbers, **fields})
        self._numbers += 1
        return data
