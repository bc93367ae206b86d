"""SamplerState: what every running row asks of the sampler, as arrays over state-table rows.

Owns the per-row numbers, filled once at admission. They live on the host: a step decides by them
which work to do at all, without asking the device. Never looks at a logit.
"""

from __future__ import annotations

import numpy as np

from octavo.request import SamplingParams

COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures outside are clamped: float32 logits divided by less would overflow, by more all be equal."""


class SamplerState:
    """Columns over max_rows slots; `vocab` bounds every id that is kept (a stop id or a bias outside it is
    dropped here, so it can never reach another row's logits)."""

    def __init__(self, max_rows: int, vocab: int) -> None:
        self.vocab = vocab
        self.greedy = np.ones(max_rows, bool)
        self.temperature = np.ones(max_rows, np.float64)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.truncated = np.zeros(max_rows, bool)
        self.repetition = np.ones(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.penalised = np.zeros(max_rows, bool)
        self.biased = np.zeros(max_rows, bool)
        self.constrained = np.zeros(max_rows, bool)
        self.edited = np.zeros(max_rows, bool)  # any of the last three: its logits are changed before a token is chosen
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.min_tokens = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int64)  # -1: not asked; k: the sampled token's and the k best
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.stops: dict[int, np.ndarray] = {}  # ids that end the row; only where min_tokens > 0

    def set(self, slot: int, params: SamplingParams, seed: int, eos_ids: tuple[int, ...], num_prompt: int) -> None:
        """Fill `slot` from an admission. seed is the sample's own (any int64); eos_ids is the model's union."""
        self.clear(slot)
        # Keeping one token is taking the largest: exact under ties too.
        self.greedy[slot] = params.temperature == 0.0 or params.top_k == 1 or params.top_p == 0.0 or params.min_p == 1.0
        self.temperature[slot] = min(max(params.temperature, COLDEST), HOTTEST)
        self.top_k[slot] = max(params.top_k, 0) if params.top_k < self.vocab else 0
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.truncated[slot] = self.top_k[slot] > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot], self.frequency[slot] = params.presence_penalty, params.frequency_penalty
        self.penalised[slot] = params.counts_tokens
        self.seed[slot] = np.uint64(seed % (1 << 64))
        self.num_prompt[slot] = num_prompt
        # best_of ranks samples by their mean logprob, so those rows compute it even if nobody sees it.
        self.logprobs[slot] = params.logprobs if params.logprobs is not None else (0 if params.samples > params.n else -1)
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < self.vocab}
        if bias:
            self.bias[slot] = (np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))
            self.biased[slot] = True
        self.constrained[slot] = params.grammar is not None
        self.edited[slot] = self.penalised[slot] or self.biased[slot] or self.constrained[slot]
        if params.grammar is not None:
            return  # its own states see to min_tokens, which a grammar may have to end before
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_ids))
        ids = np.array(sorted(token for token in ends if 0 <= token < self.vocab), np.int64)
        if params.min_tokens > 0 and len(ids):
            self.min_tokens[slot] = params.min_tokens
            self.stops[slot] = ids

    def clear(self, slot: int) -> None:
        """Back to a greedy row that asks for nothing."""
        self.greedy[slot] = True
        self.truncated[slot] = self.penalised[slot] = self.biased[slot] = self.constrained[slot] = self.edited[slot] = False
        self.min_tokens[slot], self.logprobs[slot] = 0, -1
        self.bias.pop(slot, None)
        self.stops.pop(slot, None)
