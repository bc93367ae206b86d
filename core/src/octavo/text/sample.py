"""SampleText: the text of one sample as it grows, its stop strings, and what may be sent of it.

Owns the three positions of a text: decoded, matched against stops, released. Never talks to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.request import Event, SamplingParams, TokenLogprobs
from octavo.text.stops import StopMatcher
from octavo.text.tokenizer import Tokenizer


class SampleText:
    """One sample. `take` an event, then `new` (since the last `new`) or `whole`.

    Stops are matched on the text with its special tokens, also where skip_special_tokens hides them
    from the reader: `_pending` is what is matched and not released yet, as (text, visible) pieces.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        stops = params.stops
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(prompt, skip_special_tokens=params.skip_special_tokens)
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens, self._include = params.min_tokens, params.include_stop_str_in_output
        self._floor = 0  # matches that end here or before came too early
        self._pending: list[tuple[str, bool]] = []
        self._parts: list[str] = []  # released text
        self._released = self._decoded = 0  # visible characters
        self._logprobs: list[TokenLogprobs] = []
        self._offsets: list[int] = []
        self._sent_tokens = self._sent_logprobs = 0
        self.token_ids: list[int] = []
        self.total_logprob: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, event: Event) -> None:
        """Add an event's tokens up to the first stop string; what follows it never existed."""
        ended_by_token = event.finish == "stop" and not self._include
        last = len(event.tokens) - 1
        for at, token in enumerate(event.tokens):
            self.token_ids.append(token)
            if event.logprobs is not None:
                self._add_logprob(event.logprobs[at])
            if token in self._hidden or (ended_by_token and at == last):
                matched = self._add(self._tokenizer.token_text(token) if self._matcher else "", False)
            else:
                matched = self._add(self._stream.push(token), True)
            if matched:
                return
        if event.finish is not None and not self._add(self._stream.flush(), True):
            self.finish_reason, self.stop_reason = event.finish, event.stop_reason
            self._release(0)

    def _add_logprob(self, entry: TokenLogprobs) -> None:
        self._logprobs.append(entry)
        self._offsets.append(self._decoded)
        self.total_logprob = (self.total_logprob or 0.0) + entry.logprob

    def _add(self, text: str, visible: bool) -> bool:
        """Whether a stop string ended the sample."""
        if visible:
            self._decoded += len(text)
        matcher = self._matcher
        if matcher is None:
            if text and visible:
                self._parts.append(text)
                self._released += len(text)
            return False
        match = matcher.feed(text) if text else None
        if text:
            self._pending.append((text, visible))
        if len(self.token_ids) <= self._min_tokens:
            self._floor = matcher.position
        if match is None or match[1] <= self._floor:
            self._release(matcher.held)
            return False
        start, end = match
        whole = "".join(text for text, _ in self._pending)
        first = matcher.position - len(whole)
        self._release(matcher.position - (end if self._include else start))
        self._pending.clear()
        self._decoded = self._released
        self.finish_reason, self.stop_reason = "stop", whole[start - first : end - first]
        self._drop_logprobs()
        return True

    def _release(self, keep: int) -> None:
        """Release pending text except its last `keep` characters."""
        pending = self._pending
        ready = sum(len(text) for text, _ in pending) - keep
        while ready > 0:
            text, visible = pending[0]
            out = text[:ready]
            if visible:
                self._parts.append(out)
                self._released += len(out)
            ready -= len(out)
            if len(out) == len(text):
                pending.pop(0)
            else:
                pending[0] = (text[len(out) :], visible)

    def _drop_logprobs(self) -> None:
        """Tokens that begin at or after the cut belong to the stop string: their text is not sent either."""
        while self._offsets and self._offsets[-1] >= self._released:
            self._offsets.pop()
            self._logprobs.pop()

    def _text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def new(self) -> tuple[str, list[int], list[TokenLogprobs], list[int]]:
        """Text, tokens, logprobs and their text offsets since the last call. Logprobs wait for their text."""
        text = "".join(self._parts)
        self._parts.clear()
        tokens = self.token_ids[self._sent_tokens :]
        self._sent_tokens = len(self.token_ids)
        first = end = self._sent_logprobs
        while end < len(self._offsets) and (self.finish_reason is not None or self._offsets[end] < self._released):
            end += 1
        self._sent_logprobs = end
        return text, tokens, self._logprobs[first:end], self._offsets[first:end]

    def whole(self) -> tuple[str, list[int], list[TokenLogprobs], list[int]]:
        """The same of everything so far."""
        return self._text(), list(self.token_ids), list(self._logprobs), list(self._offsets)

    def mean_logprob(self) -> float:
        """What best_of ranks by; a sample that failed or has no logprobs comes last."""
        if self.finish_reason == "error" or self.total_logprob is None or not self.token_ids:
            return -math.inf
        return self.total_logprob / len(self.token_ids)
