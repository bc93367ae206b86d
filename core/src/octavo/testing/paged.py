"""A paged KV cache with rows in it, for tests of attention backends, and the oracle to compare with.

Owns the hand-made Step, the poisoned cache and a float64 attention written from the definition. Must
share no code with any backend: two copies of one mistake agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.catalog import Device
from octavo.interfaces import AttentionBackend, AttentionLayer, BoundGroup, KVGroup, KVSpec, Limits, SharedPrefix, Step, StepHost

GUARD = 4096
"""Elements on either side of every cache that no kernel may touch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention layer over one cache geometry. heads is (q heads, kv heads). latent: one kv head, whose V is the
    first v_dim of its K. every: tokens of an entry of a latent cache, which is the last one's."""

    heads: tuple[int, int] = (4, 2)
    k_dim: int = 64
    v_dim: int | None = None  # None: k_dim
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: dtype
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    latent: bool = False
    every: int = 1

    def layer(self, index: int = 0, sinks: Tensor | None = None) -> AttentionLayer:
        return AttentionLayer(
            index=index,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            k_dim=self.k_dim,
            v_dim=self.v_dim or self.k_dim,
            scale=self.k_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def spec(self) -> KVSpec:
        return KVSpec(
            kind="latent" if self.latent else "window" if self.window else "full",
            heads=self.heads[1],
            k_dim=self.k_dim,
            v_dim=self.v_dim or self.k_dim,
            dtype=self.kv_dtype or self.dtype,
            window=self.window,
            tokens_per_entry=self.every,
        )


@dataclass(slots=True)
class Row:
    """A sequence: its line of the state table, and the q, k, v that its tokens will have, per layer."""

    slot: int
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    length: int


@dataclass(slots=True)
class Answer:
    """Attention of one row's new tokens: out [n, heads, v_dim], lse float32 [n, heads] (None: not asked for)."""

    out: Tensor
    lse: Tensor | None


@dataclass(slots=True)
class Scene:
    """A backend bound to one group, whose cache is NaN wherever no row has written, in random page order.

    lengths: tokens of each row. The rows' values depend on the seed only, not on pages, so that two
    scenes that differ in geometry hold the same sequences.
    """

    backend: AttentionBackend
    shape: Shape
    device: Device
    lengths: Sequence[int]
    layers: int = 1
    seed: int = 0
    page_seed: int = 0
    spare_blocks: int = 3
    rows: list[Row] = field(init=False)
    table: Tensor = field(init=False)
    caches: list[Tensor] = field(init=False)
    _storage: list[Tensor] = field(init=False)
    _held: set[int] = field(init=False)
    sinks: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        shape, where = self.shape, self.torch_device
        size = shape.block_size
        counts = [-(-n // size) for n in self.lengths]
        blocks = sum(counts) + self.spare_blocks
        max_rows = 2 * len(self.lengths) + 1
        pages = np.random.default_rng(self.page_seed)
        order, slots = pages.permutation(blocks), pages.permutation(max_rows)
        table = np.full((max_rows, max(counts) + 2), -1, np.int32)
        at = 0
        for slot, count in zip(slots, counts, strict=False):
            table[slot, :count] = order[at : at + count]
            at += count
        self._held = {int(block) for block in order[:at]}
        self.table = torch.from_numpy(table).to(where)
        random = torch.Generator().manual_seed(self.seed)
        sinks = [torch.randn(shape.heads[0], generator=random).to(where) if shape.sinks else None for _ in range(self.layers)]
        self.rows = [self._row(int(slot), n, random) for slot, n in zip(slots, self.lengths, strict=False)]
        self._bind(blocks, max_rows, [shape.layer(i, s) for i, s in enumerate(sinks)])

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.type, self.device.index) if self.device.type != "cpu" else torch.device("cpu")

    def _row(self, slot: int, length: int, random: torch.Generator) -> Row:
        shape = self.shape

        def draw(heads: int, dim: int) -> list[Tensor]:
            values = torch.randn(self.layers, length, heads, dim, generator=random)
            return list(values.to(self.torch_device, getattr(torch, shape.dtype)))

        v_dim = shape.v_dim or shape.k_dim
        q, k = draw(shape.heads[0], shape.k_dim), draw(shape.heads[1], shape.k_dim)
        v = [x[..., :v_dim] for x in k] if shape.latent else draw(shape.heads[1], v_dim)
        return Row(slot, q, k, v, length)

    def _bind(self, blocks: int, max_rows: int, layers: list[AttentionLayer]) -> None:
        spec, size = self.shape.spec(), self.shape.block_size
        layout = self.backend.layout(spec, size)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        page = math.prod(layout.page_shape)
        assert page * dtype.itemsize == layout.page_bytes, (
            f"layout says {layout.page_bytes} bytes, its shape {layout.page_shape} of {layout.dtype} has {page * dtype.itemsize}"
        )
        self._storage = [_poison(2 * GUARD + blocks * page, dtype, self.torch_device) for _ in layers]
        self.caches = [s[GUARD : GUARD + blocks * page].view(blocks, *layout.page_shape) for s in self._storage]
        group = KVGroup(0, spec, tuple(range(len(layers))), size, layout.page_bytes)
        limits = Limits(max_num_seqs=max_rows, max_num_batched_tokens=8192, max_model_len=self.table.shape[1] * size)
        self.backend.bind([BoundGroup(group, layout, tuple(layers), tuple(self.caches))], limits)
        self.sinks = [layer.sinks for layer in layers]

    # ------------------------------------------------------------ steps

    def share(self, indices: Sequence[int], tokens: int) -> None:
        """Give these rows the first one's blocks for their first `tokens` tokens (whole blocks), values included."""
        first = self.rows[indices[0]]
        for i in indices[1:]:
            row, blocks = self.rows[i], tokens // self.shape.block_size
            self.table[row.slot, :blocks] = self.table[first.slot, :blocks]
            for mine, theirs in zip((*row.k, *row.v), (*first.k, *first.v), strict=True):
                mine[:tokens] = theirs[:tokens]

    def step(self, work: Sequence[tuple[int, int, int]], shared: tuple[SharedPrefix, ...] = ()) -> Step:
        """A step that computes, for each (row index, start, count), tokens [start, start + count)."""
        where, size = self.torch_device, self.shape.block_size
        slots = np.array([self.rows[i].slot for i, _, _ in work], np.int64)
        starts = np.array([start for _, start, _ in work], np.int64)
        counts = np.array([count for _, _, count in work], np.int64)
        positions = torch.from_numpy(np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])).to(where)
        token_rows = torch.from_numpy(np.repeat(slots, counts)).to(where)
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).to(where)
        total = int(counts.sum())
        return Step(
            token_ids=torch.zeros(total, dtype=torch.int64, device=where),
            positions=positions,
            query_start=ends.int(),
            seq_lens=torch.from_numpy(starts + counts).int().to(where),
            rows=torch.from_numpy(slots).to(where),
            tables=(self.table,),
            slot_mapping=(self.table[token_rows, positions // size].long() * size + positions % size,),
            token_rows=token_rows,
            logit_index=ends[1:] - 1,
            host=StepHost(counts, starts + counts, slots, total, int(counts.max()), int((starts + counts).max()), shared),
        )

    def run(
        self,
        work: Sequence[tuple[int, int, int]],
        *,
        layer: int = 0,
        lse: bool = False,
        attend: bool = True,
        shared: tuple[SharedPrefix, ...] = (),
    ) -> list[Answer]:
        """Write the work's keys and values, attend (unless told not to), and split the result by row."""
        step, shape = self.step(work, shared), self.shape

        def columns(name: str) -> Tensor:
            return torch.cat([getattr(self.rows[i], name)[layer][start : start + count] for i, start, count in work])

        with torch.inference_mode():
            self.backend.prepare(step)
            self.backend.plan(step)
            self.backend.write(layer, step, columns("k"), columns("v"))
            if not attend:
                return []
            q = columns("q")
            # Whatever was in `out` and `lse` before must not matter either.
            out = torch.full((len(q), shape.heads[0], shape.v_dim or shape.k_dim), math.nan, dtype=q.dtype, device=q.device)
            sums = torch.full((len(q), shape.heads[0]), math.nan, device=q.device) if lse else None
            found = self.backend.run(layer, step, q, out, lse=sums)
        counts = [count for _, _, count in work]
        parts = torch.split(found, counts)
        if sums is None:
            return [Answer(part, None) for part in parts]
        return [Answer(part, one) for part, one in zip(parts, torch.split(sums, counts), strict=True)]

    def fill(self, lengths: Sequence[int], *, layer: int = 0) -> None:
        """Store the first lengths[i] tokens of row i, without attending."""
        work = [(i, 0, n) for i, n in enumerate(lengths) if n]
        if work:
            self.run(work, layer=layer, attend=False)

    def expected(self, work: tuple[int, int, int], *, layer: int = 0) -> Answer:
        """The oracle's answer for tokens [start, start + count) of a row, in float64."""
        index, start, count = work
        row, shape = self.rows[index], self.shape
        end = start + count
        return reference(
            row.q[layer][start:end],
            stored(row.k[layer][:end], shape.kv_dtype, shape.k_scale),
            stored(row.v[layer][:end], shape.kv_dtype, shape.v_scale),
            scale=shape.k_dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            sinks=self.sinks[layer],
        )

    # ------------------------------------------------------------ what must stay as it was

    def drop_blocks_before(self, index: int, position: int) -> None:
        """As the allocator does once no query at or after `position` can see them: take away the blocks
        that lie wholly out of the window, and poison them."""
        window, size = self.shape.window, self.shape.block_size
        assert window is not None
        slot = self.rows[index].slot
        for column in range(max(0, position - window + 1) // size):
            block = int(self.table[slot, column])
            for cache in self.caches:
                _poison_(cache[block])
            self.table[slot, column] = -1

    def check_untouched(self) -> None:
        """Guard bands and blocks that no row holds are bit for bit what they were."""
        for cache, storage in zip(self.caches, self._storage, strict=True):
            fresh = _poison(GUARD, storage.dtype, storage.device)
            for name, band in (("before", storage[:GUARD]), ("after", storage[-GUARD:])):
                assert torch.equal(_bits(band), _bits(fresh)), f"the guard band {name} the cache was written"
            for block in sorted(set(range(len(cache))) - self._held):
                free = cache[block].reshape(-1)
                assert torch.equal(_bits(free), _bits(_poison(free.numel(), free.dtype, free.device))), (
                    f"free block {block} was written"
                )


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Answer:
    """Attention from its definition, in float64: q [n, heads, k_dim] are the last n of the sequence whose
    k [length, kv_heads, k_dim] and v are given. Key j is visible to the query at position p iff
    p - window < j <= p. The lse includes the sink."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    position = torch.arange(len(k) - len(q), len(k), device=q.device).unsqueeze(1)
    key = torch.arange(len(k), device=q.device).unsqueeze(0)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(visible, scores, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(len(q), 1)), 1)
        lse[:, head] = torch.logsumexp(scores, 1)
        weights = torch.exp(scores - lse[:, head].unsqueeze(1))[:, : len(k)]
        out[:, head] = weights @ v[:, head // group]
    return Answer(out, lse)


def stored(x: Tensor, kv_dtype: str | None, scale: float) -> Tensor:
    """x as it reads back from a cache of kv_dtype: what precision was lost is no error of the kernel."""
    if kv_dtype is None:
        return x
    dtype: torch.dtype = getattr(torch, kv_dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).double() * scale


def _poison(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` elements, every one of them NaN."""
    return _poison_(torch.empty(count, dtype=dtype, device=device))


def _poison_(x: Tensor) -> Tensor:
    if _is_float8(x.dtype):
        x.view(torch.uint8).fill_(0x7F)  # NaN in e4m3fn and in e5m2
    else:
        x.fill_(math.nan)
    return x


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
