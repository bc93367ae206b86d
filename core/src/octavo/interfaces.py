"""The Protocols of the plug points, and the values that cross them.

This module is the contract that plugins are written against (`octavo.catalog.CONTRACT` is its
version). It holds no behaviour. torch appears in annotations only, so that the scheduler, the
allocator and the server process can import it without torch.

Vocabulary. A *row* or *slot* is a line of the state table: a running sequence keeps its slot from
admission to release, and allocator, block tables and runner all index by it. A *group* is a set
of layers whose KV cache has one shape and one block table. A *block* (page) is one pool index,
the same in every layer of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from octavo.catalog import Device
from octavo.request import Batch, EngineStats, Event, Request, Result, TableUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.cache.tier import Parcel
    from octavo.model.export import CheckpointWriter
    from octavo.model.rope import RopeConfig
    from octavo.model.source import ModelSource


# ---------------------------------------------------------------- KV cache geometry


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer.

    kind "full" keeps every token; "window" keeps the last `window` tokens (the current one
    included); "latent" one shared head, whose V is the first v_dim of its K and is not stored again;
    "state" a slot per sequence. k_dim and v_dim are per head.
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


# ---------------------------------------------------------------- allocator and scheduler


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks of the pool: total = free + cached + used + pinned. free holds nothing; cached holds a prefix
    that nobody references (evictable); used is referenced by at least one row; pinned by pins alone."""

    total: int
    free: int
    cached: int
    used: int
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class AllocatorParts:
    """What an allocator is built from. num_blocks is the pool's size; max_rows the state table's.

    max_step_tokens: most tokens that one step adds to one row (max_num_batched_tokens); `fits` needs
    it to bound what a window group holds. 0: unknown, a step may be as long as the sequence. host_slots:
    places in host memory, each for one block (0: none, `swap_out` then gives None). max_blocks: the
    most that `resize` may be asked for (0: num_blocks)."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    max_rows: int
    max_model_len: int
    prefix_caching: bool = True
    max_step_tokens: int = 0
    host_slots: int = 0
    max_blocks: int = 0


class Allocator(Protocol):
    """Block bookkeeping: ids only, no tensors. Calls take rows (int32 arrays over slots).

    Invariant after every call: each block is in exactly one of free / cached / used, and the
    reference count of a block equals the number of table entries that name it.
    """

    def admit(
        self, row: int, tokens: np.ndarray, domain: str, salt: str = "", *, reuse: bool = True, parcel: Parcel | None = None,
        rank: int = 0,
    ) -> int:  # fmt: skip
        """Give `row` to a sequence whose host-known tokens are `tokens` (int32), attach the longest
        cached prefix (full, computed, verified blocks; never the last token) and return its length
        in tokens. `domain` is searched first, then "public". `salt` (RoPE variant, adapter) is part
        of every key. Without `reuse` nothing is looked up (a request that wants prompt logprobs must
        compute its whole prompt). The row must be empty.

        parcel: what `swap_out` gave for the same sequence. If it reaches further than the hit and there is
        room, its content comes back and the answer is its `computed`. It stays valid until `discard`.
        rank: what the row's prefixes are worth when blocks are evicted: 0 normal, 1 more, 2 less."""

    def extend(self, row: int, tokens: np.ndarray) -> None:
        """Append tokens that became known (sampled ones), so that blocks they fill can be published."""

    def reserve(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> bool:
        """Make positions [start, upto) of every row writable: all or nothing. A shared block that
        would be written is replaced by a copy (see `drain`). False, with nothing changed, if the
        pool cannot give enough even after evicting cached blocks."""

    def commit(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """The step that computes each row up to `computed` tokens has been submitted: publish the
        blocks it fills (later steps may hit them) and take back reserved blocks beyond it."""

    def withdraw(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """The step failed: unpublish blocks of these rows that hold tokens at or past `computed`."""

    def trim(self, rows: np.ndarray, position: np.ndarray) -> None:
        """In window groups, give back blocks that no query at or after `position` can see."""

    def fork(self, parent: int, child: int) -> None:
        """The empty row `child` shares all of `parent`'s blocks and tokens."""

    def release(self, rows: np.ndarray) -> None:
        """Empty these rows; blocks without references become cached or free, at once reusable by
        later work of the same stream. Releasing an empty row does nothing."""

    def swap_out(self, row: int) -> Parcel | None:
        """Release the row as `release` does, and keep what it computed in host memory. None, with nothing
        changed, where host memory has no room: the caller then releases the row and computes again."""

    def discard(self, parcel: Parcel) -> None:
        """Nobody will continue from this parcel (any more). Discarding twice does nothing."""

    def blocks(self, tokens: int) -> int:
        """Blocks that one sequence of that length holds at most, all groups together, nothing shared."""

    def fits(self, tokens: int) -> bool:
        """Whether the pool, if nothing but pins were in it, could hold one sequence of that length."""

    def drain(self) -> tuple[tuple[TableUpdate, ...], tuple[tuple[int, np.ndarray, np.ndarray], ...]]:
        """Table changes and copies since the last call: (KV group, sources, targets) for copy on write, and
        octavo.request's TO_HOST, FROM_HOST or MOVE in place of the group."""

    def table(self, group: int) -> np.ndarray:
        """int32 [max_rows, columns]: the block table; entries that hold no block are -1."""

    def usage(self) -> Usage: ...

    def reset(self) -> None:
        """Forget every cached prefix, every pin and every parcel, in host memory as well. Rows keep their
        blocks, which will not be hit any more; a parcel that is lost counts as none."""

    def evict(self) -> int:
        """Make every cached block free (host memory keeps what it can); how many there were."""

    def pin(self, tokens: np.ndarray, domain: str, salt: str = "", *, leave: int = 0) -> int:
        """Keep the longest cached prefix of these tokens in the pool until `unpin` or `reset`. Returns its
        length; 0, with nothing pinned, if there is none, or if fewer than `leave` blocks would stay unpinned."""

    def unpin(self, tokens: np.ndarray, domain: str, salt: str = "") -> int:
        """Undo `pin`. Returns the length that was pinned, 0 if it was not."""

    def resize(self, num_blocks: int) -> int:
        """Use blocks [0, num_blocks) from now on. Growing: their memory is there. Shrinking: held blocks are
        moved off the tail (see `drain`), whose memory may be taken once those copies are done. Returns
        the number in use then, which is larger than asked for where rows and pins hold more."""

    def memory(self) -> dict[str, Any]:
        """Plain numbers of cache, pins and host memory, for people."""

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests and the idle loop."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What a scheduler is built from. hard_blocks: refuse (429) what does not fit now, do not queue.
    clock returns seconds (monotonic); seeds returns a fresh 63-bit seed for an unseeded request; salt
    maps a sequence's length bound to the part of its prefix-cache key that depends on it (the
    variant of a dynamic RoPE). swap_pays(tokens, blocks): whether a preempted sequence that has computed so
    many tokens in so many blocks is better swapped to host memory than recomputed."""

    allocator: Allocator
    limits: Limits
    policy: Literal["fcfs", "priority"]
    max_queued: int  # 0: no bound
    chunked_prefill: bool
    hard_blocks: bool
    clock: Callable[[], float]
    seeds: Callable[[], int]
    salt: Callable[[int], str]
    swap_pays: Callable[[int, int], bool] = lambda tokens, blocks: False


class Scheduler(Protocol):
    """Who runs next. Never sees a tensor. Single-threaded: called by the engine's loop only."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionRefused, leaving nothing behind."""

    def abort(self, request_id: str, sample: int | None = None) -> None:
        """End a request, or one of its samples, in any state; unknown ids are ignored. Its events stop at once."""

    def schedule(self) -> Batch | None:
        """The next work order, or None if nothing can run now."""

    def commit(self, batch: Batch, result: Result) -> list[Event]:
        """Take the result of a batch, in the order of submission; results of finished, aborted or
        preempted-and-stale rows are dropped."""

    def fail(self, batch: Batch, message: str) -> list[Event]:
        """The batch will have no result: end its requests with an error, withdraw its blocks."""

    def events(self) -> list[Event]:
        """Drain events that no result produced (a deadline that passed, a queued request that failed)."""

    def stats(self) -> EngineStats: ...

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""


# ---------------------------------------------------------------- the step, on the device


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


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer, as the model declares it: index into kv_specs order, and its numbers.

    scale multiplies q.k; softcap 0 is off; window None sees everything; sinks is a per-head
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


class FusedPrologue(Protocol):
    """What an AttentionBackend may also offer, since the layout that keys are stored in is its own."""

    def prologue(
        self, layer: int, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """In one kernel what the operator "qk_norm_rope" and `write` do in two: qkv [T, heads + 2 kv_heads, D],
        dense, holds q, k and v heads; weight [heads + kv_heads, D] normalises q and k heads (None: it does not); cos and sin
        are the operator's. Stores K and V at the step's slots; returns q [T, heads, D], which may be a view of qkv."""


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
        `write` gets the entries of the tokens at positions p with (p + 1) % m == 0, positions are numbers of entries, and
        a token at p sees the first (p + 1) // m; one that sees none gets zeros and an lse of -inf."""

    def gather(self, layer: int, row: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """As AttentionBackend.gather, of tokens (or entries) [start, length)."""


# ---------------------------------------------------------------- weights, operators, models


class Weights(Protocol):
    """Where layers declare the checkpoint tensors they want; nothing is allocated by declaring."""

    def declare(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        fill: Callable[[Tensor], None],
        *,
        optional: bool = False,
        dtypes: tuple[str, ...] = (),
    ) -> None:
        """The checkpoint tensor `name` of `shape` (None: any) goes to `fill`, exactly once. A missing tensor
        that is not optional, a wrong shape, an undeclared tensor: LoadError, before `fill` runs."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A quantised Linear input: value = data * scale. What an operator of a format other than "plain" returns in the
    place of a tensor, and a Linear of that format takes. (It may return a plain tensor where quantising so few rows would
    cost more than it saves: a Linear takes both.)

    data: [T, in], such as float8_e4m3fn, each row dense. scale: float32 [T, 1] (a scale a token) or [T, ceil(in / g)]
    (one for every g neighbouring channels of a token); the format's name says which, and its quantizer documents it.
    """

    data: Tensor
    scale: Tensor


class Linear(Protocol):
    """y = x W^T + b, in whatever format the quantizer keeps. `activation` names the input format
    it likes best ("plain" is a tensor of the model's dtype, others are an `Activation`): whoever makes its input
    resolves ("add_rms_norm", activation) and the like, so that the quantisation is fused. It takes plain input
    too. `finish` runs once after every part is filled."""

    activation: str
    out_features: int

    def __call__(self, x: Any) -> Tensor:
        """x [T, in_features], a Tensor or an Activation of the format `activation` -> [T, out_features] (the parts
        side by side)."""

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Gate:
    """How the two halves of a gated MLP become one: with g = min(gate, limit) and u = clamp(up, -limit, limit),
    g * sigmoid(alpha * g) * (u + offset). The defaults are SwiGLU (silu(gate) * up); gpt-oss has 1.702, 7 and 1."""

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits choose experts, and how much each counts.

    score makes s of the logits: "softmax" over all experts, "sigmoid", "sqrtsoftplus" (the root of softplus), or
    "softmax_chosen" (the logits choose, and the softmax is over those chosen). The choice is by s plus the layer's
    correction bias, if it has one: the top_k highest, among the `kept_groups` best of `groups` equal, consecutive
    groups of experts, ranked by group_score, the "max" of a group or the "sum2" of its two highest. An expert counts
    s without the bias, divided by the sum over those chosen where `renormalise`, times `scale`.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_chosen"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "sum2"] = "max"
    renormalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of one layer: `count` gated MLPs, hidden -> inner -> hidden, of which a token takes top_k.

    names are the checkpoint's (gate, up, down). A checkpoint has either each expert's matrices, as
    `prefix.E.gate_proj.weight` [inner, hidden] and so on, or, where `stacked`, gpt-oss's form: `prefix.gate_up_proj`
    [count, hidden, 2 * inner], gate and up columns alternating, and `prefix.down_proj` [count, inner, hidden], with
    `bias` also `prefix.gate_up_proj_bias` [count, 2 * inner] and `prefix.down_proj_bias` [count, hidden]."""

    count: int
    hidden: int
    inner: int
    top_k: int
    gate: Gate = Gate()
    bias: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False


class Experts(Protocol):
    """The routed experts of one layer, in whatever format the quantizer keeps. The input is in the model's dtype,
    because the router reads it too. `finish` runs once after every part is filled."""

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """Of x [T, hidden]: the sum over a token's experts ids int32 [T, top_k], each times its weight in weights
        float32 [T, top_k], plus base [T, hidden] (shared experts) if given: [T, hidden] in the model's dtype.
        Must not wait for the device: it runs inside captured graphs."""

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QuantizerParts:
    """Constructor parts of a quantizer. config is the checkpoint's quantization_config ({} if none). find
    gives an operator that nobody has to offer, such as "small_linear", or None."""

    device: Device
    dtype: str
    config: Mapping[str, Any]
    weights: Weights
    find: Callable[[str], Callable[..., Any] | None] = lambda name: None


class Quantizer(Protocol):
    """A weight format. Called as cls(options, QuantizerParts). Needs.facts for `accepts`: method
    (the name in quantization_config or the flag; "" for none), config, architecture, dummy (random
    weights, of which there is no config). One that dequantises says in
    Accept.preferences["stored_values"] how many values of the model's dtype an element of a quantised tensor becomes, by the end
    of the tensor's name; one that quantises plain weights as they load, in ["linear_bytes"] how many bytes a weight of a Linear
    then has: the pool is sized by both. ["kv_cache_dtype"] is the KV dtype that the checkpoint has scales for, taken by
    `--kv-cache-dtype auto`."""

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        """A Linear made of parts (checkpoint module name, output features) side by side: for fused
        QKV {"q_proj": 576, ...} under prefix "model.layers.0.self_attn". It declares its weights.
        A head gives float32 logits, not rounded to the model's dtype on the way."""

    def tied(self, embedding: Callable[[], Tensor], out_features: int) -> Linear:
        """A head, as above, whose weight is the (already filled) input embedding [vocab, hidden]."""

    def experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        """The routed experts under prefix "model.layers.0.mlp.experts". It declares their weights. A format
        without this method serves dense models only; a mixture of experts is then refused by name."""


@dataclass(frozen=True, slots=True)
class QuantizeTask:
    """What `octavo quantize` hands to a provider's `Provider.quantize`.

    source: the model to quantise, unquantised (a folder or a GGUF file). adapter: its architecture. device and
    dtype: where, and in which torch dtype, the model runs while it is calibrated. calibration: a text, None where
    none was given. writer: takes every tensor of the new checkpoint (`writer.add(name, tensor)`); closing it,
    config.json and the tokenizer are the command's work. tell(stage, done, total) shows progress.
    `octavo.model.observe` runs the model over the text, `octavo.model.export.read_tensors` yields its tensors."""

    source: ModelSource
    adapter: ModelAdapter
    device: Device
    dtype: str
    calibration: str | None
    writer: CheckpointWriter
    tell: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What comes back: the `quantization_config` of the new config.json, and facts for the user by name."""

    config: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)


class Quantize(Protocol):
    """The function that `Provider.quantize` names. Raises QuantizeError or ConfigError for what it cannot do,
    before it adds a tensor where that can be known."""

    def __call__(self, options: Any, task: QuantizeTask) -> Quantized: ...


class Operators(Protocol):
    """A set of fused operators. Called as cls(options, OperatorParts); `ops` maps (name, format)
    to a callable. Each (name, format) is served by the highest-priority provider that has it;
    signatures are those of core's torch operators in `octavo.model.operators`, the oracle."""

    ops: Mapping[tuple[str, str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class OperatorParts:
    device: Device
    dtype: str


class Attention(Protocol):
    """A model's attention layer, bound to a backend (octavo.attention.layer.PagedAttention)."""

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim], attend with q [T, heads, k_dim]: [T, heads, v_dim]."""

    def turned(self, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """The same of a packed qkv [T, heads + 2 kv_heads, D] that is still to be normalised and turned, as the
        operator "qk_norm_rope" does it; may overwrite qkv."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is built from. `attention` registers a layer and returns what writes its cache and attends;
    `op` resolves a fused operator."""

    device: Device
    dtype: str
    limits: Limits
    weights: Weights
    linear: Callable[..., Linear]
    tied: Callable[..., Linear]
    attention: Callable[[AttentionLayer], Attention]
    op: Callable[..., Callable[..., Any]]
    experts: Callable[[str, ExpertsSpec], Experts]


class Model(Protocol):
    """A built model. Stateless between steps: the cache belongs to the pool. An attribute `capturable` that is False keeps
    its steps out of CUDA graphs."""

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, hidden] after the final norm. A model with an attribute `selects` that is True
        returns those of step.wanted alone, [S, hidden] in that order, where that is not None."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, hidden]."""

    def finish(self) -> None:
        """Called once, after every weight is filled."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine reads off a model config: geometry for pool, limits and attention. ropes are every RoPE of the
    model once: where one depends on a sequence's length, its variant is part of the prefix-cache key. mlp_weights: the
    weights of all MLPs and experts; mlp_values: the values that a token's MLP or experts hold at most during a step; 0: those of
    one dense gated MLP a layer, of the config's intermediate_size. attention_weights: the weights of all attention blocks;
    0: those of layers' heads projected from the hidden state and back."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int  # the longest context the checkpoint claims
    layers: tuple[AttentionLayer, ...]
    kv_specs: tuple[KVSpec, ...]  # one per attention layer
    tied_head: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    mlp_weights: int = 0
    mlp_values: int = 0
    attention_weights: int = 0


class ModelAdapter(Protocol):
    """Architectures. Called as cls(options, None). Needs.facts for `accepts`: architecture, config."""

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Read config.json (a dict). Raises LoadError naming the key that is wrong or unknown."""

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model: ...

    def ignored(self, name: str) -> bool:
        """Checkpoint tensors that are known and unused (such as rotary_emb.inv_freq)."""

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Preferences with reasons, such as {"block_size": 16}; may be empty."""


class CanonicalNames(Protocol):
    """What a ModelAdapter may also offer, where checkpoints of one architecture go by several names."""

    def canonical(self, name: str) -> str:
        """The name that the model declares for the checkpoint tensor `name`; the name itself for any other."""


# ---------------------------------------------------------------- executor


class Handle(Protocol):
    """A submitted step."""

    def done(self) -> bool: ...

    def wait(self) -> Result:
        """Block until the result is on the host. Raises what the step raised."""


class Executor(Protocol):
    """Where the model runs. `depth`: steps that may be in flight besides the one being waited for
    (0 where the device is synchronous, 1 for one GPU, plus pipeline stages - 1)."""

    depth: int

    def submit(self, batch: Batch) -> Handle:
        """Submit in order; results come in the same order."""

    def resize(
        self,
        num_blocks: int,
        tables: Sequence[TableUpdate],
        copies: Sequence[tuple[int, np.ndarray, np.ndarray]],
    ) -> None:
        """Change the pool's size, between steps: after the copies and table changes (as in a Batch) and, where it
        shrinks, after all that was submitted. MemoryError, with nothing changed, where memory for a growth
        is missing. Called only where the configuration asks for a pool that changes its size."""

    def close(self) -> None: ...


class Runner(Protocol):
    """One device's part of an executor: state table, buffers, model, sampler."""

    def submit(self, batch: Batch) -> Handle: ...

    def resize(
        self,
        num_blocks: int,
        tables: Sequence[TableUpdate],
        copies: Sequence[tuple[int, np.ndarray, np.ndarray]],
    ) -> None: ...
