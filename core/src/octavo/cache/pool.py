"""The pool: the memory of the KV cache, and how layers are grouped so that all of them share it.

Owns the tensors and the grouping. Never decides which block is whose (the allocator does), and
never reads or writes a page (the attention backend does, by its own layout). torch is imported
only when a Pool is built, so that the plan of one can be made without it.

A block id names one page in every tensor. Tensor i serves layer i of *every* group, each seeing it
in its own shape and dtype; a block belongs to one group at a time, so the groups never collide,
and memory flows freely between them. This is why pages must be equally long in all groups.

                 tensor 0     tensor 1     tensor 2
    block 0      full  L0     full  L6     full  L12       group 0 holds blocks 0 and 2
    block 1      window L1    window L2    window L3       group 1 holds block 1
    block 2      full  L0     full  L6     full  L12
    scratch      padded rows write here; no table names it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.cache.geometry import sequence_blocks
from octavo.errors import ConfigError
from octavo.interfaces import CacheLayout, KVGroup, KVSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.cache.elastic import Memory

MAX_WASTE = 0.125
"""Share of pages that may belong to no layer, because a group is shorter than the others."""

MAX_BLOCK_SCALE = 512
"""A group's block may be at most this many times longer than the block size that was asked for. (An entry for 128 tokens
beside the projections that it is made of, as DeepSeek V4 keeps them, is 512 times smaller.)"""

ALIGNMENT = 128
"""Bytes that a tensor's start is aligned to on the CPU: two cache lines."""

Layouts = Callable[[KVSpec, int], CacheLayout]


# ---------------------------------------------------------------- grouping


def plan_groups(kv_specs: Sequence[KVSpec], layout_of: Layouts, block_size: int) -> tuple[KVGroup, ...]:
    """Groups of equal layer counts and equal page bytes, in the order in which their specs first appear.

    kv_specs: one per attention layer. layout_of: the attention backend's `layout`.

    Layer counts. One block id takes a page in as many tensors as the largest group has layers, so a
    shorter group wastes pages; more and smaller groups waste none but cost a block table each. The
    count taken is the largest with at most one short group and at most MAX_WASTE of pages wasted, over
    all groups and over those that keep every token (which hold most blocks in a long context): 26
    layers as 22 window + 4 full become 6 groups of 4 and one of 2 (7% wasted, none of it full).

    Page bytes. The spec with the largest page keeps `block_size`; the others get blocks of more
    tokens until their pages are as long. Where no whole multiple fits, all are scaled to the least
    common multiple. ConfigError if that needs blocks of over MAX_BLOCK_SCALE * block_size tokens, or if
    the backend's pages do not grow in proportion to the block size.
    """
    if not kv_specs:
        raise ConfigError("the model has no attention layer with a KV cache: there is nothing to page")
    layers: dict[KVSpec, list[int]] = {}
    for at, spec in enumerate(kv_specs):
        layers.setdefault(spec, []).append(at)
    scales, page_bytes = _scales(tuple(layers), layout_of, block_size)
    count = _layer_count([(len(found), spec.window is None) for spec, found in layers.items()])
    groups: list[KVGroup] = []
    for spec, found in layers.items():
        for first in range(0, len(found), count):
            chunk = tuple(found[first : first + count])
            groups.append(KVGroup(len(groups), spec, chunk, block_size * scales[spec], page_bytes))
    return tuple(groups)


def _layer_count(counts: Sequence[tuple[int, bool]]) -> int:
    """Layers per group, from (layers, keeps every token) per spec. One always qualifies: it wastes nothing."""

    def waste(some: Sequence[int], size: int) -> float:
        pages = sum(-(-n // size) * size for n in some)
        return (pages - sum(some)) / pages if pages else 0.0

    every, lasting = [n for n, _ in counts], [n for n, keeps in counts if keeps]
    return next(
        size
        for size in range(max(every), 0, -1)
        if sum(1 for n in every if n % size) <= 1 and max(waste(every, size), waste(lasting, size)) <= MAX_WASTE
    )


def _scales(specs: Sequence[KVSpec], layout_of: Layouts, block_size: int) -> tuple[dict[KVSpec, int], int]:
    """By how much each spec's block is longer than block_size, and the page bytes that all then have."""
    pages = {spec: layout_of(spec, block_size).page_bytes for spec in specs}
    target = math.lcm(*pages.values())
    scales = {spec: target // page for spec, page in pages.items()}
    described = "; ".join(f"{_describe(spec)}: {page} bytes" for spec, page in pages.items())
    if max(scales.values()) > MAX_BLOCK_SCALE:
        raise ConfigError(
            f"KV pages of {block_size} tokens cannot be made equally long ({described}): it would take blocks of "
            f"{max(scales.values()) * block_size} tokens. Use another block size or KV cache dtype, or a backend that pads its pages"
        )
    for spec, scale in scales.items():
        scaled = layout_of(spec, block_size * scale).page_bytes
        if scaled != target:
            raise ConfigError(
                f"KV pages are not in proportion to the block size ({described}): {_describe(spec)} has {scaled} bytes at "
                f"{block_size * scale} tokens, where {target} were expected. The attention backend's layout cannot share a pool"
            )
    return scales, target


def _describe(spec: KVSpec) -> str:
    window = "" if spec.window is None else f" {spec.window}"
    return f"{spec.kind}{window}, {spec.heads} heads of {spec.k_dim}+{spec.v_dim} {spec.dtype}"


# ---------------------------------------------------------------- sizes


def block_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes of one block id: a page in every tensor of the pool."""
    return groups[0].page_bytes * max(len(group.layers) for group in groups)


def blocks_for_bytes(groups: Sequence[KVGroup], budget: int) -> int:
    """Blocks that `budget` bytes hold, the scratch page paid for; 0 if they hold none."""
    return max(0, budget // block_bytes(groups) - 1)


def max_concurrency(groups: Sequence[KVGroup], num_blocks: int, tokens: int, max_step_tokens: int = 0) -> float:
    """How many requests of `tokens` tokens the pool holds at once, sharing nothing."""
    return num_blocks / sequence_blocks(groups, tokens, max_step_tokens)


def kv_tokens(groups: Sequence[KVGroup], num_blocks: int, max_model_len: int, max_step_tokens: int = 0) -> int:
    """Tokens that the pool holds. With window groups that depends on the length of the sequences: it
    is stated for sequences of max_model_len tokens."""
    if all(group.spec.window is None for group in groups):
        stride = math.lcm(*(group.block_size for group in groups))
        return num_blocks * stride // sum(stride // group.block_size for group in groups)
    return int(max_concurrency(groups, num_blocks, max_model_len, max_step_tokens) * max_model_len)


def describe(
    groups: Sequence[KVGroup], num_blocks: int, max_model_len: int, *, max_step_tokens: int = 0, device: str = "cpu"
) -> tuple[str, str]:
    """The two start-up lines that people look for: the cache's size in tokens, and the concurrency it allows."""
    name = "CPU" if device == "cpu" else "GPU"
    tokens = kv_tokens(groups, num_blocks, max_model_len, max_step_tokens)
    times = max_concurrency(groups, num_blocks, max_model_len, max_step_tokens)
    return (
        f"{name} KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {times:.2f}x",
    )


# ---------------------------------------------------------------- memory


class Pool:
    """The cache's tensors: as many as the largest group has layers, capacity + 1 pages each, of which the first
    num_blocks and the last (scratch) have memory.

    groups and layouts are parallel; layouts[i] is the backend's for (groups[i].spec,
    groups[i].block_size). Pages start as zeros. On the CPU memory is only touched when it is first
    written, so a large pool costs nothing until it is used. max_blocks: the most that `resize` may be
    asked for; without it the pool keeps its size, and capacity is num_blocks.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        layouts: Sequence[CacheLayout],
        num_blocks: int,
        device: torch.device | str,
        *,
        max_blocks: int | None = None,
    ) -> None:
        import torch

        for group, layout in zip(groups, layouts, strict=True):
            _check_layout(group, layout, groups[0].page_bytes)
        if num_blocks < 1:
            raise ConfigError(f"a pool of {num_blocks} blocks holds nothing: at least 1 is needed")
        self.groups, self.layouts = tuple(groups), tuple(layouts)
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.capacity = num_blocks
        count, page_bytes = max(len(g.layers) for g in groups), groups[0].page_bytes
        self._elastic: Memory | None = None
        if max_blocks is None:
            tensors = tuple(_zeros((num_blocks + 1) * page_bytes, self.device) for _ in range(count))
        else:
            from octavo.cache.elastic import reserve

            self._elastic = reserve(count, max(max_blocks, num_blocks), page_bytes, self.device)
            self._elastic.resize(num_blocks)
            self.capacity, tensors = self._elastic.capacity, self._elastic.tensors
        self._memory = tuple(tensor.view(self.capacity + 1, page_bytes) for tensor in tensors)

    @property
    def scratch(self) -> int:
        """The page that no table names: padded rows of a captured graph write there."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Of the pages that have memory."""
        return len(self._memory) * (self.num_blocks + 1) * self.groups[0].page_bytes

    def resize(self, num_blocks: int) -> None:
        """Have memory for that many blocks. What is submitted from now on may not touch what goes away; what was is waited for.
        MemoryError, with nothing changed, if the device has none for the growth; ConfigError if the pool was built to stay."""
        if self._elastic is None or not 1 <= num_blocks <= self.capacity:
            raise ConfigError(f"a pool of {self.num_blocks} blocks (at most {self.capacity}) cannot be made {num_blocks}")
        self._elastic.resize(num_blocks)
        self.num_blocks = num_blocks

    def words(self) -> tuple[Tensor, ...]:
        """The whole memory as [capacity + 1, words of a page], in the widest integer that divides a page: for copies."""
        import torch

        wide = torch.int64 if self.groups[0].page_bytes % 8 == 0 else torch.uint8
        return tuple(memory.view(wide) for memory in self._memory)

    def caches(self, group: KVGroup) -> tuple[Tensor, ...]:
        """Per layer of the group: [capacity + 1, *page_shape] in the layout's dtype; the last page is
        `scratch`. Views: contiguous unless the layout pads its pages."""
        import torch

        layout = self.layouts[group.index]
        dtype = getattr(torch, layout.dtype)
        used = math.prod(layout.page_shape)
        shape = (self.capacity + 1, *layout.page_shape)
        return tuple(memory.view(dtype)[:, :used].view(shape) for memory in self._memory[: len(group.layers)])

    def poison(self, blocks: Sequence[int] | np.ndarray | None = None) -> None:
        """Fill these pages (None: all that have memory, scratch included) with NaN in every tensor. For tests: whoever reads
        a block that nobody wrote then shows it. All bits set is a NaN in every float dtype of a cache."""
        import torch

        for memory in self._memory:
            if blocks is None:
                memory[: self.num_blocks].fill_(0xFF)
                memory[self.scratch].fill_(0xFF)
            else:
                memory[torch.as_tensor(np.asarray(blocks, np.int64), device=self.device)] = 0xFF


def _check_layout(group: KVGroup, layout: CacheLayout, page_bytes: int) -> None:
    import torch

    where = f"KV group {group.index} (block size {group.block_size})"
    itemsize = getattr(torch, layout.dtype).itemsize
    used = math.prod(layout.page_shape) * itemsize
    if not group.page_bytes == layout.page_bytes == page_bytes:
        raise ConfigError(
            f"{where}: pages must be equally long in all groups; the group says {group.page_bytes} bytes, its layout "
            f"{layout.page_bytes}, group 0 {page_bytes}"
        )
    if used > layout.page_bytes or layout.page_bytes % itemsize:
        raise ConfigError(
            f"{where}: a page of shape {layout.page_shape} {layout.dtype} does not fit its {layout.page_bytes} bytes"
        )


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """uint8 zeros. On the CPU through numpy, whose zeros are pages of the system that nobody has touched."""
    import torch

    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[offset : offset + nbytes])
