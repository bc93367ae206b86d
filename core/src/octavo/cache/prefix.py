"""The keys of the prefix cache, and the index from keys to blocks.

Owns what makes two blocks "the same content": a chain of SHA-256 over tagged, length-framed parts
(salt, block size, parent, token ids), kept apart by domain. Never decides who may hold a block and
never uses Python's `hash` for identity (hash(-1) == hash(-2), and it is not keyed).

    root  = SHA-256("octavo" prefix 1, "block_size" n, "salt" s)
    chain = SHA-256("parent" chain of the block before, "tokens" int32 little-endian ids)
    key   = (domain, KV group, chain)

A look-up tries the row's own domain and then PUBLIC, which only the operator fills. A hit is
believed only after the block's own tokens and parent have been compared: with every block of the
chain compared, the whole prefix has been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

PUBLIC = "public"
"""The domain that everybody may read and only the operator's warm-up writes."""

Key = tuple[str, int, bytes]

_sha256 = hashlib.sha256


def frame(tag: str, value: bytes) -> bytes:
    """One part of a key: length and bytes of the tag, length and bytes of the value. No two different
    sequences of parts have the same concatenation."""
    name = tag.encode()
    return len(name).to_bytes(2, "little") + name + len(value).to_bytes(8, "little") + value


def salt(parts: Mapping[str, str | int | bytes]) -> str:
    """What else the K/V of a prompt depends on (adapter, RoPE variant, load generation, a client's own
    salt), as the `salt` of Allocator.admit. Names, types and lengths are part of it: adapter "X" is not
    cache_salt "X", 1 is not "1", -1 is not -2. No parts: the empty string."""
    if not parts:
        return ""
    framed = []
    for name in sorted(parts):
        value = parts[name]
        if isinstance(value, bool) or not isinstance(value, (str, int, bytes)):
            raise TypeError(f"salt part {name!r} must be str, int or bytes, got {type(value).__name__}")
        data = value if isinstance(value, bytes) else str(value).encode()
        framed.append(frame("name", name.encode()) + frame(type(value).__name__, data))
    return _sha256(b"".join(framed)).hexdigest()


class Lineage:
    """The tokens of one row and their chains, one chain per block size, extended as far as asked.

    tokens: int32 little-endian ids, as bytes. chains[n][i + 1] is the digest of block i of n tokens;
    chains[n][0] is the root.
    """

    __slots__ = ("chains", "domain", "tokens")

    def __init__(self, tokens: np.ndarray, domain: str, salt: str, block_sizes: tuple[int, ...]) -> None:
        self.domain = domain
        self.tokens = bytearray(np.ascontiguousarray(tokens, "<i4").tobytes())
        self.chains = {size: [root(size, salt)] for size in block_sizes}

    def extend(self, tokens: np.ndarray) -> None:
        self.tokens += np.ascontiguousarray(tokens, "<i4").tobytes()

    def copy(self) -> Lineage:
        twin = Lineage.__new__(Lineage)
        twin.domain, twin.tokens = self.domain, bytearray(self.tokens)
        twin.chains = {size: list(chain) for size, chain in self.chains.items()}
        return twin

    def chain(self, block_size: int, blocks: int) -> list[bytes]:
        """The chain for this block size, at least root + `blocks` digests long. The tokens must be known."""
        chain = self.chains[block_size]
        if len(chain) > blocks:
            return chain
        tokens, width = self.tokens, 4 * block_size
        middle = _MIDDLE + width.to_bytes(8, "little")
        parent = chain[-1]
        for at in range((len(chain) - 1) * width, blocks * width, width):
            parent = _sha256(_HEAD + parent + middle + tokens[at : at + width]).digest()
            chain.append(parent)
        return chain


_HEAD = frame("parent", bytes(32))[:-32]
_MIDDLE = frame("tokens", b"")[:-8]


def root(block_size: int, salt: str) -> bytes:
    """Where the chains of one block size and salt begin."""
    parts = frame("octavo", b"prefix 1") + frame("block_size", str(block_size).encode()) + frame("salt", salt.encode())
    return _sha256(parts).digest()


def link(parent: bytes, tokens: np.ndarray) -> bytes:
    """The digest of a block of token ids after `parent` (32 bytes)."""
    return _sha256(frame("parent", parent) + frame("tokens", np.ascontiguousarray(tokens, "<i4").tobytes())).digest()


class Entry(NamedTuple):
    """What a published block holds: its key, and what a hit is compared with."""

    key: Key
    parent: bytes
    tokens: bytes


class PrefixIndex:
    """Published blocks by key, and keys by block: a bijection."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[Key, int] = {}
        self._entries: list[Entry | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, lineage: Lineage, group: int, block_size: int, column: int) -> int:
        """The block that holds block `column` of this lineage, verified; -1 if there is none."""
        chain = lineage.chain(block_size, column + 1)
        return self._find(lineage, group, chain, column, 4 * block_size)

    def match(self, lineage: Lineage, group: int, block_size: int, blocks: int) -> list[int]:
        """The longest run of cached blocks from the first on, at most `blocks` long. The chain is
        computed no further than the run goes, so a long prompt that misses costs one hash."""
        found: list[int] = []
        width = 4 * block_size
        for column in range(blocks):
            block = self._find(lineage, group, lineage.chain(block_size, column + 1), column, width)
            if block < 0:
                break
            found.append(block)
        return found

    def _find(self, lineage: Lineage, group: int, chain: list[bytes], column: int, width: int) -> int:
        digest = chain[column + 1]
        block = self._blocks.get((lineage.domain, group, digest))
        if block is None:
            block = self._blocks.get((PUBLIC, group, digest))
            if block is None:
                return -1
        entry = self._entries[block]
        assert entry is not None
        at = column * width
        if entry[1] != chain[column] or entry[2] != lineage.tokens[at : at + width]:
            return -1
        return block

    def publish(self, lineage: Lineage, group: int, block_size: int, column: int, blocks: list[int]) -> list[int]:
        """Make these blocks, which hold columns `column`, `column + 1`, ... of the lineage, findable.

        Returns those that were: one that is -1 (trimmed) or already published is passed over, and
        one whose content the row could have found in another block stays private (first wins).
        """
        chain = lineage.chain(block_size, column + len(blocks))
        tokens, domain, width = lineage.tokens, lineage.domain, 4 * block_size
        index, entries = self._blocks, self._entries
        done = []
        for block in blocks:
            if block >= 0 and entries[block] is None:
                digest = chain[column + 1]
                key = (domain, group, digest)
                if key not in index and (PUBLIC, group, digest) not in index:
                    at = column * width
                    index[key] = block
                    entries[block] = Entry(key, chain[column], bytes(tokens[at : at + width]))
                    done.append(block)
            column += 1
        return done

    def remove(self, blocks: list[int]) -> None:
        """Make these published blocks unfindable."""
        index, entries = self._blocks, self._entries
        for block in blocks:
            entry = entries[block]
            assert entry is not None, f"block {block} is not published"
            del index[entry[0]]
            entries[block] = None

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were published."""
        blocks = list(self._blocks.values())
        self.remove(blocks)
        return blocks

    def check(self, published: np.ndarray) -> None:
        """Raise AssertionError unless keys and the blocks marked in `published` (bool [num_blocks]) are a bijection."""
        for key, block in self._blocks.items():
            entry = self._entries[block]
            if entry is None or entry.key != key:
                raise AssertionError(f"the index leads to block {block}, which does not hold that key")
        marked = np.flatnonzero(published).tolist()
        if sorted(self._blocks.values()) != marked:
            raise AssertionError("the index and the published blocks differ")
        if [b for b, entry in enumerate(self._entries) if entry is not None] != marked:
            raise AssertionError("the entries and the published blocks differ")
