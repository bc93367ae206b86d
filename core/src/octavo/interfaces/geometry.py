"""The shape of KV caches: what a model's layers keep, how layers form groups, how a backend lays out a block. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer.

    kind "full" keeps every token; "window" keeps the last `window` tokens (the current one
    included); "latent" one shared head, whose V is the first v_dim of its K and is not stored again, of
    every token or, with a window, of the last; "state" a slot per sequence. k_dim and v_dim are per head.
    tokens_per_entry, of a latent cache: how many tokens one entry stands for.
    """

    kind: Literal["full", "window", "latent", "state"]
    heads: int
    k_dim: int
    v_dim: int
    dtype: str  # torch dtype name: "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    window: int | None = None
    tokens_per_entry: int = 1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one KVSpec that share a block table.

    layers are attention-layer indices (the order of ModelAdapter.kv_specs). page_bytes is the size
    of one block in one layer, as the attention backend lays it out; it is equal in all groups.
    """

    index: int
    spec: KVSpec
    layers: tuple[int, ...]
    block_size: int  # tokens per block
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a backend stores one block of one layer: dtype name, shape of one page (the pool adds the
    leading block axis) and its bytes, padding included. `order` names the axes, for explain."""

    dtype: str
    page_shape: tuple[int, ...]
    page_bytes: int
    order: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds fixed at build: workspaces, buffers and the state table are sized by them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
