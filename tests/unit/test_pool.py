"""The pool: layers are grouped so that pages are equally long, and blocks of all groups share memory
without touching one another. NaN in every block that nobody wrote."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from octavo.cache.pool import MAX_WASTE, Pool, block_bytes, blocks_for_bytes, describe, kv_tokens, max_concurrency, plan_groups
from octavo.errors import ConfigError
from octavo.interfaces import CacheLayout, KVGroup, KVSpec

FULL = KVSpec("full", 2, 8, 8, "float32")
WINDOW = KVSpec("window", 2, 8, 8, "float32", 16)
WIDE = KVSpec("full", 4, 8, 8, "float32")
HALF = KVSpec("window", 2, 8, 8, "bfloat16", 16)


def layout(spec: KVSpec, block_size: int) -> CacheLayout:
    """K and V side by side, slots outermost."""
    itemsize = getattr(torch, spec.dtype).itemsize
    shape = (block_size, spec.heads, spec.k_dim + spec.v_dim)
    return CacheLayout(spec.dtype, shape, math.prod(shape) * itemsize, "slot, head, dim")


def plan(*counts: tuple[KVSpec, int], block_size: int = 4) -> tuple[KVGroup, ...]:
    return plan_groups([spec for spec, n in counts for _ in range(n)], layout, block_size)


def pool(groups: tuple[KVGroup, ...], num_blocks: int = 6) -> Pool:
    return Pool(groups, [layout(g.spec, g.block_size) for g in groups], num_blocks, "cpu")


# ---------------------------------------------------------------- groups


def test_layers_of_one_kind_are_one_group() -> None:
    (group,) = plan((FULL, 30))
    assert (group.index, group.layers, group.block_size, group.page_bytes) == (0, tuple(range(30)), 4, 4 * 2 * 16 * 4)


def test_every_layer_is_in_exactly_one_group_with_its_own_spec() -> None:
    specs = [WINDOW if i % 6 else FULL for i in range(26)]
    groups = plan_groups(specs, layout, 4)
    assert sorted(at for group in groups for at in group.layers) == list(range(26))
    assert all(specs[at] == group.spec for group in groups for at in group.layers)
    assert [group.index for group in groups] == list(range(len(groups)))
    assert all(list(group.layers) == sorted(group.layers) for group in groups)


@pytest.mark.parametrize(
    ("full", "window", "shape"),
    [
        (8, 40, [8] * 6),  # [8, 10, 10, 10, 10] would waste a fifth of what keeps every token
        (13, 13, [13, 13]),
        (12, 13, [12, 13]),  # one page in 26 is spared a table
        (4, 22, [4] * 6 + [2]),  # at most one short group
        (1, 23, [1] * 24),  # a group of more than one would waste over an eighth
        (1, 1, [1, 1]),
    ],
)
def test_group_lengths_waste_little_and_at_most_one_is_short(full: int, window: int, shape: list[int]) -> None:
    groups = plan((FULL, full), (WINDOW, window))
    lengths = [len(group.layers) for group in groups]
    assert lengths == shape
    pages = max(lengths) * len(lengths)
    assert pages - sum(lengths) <= MAX_WASTE * pages
    assert sum(n < max(lengths) for n in lengths) <= 1


def test_narrower_layers_get_longer_blocks_so_that_pages_are_equal() -> None:
    groups = plan((WIDE, 2), (FULL, 2), (HALF, 2))
    assert [group.block_size for group in groups] == [4, 8, 16]
    assert len({group.page_bytes for group in groups}) == 1
    assert all(layout(group.spec, group.block_size).page_bytes == group.page_bytes for group in groups)


def test_pages_that_do_not_divide_meet_at_their_least_common_multiple() -> None:
    three = KVSpec("full", 3, 8, 8, "float32")
    groups = plan((three, 1), (FULL, 1))
    assert [group.block_size for group in groups] == [8, 12]


def test_pages_that_meet_too_late_are_refused_with_their_sizes() -> None:
    odd = KVSpec("full", 1, 521, 96, "float32")
    with pytest.raises(ConfigError, match=r"full, 1 heads of 521\+96 float32: 9872 bytes.*window 16.*blocks of"):
        plan((odd, 1), (WINDOW, 1))


def test_a_layout_that_is_not_in_proportion_to_the_block_size_is_refused() -> None:
    def padded(spec: KVSpec, block_size: int) -> CacheLayout:
        found = layout(spec, block_size)
        return CacheLayout(found.dtype, found.page_shape, found.page_bytes + 64, found.order)

    with pytest.raises(ConfigError, match="not in proportion"):
        plan_groups([WIDE, FULL], lambda spec, n: padded(spec, n) if spec is FULL and n > 4 else layout(spec, n), 4)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention layer"):
        plan_groups([], layout, 4)


# ---------------------------------------------------------------- sizes


def test_bytes_buy_whole_blocks_and_the_scratch_page_is_paid_for() -> None:
    groups = plan((FULL, 3), (WINDOW, 3))
    each = block_bytes(groups)
    assert each == 3 * 4 * 2 * 16 * 4
    assert blocks_for_bytes(groups, 11 * each) == 10
    assert blocks_for_bytes(groups, 11 * each - 1) == 9
    assert blocks_for_bytes(groups, each) == 0 == blocks_for_bytes(groups, 0)
    assert pool(groups, blocks_for_bytes(groups, 11 * each)).nbytes == 11 * each


def test_the_start_up_lines_state_tokens_and_concurrency() -> None:
    assert describe(plan((FULL, 2)), 1000, 1600) == (
        "CPU KV cache size: 4,000 tokens",
        "Maximum concurrency for 1,600 tokens per request: 2.50x",
    )
    assert describe(plan((FULL, 2)), 1000, 1600, device="cuda")[0] == "GPU KV cache size: 4,000 tokens"


def test_tokens_are_counted_over_all_groups_and_windows_hold_no_more_than_they_see() -> None:
    assert kv_tokens(plan((FULL, 2), (WIDE, 2)), 300, 4096) == 300 * 8 // 3, "a token takes 1/4 block here and 1/8 there"
    mixed = plan((FULL, 1), (WINDOW, 1))
    per_sequence = 1000 // 4 + (15 + 8 + 4 - 2) // 4 + 1
    assert max_concurrency(mixed, 1000, 1000, 8) == 1000 / per_sequence
    assert kv_tokens(mixed, 1000, 1000, 8) == int(1000 / per_sequence * 1000)


# ---------------------------------------------------------------- memory


def test_caches_have_the_layouts_shape_and_dtype_and_a_scratch_page_at_the_end() -> None:
    groups = plan((WIDE, 2), (HALF, 2))
    memory = pool(groups, 6)
    assert memory.scratch == 6
    for group in groups:
        caches = memory.caches(group)
        assert len(caches) == 2
        for cache in caches:
            assert cache.shape == (7, *layout(group.spec, group.block_size).page_shape)
            assert cache.dtype == getattr(torch, group.spec.dtype)
            assert cache.is_contiguous() and cache.data_ptr() % 128 == 0
            assert not cache.any(), "pages start as zeros"


def test_groups_share_memory_and_blocks_of_different_ids_never_overlap() -> None:
    groups = plan((WIDE, 2), (HALF, 2))
    memory = pool(groups, 4)
    memory.poison()
    for block in range(5):
        for at, cache in enumerate(memory.caches(groups[block % 2])):
            cache[block] = 10 * block + at
    for block in range(5):
        for at, cache in enumerate(memory.caches(groups[block % 2])):
            assert (cache[block] == 10 * block + at).all(), (block, at)
    first, second = memory.caches(groups[0])[0], memory.caches(groups[1])[0]
    assert first.data_ptr() == second.data_ptr(), "one tensor serves the first layer of every group"


def test_a_short_group_uses_the_first_tensors_only() -> None:
    groups = plan((FULL, 4), (WINDOW, 22))
    memory = pool(groups)
    assert [len(memory.caches(group)) for group in groups] == [4] * 6 + [2]
    assert memory.nbytes == 4 * 7 * groups[0].page_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_poison_is_nan_in_every_dtype_and_only_in_the_blocks_named(dtype: str) -> None:
    (group,) = plan((KVSpec("full", 2, 8, 8, dtype), 2))
    memory = pool((group,), 4)
    memory.poison([1, 3])
    for cache in memory.caches(group):
        bad = cache.float().isnan().flatten(1)
        assert [bool(row.all()) for row in bad] == [False, True, False, True, False]
        assert [bool(row.any()) for row in bad] == [False, True, False, True, False]
    memory.poison(np.array([4]))
    assert memory.caches(group)[0][4].float().isnan().all(), "the scratch page too"
    memory.poison()
    assert memory.caches(group)[1].float().isnan().all()


def test_padded_pages_are_views_with_a_gap() -> None:
    wanted = layout(FULL, 4)
    padded = CacheLayout("float32", wanted.page_shape, wanted.page_bytes + 64, wanted.order)
    group = KVGroup(0, FULL, (0,), 4, padded.page_bytes)
    memory = Pool([group], [padded], 3, "cpu")
    (cache,) = memory.caches(group)
    assert cache.shape == (4, *wanted.page_shape)
    assert cache.stride(0) * 4 == padded.page_bytes
    cache[1] = 1.0
    assert cache.sum() == math.prod(wanted.page_shape)


def test_pages_that_disagree_are_refused() -> None:
    groups = plan((WIDE, 1), (FULL, 1))
    with pytest.raises(ConfigError, match=r"KV group 1 \(block size 8\).*equally long"):
        Pool(groups, [layout(g.spec, 4) for g in groups], 4, "cpu")
    with pytest.raises(ConfigError, match="does not fit"):
        Pool(plan((FULL, 1)), [CacheLayout("float32", (4, 2, 17), 512, "")], 4, "cpu")
    with pytest.raises(ConfigError, match="0 blocks"):
        pool(plan((FULL, 1)), 0)
