"""RequestOutput, and the OutputProcessor that makes them from the engine's events.

Owns detokenising, stop strings, and what a finished request looks like; used by LLM and by the
server process alike. Never schedules: a stop string only says which sample the engine should end.
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.request import Event, Request, TokenLogprobs
from octavo.text.sample import SampleText
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position: natural logarithm, rank (1 is best), and its text alone."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sample. In a stream of deltas text, token_ids and logprobs are what is new; else everything so far.

    token_ids counts every generated token, also those whose text a stop string cut away.
    finish_reason: "stop", "length", "abort", "error", or None while it runs. stop_reason: the stop
    string or token id that ended it, None for the model's own end of sequence.
    token_logprobs: per token of the returned text. text_offsets: where each of them starts in the
    sample's text, in characters. cumulative_logprob: of the generated tokens so far, if known.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_logprobs: list[TokenLogprobs] | None = None
    text_offsets: list[int] | None = None
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Per token a dict of id to Logprob, the chosen one first; None if logprobs were not asked for."""
        if self.token_logprobs is None or self.tokenizer is None:
            return None
        return [_candidates(entry, self.tokenizer) for entry in self.token_logprobs]

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What is known of one request. prompt is its text where the caller gave text.

    queue_seconds: how long it waited for its first place in a step. sent: when the engine's process sent the oldest
    news in it, by `time.perf_counter`; 0 where there is no such process. error explains a sample's
    finish_reason "error". prompt_token_logprobs has an entry per prompt
    token, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_token_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    queue_seconds: float = 0.0
    sent: float = 0.0

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Per prompt token a dict of id to Logprob, None for the first token."""
        if self.prompt_token_logprobs is None or self.tokenizer is None:
            return None
        return [None if entry is None else _candidates(entry, self.tokenizer) for entry in self.prompt_token_logprobs]


def _candidates(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    found = {entry.token: Logprob(entry.logprob, entry.rank, tokenizer.token_text(entry.token))}
    for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        if token not in found:
            found[token] = Logprob(value, rank, tokenizer.token_text(token))
    return found


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One delta that says what two in a row said."""
    outputs = {output.index: output for output in first.outputs}
    for new in second.outputs:
        old = outputs.get(new.index)
        outputs[new.index] = new if old is None else _merged(old, new)
    return RequestOutput(
        second.request_id,
        second.prompt,
        second.prompt_token_ids,
        sorted(outputs.values(), key=lambda output: output.index),
        second.finished,
        max(first.num_cached_tokens, second.num_cached_tokens),
        first.prompt_token_logprobs if second.prompt_token_logprobs is None else second.prompt_token_logprobs,
        second.error or first.error,
        second.tokenizer,
        max(first.queue_seconds, second.queue_seconds),
        first.sent,
    )


def _merged(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        new.index,
        old.text + new.text,
        old.token_ids + new.token_ids,
        new.cumulative_logprob,
        new.finish_reason,
        new.stop_reason,
        None if new.token_logprobs is None else (old.token_logprobs or []) + new.token_logprobs,
        None if new.text_offsets is None else (old.text_offsets or []) + new.text_offsets,
        new.tokenizer,
    )


class OutputProcessor:
    """Events in, RequestOutputs out. Single-threaded. Events of requests it does not know are ignored."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}

    def add(self, request: Request, prompt_text: str | None = None, delta: bool = False, *, final_only: bool = False) -> None:
        """Follow a request: with `delta`, outputs hold what is new; else everything so far; with
        `final_only`, there is one output, at the end (or at an error)."""
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is already in use")
        self._live[request.id] = _Live(self._tokenizer, request, prompt_text, delta, final_only)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._live.pop(request_id, None)

    def process(self, events: Iterable[Event]) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
        """One output for each request that has news, and the (request id, sample) pairs that a stop string
        ended and the engine should abort."""
        news: dict[str, _Live] = {}
        aborts: list[tuple[str, int]] = []
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if live.take(event):
                aborts.append((event.request_id, event.sample))
            news[event.request_id] = live
        outputs = []
        for request_id, live in news.items():
            output = live.output()
            if output is not None:
                outputs.append(output)
            if live.finished:
                del self._live[request_id]
        return outputs, aborts


class _Live:
    """One request being followed."""

    def __init__(self, tokenizer: Tokenizer, request: Request, prompt_text: str | None, delta: bool, final_only: bool) -> None:
        params = request.params
        self._tokenizer, self._request, self._text = tokenizer, request, prompt_text
        # Which samples are the best is known at the end only: no deltas.
        self._best = params.samples > params.n
        self._delta, self._final = delta and not self._best, final_only or self._best
        self._samples = [SampleText(tokenizer, request.prompt, params) for _ in range(params.samples)]
        self._running = params.samples
        self._changed: dict[int, None] = {}
        self._cached, self._queued = 0, 0.0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        return self._running == 0

    def take(self, event: Event) -> bool:
        """Whether the engine must be told to end this sample."""
        self._cached, self._queued = max(self._cached, event.cached_tokens), max(self._queued, event.queue_seconds)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        self._error = event.error or self._error
        sample = self._samples[event.sample]
        if sample.finish_reason is not None:
            return False
        sample.take(event)
        self._changed[event.sample] = None
        if sample.finish_reason is None:
            return False
        self._running -= 1
        return event.finish is None

    def output(self) -> RequestOutput | None:
        if self._final and self._running and self._error is None:
            return None
        changed, self._changed = self._changed, {}
        if self._delta:
            outputs = [self._completion(index, self._samples[index], delta=True) for index in changed]
            if not outputs:
                return None
        else:
            outputs = [self._completion(i, s, delta=False) for i, s in enumerate(self._best_samples())]
        return RequestOutput(
            self._request.id,
            self._text,
            self._request.prompt,
            outputs,
            not self._running,
            self._cached,
            self._prompt_logprobs,
            self._error,
            self._tokenizer,
            self._queued,
        )

    def _completion(self, index: int, sample: SampleText, *, delta: bool) -> CompletionOutput:
        text, tokens, logprobs, offsets = sample.new() if delta else sample.whole()
        asked = self._request.params.logprobs is not None
        return CompletionOutput(
            index,
            text,
            tokens,
            sample.total_logprob,
            sample.finish_reason,
            sample.stop_reason,
            logprobs if asked else None,
            offsets if asked else None,
            self._tokenizer,
        )

    def _best_samples(self) -> Sequence[SampleText]:
        if not self._best:
            return self._samples
        return sorted(self._samples, key=SampleText.mean_logprob, reverse=True)[: self._request.params.n]
