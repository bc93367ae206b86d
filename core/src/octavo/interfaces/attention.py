"""Paged attention backends, and what they may offer beyond the least. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.catalog import Device
from octavo.interfaces.geometry import CacheLayout, KVGroup, KVSpec, Limits
from octavo.interfaces.step import Step, StepHost

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer, as the model declares it: index into kv_specs order, and its numbers.

    num_heads 0, of a latent layer: its cache is written, gathered and compressed, never attended to. scale multiplies q.k; softcap 0 is off; window None sees everything; sinks is a per-head
    learned logit [num_heads] that joins the softmax and is dropped (None: no sinks; has_sinks says it of a layer
    that is only planned, before there are tensors). k_scale and v_scale multiply what
    a float8 cache holds; the build takes them from the checkpoint, where they stand under `module`, such as
    "model.layers.0.self_attn" ("": this layer has none). expands, of a latent layer: rows with at least so many new
    tokens in a step are left to the model, which expands their keys and values from what `gather` gives; `run` leaves
    their part of `out` as it is. 0: none are."""

    index: int
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    module: str = ""
    has_sinks: bool = False
    expands: int = 0

    def kv_spec(self, dtype: str) -> KVSpec:
        """The cache of keys and values of every token, or of a window of them, that such a layer keeps in `dtype`."""
        kind: Literal["full", "window"] = "full" if self.window is None else "window"
        return KVSpec(kind, self.num_kv_heads, self.k_dim, self.v_dim, dtype, self.window)


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """A KV group with its memory: caches[i] is the pool tensor of group.layers[i], shaped
    [num_blocks, *layout.page_shape]. The pool owns it; the backend may keep views."""

    group: KVGroup
    layout: CacheLayout
    layers: tuple[AttentionLayer, ...]
    caches: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Constructor parts of a backend: where it runs and in which dtype queries come."""

    device: Device
    dtype: str


class AttentionBackend(Protocol):
    """Paged attention. Called as cls(options, AttentionParts). Order of calls: layout, bind, then
    per step prepare, plan, and per layer write (or prologue) and run.

    Needs.facts for `accepts`: layers (tuple of AttentionLayer without tensors), kv_dtype,
    block_size (int or None: then Accept.preferences["block_sizes"] decides, best first).

    graphs "decode": steps of one new token a row may be captured. Rows of such a step may be tokens of one sequence, in any
    order (the short end of a prompt is run so): each sees what lies up to its own position, written in this step or before.
    """

    graphs: Literal["none", "decode", "all"]

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout: ...

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        """Take the caches, allocate workspaces. Called once, before any step."""

    def prepare(self, step: Step) -> None:
        """Host work before a step (or a graph replay); may be empty."""

    def plan(self, step: Step) -> None:
        """Device work once a step, inside the graph; all layers reuse it."""

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim], v [T, kv_heads, v_dim] at the step's slots. In a latent group v is
        k[..., :v_dim], and need not be read."""

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None) -> Tensor:
        """Causal attention of q [T, heads, k_dim] over the cache; fills and returns out
        [T, heads, v_dim]. lse, if given, gets the log-sum-exp, float32 [T, heads]."""

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of a state-table row: [length, kv_heads, dim]
        (tokens out of a window are unspecified). For tests and expanded prefill; may be slow."""

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks (int64 ids) in every layer of a group, before the step's writes."""


class StepVariants(Protocol):
    """What an AttentionBackend may also offer: other kernels for a decode step that looks otherwise on the host, such as one whose
    rows share a long prefix."""

    def variant(self, host: StepHost) -> str:
        """Which of the backend's kinds of decode step this is; a graph is captured for each, and `prepare` gets steps
        of the same kind before each replay."""


class PlannedWorkspace(Protocol):
    """What an AttentionBackend may also offer, so that the memory plan leaves room for what `bind` takes besides small lists."""

    def workspace_bytes(self, groups: Sequence[KVGroup], layers: Sequence[AttentionLayer], limits: Limits) -> int:
        """Bytes that `bind` will allocate. layers: by their index, without tensors."""


class FusedPrologue(Protocol):
    """What an AttentionBackend may also offer, since the layout that keys are stored in is its own."""

    def prologue(
        self, layer: int, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """In one kernel what the operator "qk_norm_rope" and `write` do in two: qkv [T, heads + 2 kv_heads, D],
        dense, holds q, k and v heads; weight [heads + kv_heads, D] normalises q and k heads (None: it does not); cos and sin
        are the operator's. Stores K and V at the step's slots; returns q [T, heads, D], which may be a view of qkv."""


class SpreadingPrologue(Protocol):
    """What an AttentionBackend with a prologue may also offer, for caches whose rounding wants keys spread over the channels of
    a head (`octavo.model.spread`). Where it does not, the operator "qk_norm_rope_spread" and `write` are used there."""

    def prologue_spreads(self, layer: AttentionLayer) -> bool:
        """Whether `prologue` takes spread=True for such a layer. Asked before `bind`; layer has no tensors."""

    def prologue(
        self,
        layer: int,
        step: Step,
        qkv: Tensor,
        weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        *,
        spread: bool = False,
    ) -> Tensor:
        """As FusedPrologue.prologue. spread: of what the operator "qk_norm_rope_spread" gives, so q and k heads are rounded to the
        model's dtype as RoPE leaves them, multiplied by the matrix with float32 sums, and rounded once more. v is not."""


class SparseBackend(Protocol):
    """What an AttentionBackend may also offer: latent layers that attend to chosen keys, and index layers that choose
    them. An index layer has a latent cache of its own, of KVSpec.v_dim = k_dim, and is never run; a backend without these
    methods rejects models that have one."""

    def choose(self, layer: int, step: Step, q: Tensor, weights: Tensor, count: int) -> Tensor:
        """For every token, the positions of the `count` keys, among those up to its own, with the highest sum over heads
        of weights[t, h] * relu(scale * q[t, h] . k): int32 [T, count], -1 where it sees fewer. q [T, heads, k_dim],
        weights float32 [T, heads]; scores are float32. Keys must have been written."""

    def run(
        self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None, select: Tensor | None = None
    ) -> Tensor:
        """As AttentionBackend.run; select int32 [T, count] holds the positions that each token attends to, none past its
        own, -1 where there are fewer.

        Where a latent group keeps one entry for m tokens (KVSpec.tokens_per_entry; the block size is a multiple of it),
        `write` gets one for every token and stores those of the tokens at positions p with (p + 1) % m == 0, positions are
        numbers of entries, and a token at p sees the first (p + 1) // m; one that sees none gets zeros and an lse of -inf."""

    def compress(self, layer: int, step: Step, places: Tensor, *, overlapping: bool) -> Tensor:
        """Entries made of windows of m tokens, from a cache of K = [values, gates], each V = [values] wide: for every token at
        position p with (p + 1) % m == 0 the sum over its window of values * softmax(gates + places), channel by channel in
        float32; for all others anything. places float32 [m, width]; float32 [T, width].

        overlapping: values are twice as wide as an entry, float32 [T, width / 2]. Its window is 2 m tokens, of which the first m
        (absent where the sequence begins) give the first half of their channels and the last m the second; the softmax is over
        all of them."""

    def gather(self, layer: int, row: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As AttentionBackend.gather, of tokens (or entries) [start, length)."""
