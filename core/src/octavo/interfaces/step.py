"""One step as kernels see it. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Step:
    """One step as kernels see it. Tensors are on the device; views of buffers allocated at build.

    T tokens in one flat row, grouped by R attention rows (rows with at least one new token).
    `host` has the same lengths as numpy arrays for backends that plan on the host (CPU); a kernel
    inside a captured graph must use the tensors only.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    query_start: Tensor  # int32 [R + 1], offsets into T
    seq_lens: Tensor  # int32 [R], tokens in the cache after this step's write
    rows: Tensor  # int64 [R], state-table row of each attention row
    tables: tuple[Tensor, ...]  # per group: int32 [max_rows, columns]
    slot_mapping: tuple[Tensor, ...]  # per group: int64 [T], block * block_size + offset
    token_rows: Tensor  # int64 [T], state-table row of each token
    logit_index: Tensor  # int64 [S], index into T of the hidden state that each sampled row uses
    host: StepHost
    rope_tokens: Tensor | None = None  # int64 [T], the sequence's length bound (dynamic RoPE), None where unused
    wanted: Tensor | None = None  # int64 [S], the tokens whose hidden states are used at all; None: every one
    scratch: dict[str, Any] = field(default_factory=dict)  # per-step values shared by layers (cos/sin, masks, plans)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Attention rows (int64 indices into the step's rows) whose first `tokens` tokens lie in the same blocks of
    KV group `group`."""

    rows: np.ndarray
    tokens: int
    group: int


@dataclass(slots=True)
class StepHost:
    """Host-side lengths of a Step. query_lens, seq_lens, rows: int64 [R]. shared: of a decode step, rows that begin
    with the same blocks; looked for where the backend has `variant`."""

    query_lens: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    shared: tuple[SharedPrefix, ...] = ()
