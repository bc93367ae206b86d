"""Prefix-cache keys: equal content has equal keys, and nothing else does: of domains and
tenants too."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.cache.prefix import FIRST_LOOK, PUBLIC, Lineage, PrefixIndex, frame, root, salt

TOKENS = np.arange(16, dtype=np.int32)


def lineage(tokens: np.ndarray = TOKENS, domain: str = "a", extra: str = "", sizes: tuple[int, ...] = (4,)) -> Lineage:
    return Lineage(tokens, domain, extra, sizes)


def digests(tokens: np.ndarray, extra: str = "", size: int = 4) -> list[bytes]:
    return lineage(tokens, extra=extra, sizes=(size,)).chain(size, len(tokens) // size).digests


# ---------------------------------------------------------------- parts of a key


@given(
    st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=6)), max_size=3),
    st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=6)), max_size=3),
)
def test_different_parts_never_have_the_same_frames(some: list[tuple[str, bytes]], other: list[tuple[str, bytes]]) -> None:
    equal = b"".join(itertools.starmap(frame, some)) == b"".join(itertools.starmap(frame, other))
    assert equal == (some == other)


def test_salts_differ_wherever_their_parts_do() -> None:
    parts: list[dict[str, str | int | bytes]] = [
        {},
        {"adapter": "X"},
        {"salt": "X"},
        {"adapter": "X", "salt": "X"},
        {"adapter": "XX", "salt": ""},
        {"extra": -1},  # Python: hash(-1) == hash(-2)
        {"extra": -2},
        {"extra": "-1"},
        {"extra": b"-1"},
        {"extra": ""},
        {"rope": 1, "generation": 2},
        {"rope": 2, "generation": 1},
    ]
    found = [salt(each) for each in parts]
    assert len(set(found)) == len(parts)
    assert len({digests(TOKENS, each)[-1] for each in found}) == len(parts)


def test_the_order_in_which_parts_are_named_does_not_matter() -> None:
    assert salt({"rope": 4096, "adapter": "X"}) == salt({"adapter": "X", "rope": 4096})


@pytest.mark.parametrize("value", [1.5, True, None, ("X",)])
def test_a_part_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="'adapter' must be str, int or bytes"):
        salt({"adapter": value})  # type: ignore[dict-item]


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from octavo.cache.prefix import *;"
        "print(Lineage(np.arange(8), 'a', salt({'adapter': 'X'}), (4,)).chain(4, 2).digests[-1].hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {digests(np.arange(8), salt({"adapter": "X"}))[-1].hex() + "\n"}


# ---------------------------------------------------------------- chains


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24), st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 5)
)
def test_two_blocks_have_one_digest_exactly_if_everything_up_to_their_end_is_equal(a: list[int], b: list[int], size: int) -> None:
    for i, mine in enumerate(digests(np.array(a), size=size)[1:]):
        for j, other in enumerate(digests(np.array(b), size=size)[1:]):
            assert (mine == other) == (a[: (i + 1) * size] == b[: (j + 1) * size])


def test_chains_of_different_block_sizes_never_meet() -> None:
    found = [set(digests(np.zeros(12, np.int32), size=size)) for size in (1, 2, 3, 4, 6)]
    assert len(set.union(*found)) == sum(len(each) for each in found)


def test_tokens_are_compared_as_32_bit_numbers_whatever_they_came_as() -> None:
    assert (
        digests(np.arange(8, dtype=np.int64))
        == digests(np.arange(8, dtype=np.int32))
        == digests(np.arange(16, dtype=np.uint8)[:8])
    )
    assert digests(np.array([1, 0, 0, 0])) != digests(np.array([256, 0, 0, 0]))


def test_a_chain_grows_with_its_tokens_and_a_copy_goes_its_own_way() -> None:
    first = lineage(TOKENS[:6])
    twin = first.copy()
    first.extend(TOKENS[6:])
    twin.extend(np.array([99, 99]))
    assert first.chain(4, 4).digests == digests(TOKENS)
    assert twin.chain(4, 2).digests[:2] == first.chain(4, 4).digests[:2]
    assert twin.chain(4, 2).digests[2] != first.chain(4, 4).digests[2]


# ---------------------------------------------------------------- the index


def test_a_block_is_found_in_its_own_domain_and_in_public_only() -> None:
    index = PrefixIndex(8)
    index.publish(lineage(domain="a"), 0, 4, 0, [0, 1])
    index.publish(lineage(TOKENS + 50, domain=PUBLIC), 0, 4, 0, [2, 3])
    assert index.match(lineage(domain="a"), 0, 4, 4) == [0, 1]
    assert index.match(lineage(domain="b"), 0, 4, 4) == []
    assert index.match(lineage(domain=PUBLIC), 0, 4, 4) == []
    for domain in ("a", "b", PUBLIC):
        assert index.match(lineage(TOKENS + 50, domain), 0, 4, 4) == [2, 3]
    assert index.match(lineage(domain="a"), 1, 4, 4) == [], "another KV group has other blocks"


def test_an_adapter_is_not_a_salt_of_the_same_name() -> None:
    index = PrefixIndex(8)
    index.publish(lineage(extra=salt({"adapter": "X"})), 0, 4, 0, [0])
    for other in ({"salt": "X"}, {}, {"adapter": "Y"}):
        assert index.match(lineage(extra=salt(other)), 0, 4, 1) == []
    assert index.match(lineage(extra=salt({"adapter": "X"})), 0, 4, 1) == [0]


def test_a_run_ends_at_the_first_block_that_is_missing() -> None:
    index = PrefixIndex(64)
    long = lineage(np.arange(200))
    index.publish(long, 0, 4, 0, list(range(50)))
    assert index.match(lineage(np.arange(200)), 0, 4, 50) == list(range(50))
    for gone in (49, 17, 8, 0):
        index.remove([gone])
        assert index.match(lineage(np.arange(200)), 0, 4, 50) == list(range(gone))
        assert index.find(lineage(np.arange(200)), 0, 4, gone) == -1


def test_a_long_prompt_that_misses_is_hashed_no_further_than_needed() -> None:
    prompt = lineage(np.arange(100_000))
    PrefixIndex(4).match(prompt, 0, 4, 24_999)
    assert len(prompt.chains[4].messages) <= FIRST_LOOK


def test_the_first_block_with_a_key_keeps_it() -> None:
    index = PrefixIndex(8)
    assert index.publish(lineage(), 0, 4, 0, [0, 1]) == [0, 1]
    assert index.publish(lineage(), 0, 4, 0, [2, 3, 4]) == [4]
    assert index.publish(lineage(), 0, 4, 0, [0, 1]) == [], "published already"
    assert index.match(lineage(), 0, 4, 4) == [0, 1, 4]


def test_what_is_public_is_not_published_again_by_a_tenant() -> None:
    index = PrefixIndex(8)
    index.publish(lineage(domain=PUBLIC), 0, 4, 0, [0])
    assert index.publish(lineage(domain="a"), 0, 4, 0, [1, 2]) == [2]


def test_trimmed_columns_are_passed_over() -> None:
    index = PrefixIndex(8)
    assert index.publish(lineage(), 0, 4, 0, [-1, 5]) == [5]
    assert index.find(lineage(), 0, 4, 0) == -1
    assert index.find(lineage(), 0, 4, 1) == 5


def test_a_hit_is_verified_on_the_tokens_and_not_believed_for_its_digest() -> None:
    # A collision, forged: another prompt's chain claims the digest of the published block.
    index = PrefixIndex(8)
    index.publish(lineage(), 0, 4, 0, [0])
    forged = lineage(TOKENS + 1)
    forged.chain(4, 1).digests[1] = lineage().chain(4, 1).digests[1]
    assert index.match(forged, 0, 4, 1) == []
    assert index.find(forged, 0, 4, 0) == -1


def test_a_hit_is_verified_on_its_parent_too() -> None:
    index = PrefixIndex(8)
    repeated = np.tile(TOKENS[:4], 2)
    index.publish(lineage(repeated), 0, 4, 1, [0])  # the second of two equal blocks
    forged = lineage(repeated)
    chain = forged.chain(4, 2)
    chain.digests[1] = chain.digests[2]  # the first claims to be the second
    assert index.find(forged, 0, 4, 0) == -1
    assert index.find(lineage(repeated), 0, 4, 1) == 0


def test_clearing_leaves_nothing_behind() -> None:
    index = PrefixIndex(8)
    index.publish(lineage(), 0, 4, 0, [3, 1])
    assert sorted(index.clear()) == [1, 3]
    assert len(index) == 0
    index.check(np.zeros(8, bool))
    assert index.publish(lineage(), 0, 4, 0, [3, 1]) == [3, 1]


def test_the_check_notices_a_block_that_is_marked_and_not_indexed() -> None:
    index = PrefixIndex(4)
    index.publish(lineage(), 0, 4, 0, [2])
    index.check(np.array([False, False, True, False]))
    with pytest.raises(AssertionError, match="differ"):
        index.check(np.array([False, True, True, False]))


def test_the_root_commits_to_block_size_and_salt() -> None:
    assert len({root(size, extra) for size in (1, 4, 16) for extra in ("", "a", "b")}) == 9
