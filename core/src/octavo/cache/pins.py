"""Pins: prefixes that stay in the pool whatever else needs room.

Owns one reference to each block of a pinned prefix. A pin is identified by its content (domain, salt
and tokens), so that pinning twice is pinning once. Decides nothing about how much may be pinned.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from octavo.cache.blocks import Blocks
from octavo.cache.prefix import frame


@dataclass(eq=False, slots=True)
class Pin:
    """tokens: length of the pinned prefix, a multiple of every block size. blocks: one array of ids over all groups."""

    tokens: int
    blocks: np.ndarray


def pin_id(tokens: np.ndarray, domain: str, salt: str) -> str:
    """The name of a pin: 16 hexadecimal digits of a SHA-256 over its content."""
    content = frame("domain", domain.encode()) + frame("salt", salt.encode()) + np.asarray(tokens, "<i4").tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


class Pins:
    """All pins of one allocator, by id."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, name: str, pin: Pin) -> None:
        """Hold the pin's (distinct) blocks. A pin of that name is replaced."""
        self._blocks.hold(pin.blocks)
        self.remove(name)
        self._pins[name] = pin

    def remove(self, name: str) -> int:
        """Let go; the tokens that were pinned, 0 if there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        self._blocks.drop(pin.blocks[::-1], distinct=True)
        return pin.tokens

    def clear(self) -> None:
        for name in list(self._pins):
            self.remove(name)

    def blocks(self) -> np.ndarray:
        """The blocks that any pin holds, each once."""
        if not self._pins:
            return np.empty(0, np.intp)
        return np.unique(np.concatenate([pin.blocks for pin in self._pins.values()]))

    def alone(self) -> int:
        """Blocks that nothing but pins holds."""
        if not self._pins:
            return 0
        every, count = np.unique(np.concatenate([pin.blocks for pin in self._pins.values()]), return_counts=True)
        return int(np.count_nonzero(self._blocks.references[every] == count))

    def references(self) -> np.ndarray:
        """int64 [capacity]: how many pins hold each block."""
        counts = np.zeros(self._blocks.capacity, np.int64)
        for pin in self._pins.values():
            counts[pin.blocks] += 1
        return counts

    def move(self, blocks: np.ndarray, targets: np.ndarray) -> None:
        """Blocks have moved, references and all."""
        place = np.arange(self._blocks.capacity)
        place[blocks] = targets
        for pin in self._pins.values():
            pin.blocks = place[pin.blocks]

    def sizes(self) -> dict[str, int]:
        """Pinned tokens by id."""
        return {name: pin.tokens for name, pin in self._pins.items()}
