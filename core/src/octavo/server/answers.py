"""Answers: how each endpoint spells what was generated, whole and in pieces.

Owns the JSON of answers. One class per endpoint, made for one request; a stream's pieces joined say
exactly what the whole answer says. Never talks to the engine or the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import octavo
from octavo.server.clients import frame
from octavo.server.generation import Job
from octavo.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, prompt_offsets
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.tools import CallReading, Tooling
from octavo.text.output import CompletionOutput, RequestOutput
from octavo.text.tokenizer import Tokenizer

FINGERPRINT = f"octavo-{octavo.__version__}"
Deltas = AsyncIterator[tuple[int, RequestOutput]]


class Usage:
    """Token counts of one HTTP request: each prompt once, every sample's tokens."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.prompt = sum(len(job.ids) for job in jobs)
        self.completion = 0
        self._cached: dict[int, int] = {}

    def add(self, job: int, output: RequestOutput) -> None:
        self._cached[job] = output.num_cached_tokens
        self.completion += sum(len(sample.token_ids) for sample in output.outputs)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class _Answer:
    """What OpenAI's two shapes share. `kind` is the whole answer's `object`, `piece` that of a stream's chunks."""

    kind: str
    piece: str
    prefix: str

    def __init__(
        self, request_id: str, model: str, jobs: Sequence[Job], tokenizer: Tokenizer, body: ChatRequest | CompletionRequest
    ) -> None:
        self._jobs, self._tokenizer = jobs, tokenizer
        self._usage = Usage(jobs)
        self._include_usage, self._continuous = body.include_usage, body.continuous_usage
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage.to_json()}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "object": self.piece, "choices": choices}
        if self._include_usage:
            chunk["usage"] = self._usage.to_json() if self._continuous else usage
        return frame(chunk)

    def _last(self) -> bytes:
        """The chunk that carries `usage`, where it was asked for."""
        return self._chunk([], self._usage.to_json()) if self._include_usage else b""


class ChatAnswer(_Answer):
    """POST /v1/chat/completions: one job, a choice per sample."""

    kind, piece, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        jobs: Sequence[Job],
        tokenizer: Tokenizer,
        body: ChatRequest,
        tooling: Tooling | None = None,
    ) -> None:
        super().__init__(request_id, model, jobs, tokenizer, body)
        self._tooling = tooling
        self._calls: dict[int, CallReading] = {}  # by sample, of a stream

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        self._usage.add(0, output)
        answer = self._whole([self._choice(sample) for sample in output.outputs])
        if output.prompt_token_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_token_logprobs)
        return answer

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        reading, finish = self._reading(), sample.finish_reason
        if reading is not None:
            content, calls = reading.whole(sample.text)
            finish = reading.reason(finish)
            message["content"] = content
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample),
            "finish_reason": finish,
            "stop_reason": sample.stop_reason,
        }

    def _reading(self) -> CallReading | None:
        return None if self._tooling is None else self._tooling.reading()

    async def frames(self, deltas: Deltas) -> AsyncIterator[bytes]:
        head = b"".join(
            self._chunk([{"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])
            for i in range(self._jobs[0].params.n)
        )
        async for _, output in deltas:
            self._usage.add(0, output)
            choices = [self._delta(sample) for sample in output.outputs if _says_something(sample)]
            data = head + b"".join(self._chunk([choice]) for choice in choices if _worth_a_chunk(choice))
            head = b""
            if data:
                yield data
        yield self._last()

    def _delta(self, sample: CompletionOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": sample.text} if sample.text else {}
        finish = sample.finish_reason
        if self._tooling is not None and self._tooling.offered:
            reading = self._calls.get(sample.index) or self._tooling.reading()
            assert reading is not None
            self._calls[sample.index] = reading
            content, calls = reading.delta(sample.text, ended=finish is not None)
            delta = ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
            finish = reading.reason(finish)
        choice = {"index": sample.index, "delta": delta, "logprobs": self._logprobs(sample), "finish_reason": finish}
        if sample.finish_reason is not None:
            choice["stop_reason"] = sample.stop_reason
        return choice

    def _logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        return None if sample.token_logprobs is None else chat_logprobs(self._tokenizer, sample.token_logprobs)


class CompletionAnswer(_Answer):
    """POST /v1/completions: choice index = prompt * n + sample."""

    kind, piece, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, request_id: str, model: str, jobs: Sequence[Job], tokenizer: Tokenizer, body: CompletionRequest) -> None:
        super().__init__(request_id, model, jobs, tokenizer, body)
        self._echo, self._want_logprobs, self._prompt_only = bool(body.echo), body.logprobs is not None, body.prompt_only
        self._want_prompt_logprobs = body.prompt_logprobs is not None
        skip = bool(jobs[0].params.skip_special_tokens)
        needed = self._echo or self._want_logprobs
        self._texts = [self._prompt_text(job, skip) if needed else "" for job in jobs]
        self._begun: set[int] = set()

    def _prompt_text(self, job: Job, skip: bool) -> str:
        return job.text if job.text is not None else self._tokenizer.decode(job.ids, skip_special_tokens=skip)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for job, output in enumerate(outputs):
            self._count(job, output)
            choices += [self._choice(job, output, sample) for sample in output.outputs]
        return self._whole(choices)

    async def frames(self, deltas: Deltas) -> AsyncIterator[bytes]:
        async for job, output in deltas:
            self._count(job, output)
            # The values of a long prompt are many: a first piece with them is no work for the event loop.
            begins = output.prompt_token_logprobs is not None and any(self._opens(job, s) for s in output.outputs)
            data = await asyncio.to_thread(self._pieces, job, output) if begins else self._pieces(job, output)
            if data:
                yield data
        yield self._last()

    def _pieces(self, job: int, output: RequestOutput) -> bytes:
        choices = [self._choice(job, output, s) for s in output.outputs if _says_something(s) or self._opens(job, s)]
        return b"".join(self._chunk([choice]) for choice in choices)

    def _count(self, job: int, output: RequestOutput) -> None:
        if self._prompt_only:
            output.outputs = [_silent(sample) for sample in output.outputs]
        self._usage.add(job, output)

    def _index(self, job: int, sample: CompletionOutput) -> int:
        return job * self._jobs[job].params.n + sample.index

    def _opens(self, job: int, sample: CompletionOutput) -> bool:
        """Whether this sample still has to say its prompt, or what the prompt's values are."""
        return (self._echo or self._want_prompt_logprobs) and self._index(job, sample) not in self._begun

    def _choice(self, job: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        index, prompt = self._index(job, sample), self._texts[job]
        opens = index not in self._begun
        self._begun.add(index)
        echo = self._echo and opens
        choice = {
            "index": index,
            "text": (prompt if echo else "") + sample.text,
            "logprobs": self._logprobs(output, sample, prompt, echo=echo) if self._want_logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if opens and self._want_prompt_logprobs and output.prompt_token_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_token_logprobs)
        return choice

    def _logprobs(self, output: RequestOutput, sample: CompletionOutput, prompt: str, *, echo: bool) -> dict[str, Any]:
        entries = list(sample.token_logprobs or ())
        tokens = [entry.token for entry in entries]
        offsets = [len(prompt) + offset for offset in sample.text_offsets or ()]
        if not echo:
            return completion_logprobs(self._tokenizer, tokens, entries, offsets)
        ids = output.prompt_token_ids
        before = output.prompt_token_logprobs or [None] * len(ids)
        return completion_logprobs(
            self._tokenizer, [*ids, *tokens], [*before, *entries], [*prompt_offsets(self._tokenizer, ids, prompt), *offsets]
        )


class GenerateAnswer:
    """POST /generate: the texts, and little else."""

    def __init__(self, request_id: str, model: str, jobs: Sequence[Job]) -> None:
        self._id, self._model, self._jobs, self._usage = f"gen-{request_id}", model, jobs, Usage(jobs)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for job, output in enumerate(outputs):
            self._usage.add(job, output)
        samples = [sample for output in outputs for sample in output.outputs]
        return {
            "id": self._id,
            "model": self._model,
            "text": [sample.text for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "usage": self._usage.to_json(),
        }

    async def frames(self, deltas: Deltas) -> AsyncIterator[bytes]:
        async for job, output in deltas:
            data = b"".join(
                frame(
                    {
                        "id": self._id,
                        "index": job * self._jobs[job].params.n + sample.index,
                        "text": sample.text,
                        "finish_reason": sample.finish_reason,
                    }
                )
                for sample in output.outputs
                if _says_something(sample)
            )
            if data:
                yield data


def _says_something(sample: CompletionOutput) -> bool:
    """Tokens whose text is still held back (half a character, the start of a stop string) wait for it."""
    return bool(sample.text or sample.token_logprobs or sample.finish_reason is not None)


def _worth_a_chunk(choice: dict[str, Any]) -> bool:
    """Text that may be the beginning of a call is not told before that is known."""
    return bool(choice["delta"] or choice["logprobs"] or choice["finish_reason"])


def _silent(sample: CompletionOutput) -> CompletionOutput:
    """The sample without what it generated: max_tokens was 0."""
    return CompletionOutput(
        sample.index,
        "",
        [],
        None,
        None if sample.finish_reason is None else "length",
        None,
        None if sample.token_logprobs is None else [],
        None if sample.text_offsets is None else [],
        sample.tokenizer,
    )
