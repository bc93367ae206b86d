"""The values that travel through the engine: SamplingParams, Request, Events, and what a step is.

Owns the message types between the server process and the engine process (msgspec structs, no
tensors, no torch) and the work order (`Batch`) with its answer (`Result`) between the scheduler
and the runner (numpy columns, no tensors). Must never import torch: the server process loads it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from octavo.errors import RequestError
from octavo.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
INT64 = 1 << 63

INTEGERS = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "top_k": (-1, INT64 - 1),
    "seed": (-INT64, INT64 - 1),
    "max_tokens": (1, INT64 - 1),
    "min_tokens": (0, INT64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Least and greatest value of the integers of SamplingParams."""
_OPTIONAL = {"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"}

NUMBERS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
"""Least and greatest value of its other numbers, all of them finite."""


def _bad(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when generation ends. Immutable; every value is checked on
    construction and a bad one raises RequestError with the field's name in `param`.

    n, best_of: samples returned, and samples drawn (the best n by mean logprob are returned).
    temperature: 0 is greedy. top_p: 0 keeps only the top token. top_k: 0 or -1 is off.
    seed: sample i of the request uses seed + i; None draws one from the engine's own stream.
    max_tokens: None means whatever the context leaves.
    stop: text; the output ends right before the earliest match.
    logprobs: None is off; k returns the sampled token's value and the k best.
    prompt_logprobs: the same for every prompt token but the first.
    grammar: what the text must be. It ends where it is complete and nothing may follow, whatever min_tokens and ignore_eos say.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings without duplicates, in the order given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def samples(self) -> int:
        """Sequences to run: best_of where it is given, else n."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens that came before: some penalty is not neutral."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(p: SamplingParams, name: str) -> None:
    value, (low, high) = getattr(p, name), NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        bound = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g}"
        raise _bad(name, f"must be {bound}, got {value!r}")


def _check_int(p: SamplingParams, name: str) -> None:
    value, (low, high) = getattr(p, name), INTEGERS[name]
    if name == "best_of":
        low = p.n
    if not _is_int(value) or not low <= value <= high:
        bound = f"in [{low}, {high}]" if high < INT64 - 1 else "of 64 bits" if low == -INT64 else f"of at least {low}"
        raise _bad(name, f"must be an integer {bound}, got {value!r}")


def _check(p: SamplingParams) -> None:
    for name in INTEGERS:
        if getattr(p, name) is not None or name not in _OPTIONAL:
            _check_int(p, name)
    for name in NUMBERS:
        _check_number(p, name)
    if p.repetition_penalty == 0.0:
        raise _bad("repetition_penalty", "must be greater than 0, got 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _bad("min_tokens", f"{p.min_tokens} is more than max_tokens {p.max_tokens}")
    _check_bias(p.logit_bias)
    for name in ("stop", "stop_token_ids"):
        if not isinstance(getattr(p, name), (str, list, tuple, type(None))):
            raise _bad(name, f"must be a list, got {getattr(p, name)!r:.80}")
    stops = [p.stop] if isinstance(p.stop, str) else list(p.stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise _bad("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for text in stops:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_CHARS:
            raise _bad("stop", f"each must be a string of 1 to {MAX_STOP_CHARS} characters, got {text!r:.80}")
    ids = list(p.stop_token_ids or ())
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _bad("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    for token in ids:
        if not _is_int(token) or token < 0:
            raise _bad("stop_token_ids", f"each must be a token id of 0 or more, got {token!r}")


def _check_bias(bias: dict[int, float] | None) -> None:
    for token, value in (bias or {}).items():
        if not _is_int(token) or token < 0:
            raise _bad("logit_bias", f"keys must be token ids of 0 or more, got {token!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise _bad("logit_bias", f"values must be in [-100, 100], got {value!r} for token {token}")


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One admitted prompt, as the engine receives it. Immutable.

    id: ours and unique in the process (the client's own id is only echoed by the server).
    prompt: token ids, each in [0, vocab_size), at least one.
    eos_token_ids: the model's stop set (union of config, generation_config and tokenizer).
    domain: prefix-cache domain, from the authenticated tenant, never from the client.
    priority: lower runs first. deadline: seconds after arrival, None for no deadline.
    weight: the tenant's share of the engine, relative to other tenants with work of the same priority.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    domain: str = ""
    priority: int = 0
    deadline: float | None = None
    weight: float = 1.0

    def tokens(self) -> np.ndarray:
        """The prompt as int32, in half the time that numpy takes to convert a list."""
        return np.frombuffer(bytearray(struct.pack(f"{len(self.prompt)}i", *self.prompt)), np.int32)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client of the engine must know to validate requests; sent once, when it is ready."""

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_tokens: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 0


def _check_ids(prompt: list[int], info: ModelInfo, param: str) -> None:
    ids = np.asarray(prompt)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise RequestError(f"{param} must be a list of integer token ids", param=param, code="invalid_value")
    if ids.min() < 0 or ids.max() >= info.vocab_size:
        wrong = next(int(t) for t in ids if not 0 <= t < info.vocab_size)
        raise RequestError(
            f"{param} has token id {wrong}, outside the vocabulary [0, {info.vocab_size})", param=param, code="invalid_value"
        )


def check_request(prompt: list[int], params: SamplingParams, info: ModelInfo, *, param: str = "prompt") -> SamplingParams:
    """Check a prompt and its parameters against one model's limits; before anything is allocated.

    Returns the parameters with `max_tokens` resolved and `top_k` clamped to the vocabulary.
    Raises RequestError.
    """
    if not prompt:
        raise RequestError(f"{param} is empty: at least one token is needed", param=param, code="invalid_value")
    room = info.max_model_len - len(prompt)
    if room >= 1:  # a list that is too long anyway is not worth looking through
        _check_ids(prompt, info, param)
    for name, tokens in (("stop_token_ids", params.stop_token_ids or ()), ("logit_bias", params.logit_bias or ())):
        for token in tokens:
            if token >= info.vocab_size:
                raise _bad(name, f"token id {token} is outside the vocabulary [0, {info.vocab_size})")
    if room < 1 or (params.max_tokens is not None and params.max_tokens > room):
        asked = (
            f" and {params.max_tokens} were asked for in the completion" if params.max_tokens is not None and room >= 1 else ""
        )
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. The prompt has {len(prompt)} tokens{asked}. "
            + ("Shorten the prompt or lower max_tokens." if asked else "Shorten the prompt."),
            param="max_tokens" if asked else param,
            code="context_length_exceeded",
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.min_tokens > max_tokens:
        raise _bad("min_tokens", f"{params.min_tokens} is more than the {max_tokens} tokens that the context leaves")
    return msgspec.structs.replace(params, max_tokens=max_tokens, top_k=min(max(params.top_k, 0), info.vocab_size))


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of one position: the chosen token's, its rank (1 is best), and the k best
    as parallel lists in falling order. Natural logarithm, of the distribution before temperature."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Event(msgspec.Struct, array_like=True):
    """News of one sample of one request after one step.

    tokens may be empty (a finish or an error without a new token). `finish` is None while it
    runs; `stop_reason` is the token id that stopped it, None for the model's own end-of-sequence.
    `cached_tokens` (prompt tokens taken from the prefix cache), `queue_seconds` (from arrival to its
    first place in a step) and `prompt_logprobs` come with a sample's first event; `error` explains
    finish "error".
    """

    request_id: str
    sample: int
    tokens: list[int]
    finish: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    queue_seconds: float = 0.0


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and running totals of the engine, sent with every step's events.

    Counters only grow. kv_usage is used / all blocks in [0, 1]; cached but unreferenced blocks
    count as free. step_seconds is the last step's wall time. sent: `time.perf_counter` of the engine's process when
    it sent this (0: never sent), which on one machine is every process's clock. swapped_out, swapped_in: sequences that went
    to host memory, and that continued from there. kv_alert: the cache is nearly full (see
    engine.memory); kv_alerts counts how often it became so. pool_growths and pool_shrinks count changes
    of the pool's size, kv_utilization is the share of the device's memory that it was last sized by.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    free_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    total_blocks: int = 0
    cached_blocks: int = 0
    pinned_blocks: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    kv_alert: bool = False
    kv_alerts: int = 0
    pool_growths: int = 0
    pool_shrinks: int = 0
    kv_utilization: float = 0.0
    sent: float = 0.0


class Events(msgspec.Struct, array_like=True):
    """One message back per step: every event of the step, and the engine's state after it."""

    events: list[Event]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters (or re-enters) the state table: everything the runner keeps for its
    slot. `tokens` are all tokens known to the host, prompt first; of the first `computed` the K and V are
    there already, so that no step computes them again. `seed` is the sample's own."""

    slot: int
    tokens: np.ndarray  # int32 [known]
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    rope_tokens: int  # upper bound of the sequence's length: prompt + max_tokens (dynamic RoPE picks its variant by it)
    computed: int = 0


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Block-table entries that changed: table[group][rows[i], cols[i]] = blocks[i]."""

    group: int
    rows: np.ndarray  # int32
    cols: np.ndarray  # int32
    blocks: np.ndarray  # int32


TO_HOST, FROM_HOST, MOVE = -1, -2, -3
"""In place of a KV group in `Batch.copies`: blocks to host slots, host slots to blocks, blocks to blocks,
each with all its pages (in every tensor of the pool, whichever group holds the block)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """An immutable work order for one step. All columns are numpy arrays over the batch's rows.

    The runner applies, in this order: `copies` (copy on write, swap, compaction: whole entry after whole
    entry, in the order given), `admissions`, `tables`; then computes. Row i computes tokens [start[i], start[i] + num_new[i]) of the
    sequence in state-table row slots[i]; its input ids are in the state table already (prompt
    tokens from the admission, sampled ones written there by the step that sampled them, so that
    no token makes a round trip through the host). Where sample[i], the logits after the last
    known token choose the token at position start[i] + num_new[i].

    A forked row (n > 1) computes nothing itself (num_new 0): it samples from the hidden state of
    row source[i]. For every other row source[i] == i.
    """

    step: int
    slots: np.ndarray  # int32 [R]
    start: np.ndarray  # int32 [R]
    num_new: np.ndarray  # int32 [R]
    sample: np.ndarray  # bool [R]
    source: np.ndarray  # int32 [R]
    admissions: tuple[Admission, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    copies: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()  # (group or TO_HOST, FROM_HOST, MOVE; sources; targets)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


@dataclass(slots=True)
class Result:
    """The answer to a Batch, on the host. Row i of the batch got tokens[i, :counts[i]].

    counts is 0 where nothing was sampled. `failed` marks rows that have no token: that request ends with an error, its
    neighbours go on. `reasons` says why by row, where it is not logits that are not finite.
    """

    tokens: np.ndarray  # int32 [R, k]
    counts: np.ndarray  # int32 [R]
    failed: np.ndarray  # bool [R]
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: positions start+1..start+num_new
