"""The keys of the prefix cache, and the index from keys to blocks.

Owns what makes two blocks "the same content": a chain of SHA-256 over tagged, length-framed parts
(salt, block size, parent, token ids), kept apart by domain. Never decides who may hold a block and
never uses Python's `hash` for identity (hash(-1) == hash(-2), and it is not keyed).

    root    = SHA-256("octavo" prefix 1, "block_size" n, "salt" s)
    message = tags and lengths ("p" 32, "t" 4n), digest of the block before (or root), ids as int32 little-endian
    digest  = SHA-256(message)
    place   = SHA-256("domain" name, "group" KV group)
    key     = place + digest

A look-up tries the row's own domain and then PUBLIC, which only the operator fills. A hit is
believed only after the messages, that is the token ids themselves and the parent, have been
compared: with every block of a chain compared, the whole prefix has been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from functools import lru_cache

import numpy as np

PUBLIC = "public"
"""The domain that everybody may read and only the operator's warm-up writes."""

FIRST_LOOK = 16
"""A look-up hashes this many blocks before it asks for the first, and four times as many each time that all were there."""


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
    return hashlib.sha256(b"".join(framed)).hexdigest()


class Chain:
    """Digests and messages of one row's full blocks at one block size, computed as far as asked.

    digests[0] is the root; digests[i + 1] = SHA-256(messages[i]) is that of block i.
    """

    __slots__ = ("digests", "head", "messages", "width")

    def __init__(self, block_size: int, salt: str) -> None:
        self.width = 4 * block_size  # bytes of token ids in a block
        # Of fixed length, and the same for every message of a chain: one constant in front, then the values.
        self.head = b"p" + (32).to_bytes(8, "little") + b"t" + self.width.to_bytes(8, "little")
        self.digests = [root(block_size, salt)]
        self.messages: list[bytes] = []

    def grow(self, tokens: bytearray, blocks: int) -> None:
        """Compute at least the first `blocks` blocks; their tokens must be known."""
        digests, messages, sha256 = self.digests, self.messages, hashlib.sha256
        head, width, parent = self.head, self.width, digests[-1]
        for at in range(len(messages) * width, blocks * width, width):
            message = head + parent + tokens[at : at + width]
            parent = sha256(message).digest()
            messages.append(message)
            digests.append(parent)

    def copy(self) -> Chain:
        twin = Chain.__new__(Chain)
        twin.head, twin.width = self.head, self.width
        twin.digests, twin.messages = list(self.digests), list(self.messages)
        return twin


class Lineage:
    """What the blocks of one row contain: its domain, its token ids (int32 little-endian, as bytes) and
    one Chain per block size."""

    __slots__ = ("chains", "domain", "tokens")

    def __init__(self, tokens: np.ndarray, domain: str, salt: str, block_sizes: tuple[int, ...]) -> None:
        self.domain = domain
        self.tokens = bytearray(_encode(tokens))
        self.chains = {size: Chain(size, salt) for size in block_sizes}

    def extend(self, tokens: np.ndarray) -> None:
        self.tokens += _encode(tokens)

    def copy(self) -> Lineage:
        twin = Lineage.__new__(Lineage)
        twin.domain, twin.tokens = self.domain, bytearray(self.tokens)
        twin.chains = {size: chain.copy() for size, chain in self.chains.items()}
        return twin

    def chain(self, block_size: int, blocks: int) -> Chain:
        """The chain of this block size, computed for at least `blocks` blocks."""
        chain = self.chains[block_size]
        if len(chain.messages) < blocks:
            chain.grow(self.tokens, blocks)
        return chain


_ID = np.dtype("<i4")


@lru_cache(maxsize=1024)
def root(block_size: int, salt: str) -> bytes:
    """Where the chains of one block size and salt begin."""
    parts = frame("octavo", b"prefix 1") + frame("block_size", str(block_size).encode()) + frame("salt", salt.encode())
    return hashlib.sha256(parts).digest()


@lru_cache(maxsize=4096)
def place(domain: str, group: int) -> bytes:
    """The part of a key that keeps domains and KV groups apart."""
    return hashlib.sha256(frame("domain", domain.encode()) + frame("group", str(group).encode())).digest()


def _encode(tokens: np.ndarray) -> bytes:
    return (tokens if tokens.dtype == _ID else tokens.astype(_ID)).tobytes()


class PrefixIndex:
    """Published blocks by key, and what each holds: a bijection of keys and published blocks.

    below: the index of a slower tier, which is asked for what this one does not have. Its slot s is
    found as the id num_blocks + s.

    Keys and messages are plain bytes in flat containers: nothing that Python's garbage collector
    would have to walk, however large the cache is.
    """

    def __init__(self, num_blocks: int, below: PrefixIndex | None = None) -> None:
        self._offset, self._below = num_blocks, below
        self._blocks: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_blocks  # by block
        self._messages: list[bytes] = [b""] * num_blocks  # by block

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, lineage: Lineage, group: int, block_size: int, column: int) -> int:
        """The block that holds block `column` of this lineage, verified; -1 if there is none."""
        found = self._run(lineage, group, lineage.chain(block_size, column + 1), column, column + 1)
        return found[0] if found else -1

    def alone(self) -> PrefixIndex:
        """The same index without the tier below it."""
        twin = copy(self)
        twin._below = None
        return twin

    def match(self, lineage: Lineage, group: int, block_size: int, blocks: int) -> list[int]:
        """The longest run of cached blocks from the first on, at most `blocks` long. No more of the prompt
        is hashed than a few times the run: a long one that misses is cheap to try again and again."""
        found: list[int] = []
        while len(found) < blocks:
            first = len(found)
            upto = min(blocks, max(FIRST_LOOK, 4 * first))
            found += self._run(lineage, group, lineage.chain(block_size, upto), first, upto)
            if len(found) < upto:
                break
        return found

    def _run(self, lineage: Lineage, group: int, chain: Chain, first: int, end: int) -> list[int]:
        """The blocks of columns first, first + 1, ... as far as there are any."""
        own, public = place(lineage.domain, group), place(PUBLIC, group)
        messages, get, below = self._messages, self._blocks.get, self._below
        found: list[int] = []
        for digest, message in zip(chain.digests[first + 1 : end + 1], chain.messages[first:end], strict=True):
            block = get(own + digest)
            if block is None:
                block = get(public + digest)
                if block is None:
                    slot = None if below is None else below.slot((own + digest, public + digest), message)
                    if slot is None:
                        break
                    found.append(self._offset + slot)
                    continue
            if messages[block] != message:
                break
            found.append(block)
        return found

    def publish(self, lineage: Lineage, group: int, block_size: int, column: int, blocks: list[int]) -> list[int]:
        """Make these blocks, which hold columns `column`, `column + 1`, ... of the lineage, findable.

        Returns those that were: one that is -1 (trimmed) or already published is passed over, and
        one whose content the row could have found in another block stays private (first wins).
        """
        chain = lineage.chain(block_size, column + len(blocks))
        digests, index, keys = chain.digests, self._blocks, self._keys
        own, public = place(lineage.domain, group), place(PUBLIC, group)
        done = []
        for block in blocks:
            column += 1
            if block >= 0 and keys[block] is None:
                digest = digests[column]
                key = own + digest
                if key not in index and public + digest not in index:
                    index[key] = block
                    keys[block] = key
                    self._messages[block] = chain.messages[column - 1]
                    done.append(block)
        return done

    def slot(self, keys: tuple[bytes, ...], message: bytes) -> int | None:
        """Who holds this content under one of the keys, in order; verified."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                return block if self._messages[block] == message else None
        return None

    def content(self, block: int) -> tuple[bytes, bytes] | None:
        """Key and message of a block, None if it is not published."""
        key = self._keys[block]
        return None if key is None else (key, self._messages[block])

    def adopt(self, block: int, content: tuple[bytes, bytes]) -> bool:
        """Publish a block under a key and message that came from another index. False, with nothing
        changed, where the key is taken."""
        key, message = content
        if key in self._blocks:
            return False
        self._blocks[key] = block
        self._keys[block], self._messages[block] = key, message
        return True

    def move(self, blocks: list[int], targets: list[int]) -> None:
        """What these blocks hold is in those now; unpublished ones are passed over."""
        for block, target in zip(blocks, targets, strict=True):
            content = self.content(block)
            if content is not None:
                self.remove([block])
                self.adopt(target, content)

    def remove(self, blocks: list[int]) -> None:
        """Make these published blocks unfindable."""
        index, keys, messages = self._blocks, self._keys, self._messages
        for block in blocks:
            key = keys[block]
            assert key is not None, f"block {block} is not published"
            del index[key]
            keys[block], messages[block] = None, b""

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were published."""
        blocks = list(self._blocks.values())
        self.remove(blocks)
        return blocks

    def check(self, published: np.ndarray) -> None:
        """Raise AssertionError unless keys and the blocks marked in `published` (bool [num_blocks]) are a bijection."""
        for key, block in self._blocks.items():
            if self._keys[block] != key:
                raise AssertionError(f"the index leads to block {block}, which does not hold that key")
        marked = np.flatnonzero(published).tolist()
        if sorted(self._blocks.values()) != marked:
            raise AssertionError("the index and the published blocks differ")
        if [b for b, key in enumerate(self._keys) if key is not None] != marked:
            raise AssertionError("the keys and the published blocks differ")
