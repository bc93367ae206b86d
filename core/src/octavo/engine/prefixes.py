"""Warm prefixes: what an operator wants in the prefix cache before the first request asks for it.

Owns the file of prefixes and what may be done with a prefix: warm (compute it once, in the domain that
everybody may read), pin (keep it whatever else needs room) and unpin. Decides nothing about requests. Never
imports torch: the server process reads the file and tokenises.

The file is YAML or JSON (by its name), a list whose items are

    a text                                     a prompt that begins with it
    a list of {role, content}                  a conversation that begins with these messages
    {prompt: text} or {messages: [...]}        the same, with `pin: true` to pin it

or any other name: one prompt a line, empty lines ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from octavo import strict_yaml
from octavo.cache.prefix import PUBLIC
from octavo.engine.pins import WantedPins
from octavo.errors import ConfigError
from octavo.interfaces import Allocator
from octavo.wording import on_one_line

MAX_PREFIXES = 1024


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt or the beginning of a conversation (one of the two), and whether to pin it."""

    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    pin: bool = False


class Warmed(msgspec.Struct):
    """What became of one prefix. tokens: its length; cached: how many of them the cache had before; pinned: how
    many are pinned now; note: why fewer are than were asked for."""

    tokens: int
    cached: int = 0
    pinned: int = 0
    note: str = ""


def read_prefixes(path: str | Path) -> list[Prefix]:
    """The prefixes of a file. ConfigError names the file, the entry and what is wrong with it."""
    path = Path(path)
    where = f"--warm-prefixes {path}"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            entries = strict_yaml.load(text)
        elif path.suffix == ".json":
            entries = json.loads(text)
        else:
            entries = [line for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {on_one_line(error)}") from error
    return parse_prefixes(entries, where)


def parse_prefixes(entries: Any, where: str) -> list[Prefix]:
    """The prefixes of a parsed list. ConfigError names the entry, from 1, and what is wrong with it."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: must be a list of prompts or conversations, got {type(entries).__name__}")
    if len(entries) > MAX_PREFIXES:
        raise ConfigError(f"{where}: at most {MAX_PREFIXES} prefixes, got {len(entries)}")
    return [_parse(entry, f"{where}: entry {at}") for at, entry in enumerate(entries, 1)]


def _parse(entry: Any, where: str) -> Prefix:
    fields = entry if isinstance(entry, Mapping) else {"prompt": entry} if isinstance(entry, str) else {"messages": entry}
    unknown = set(fields) - {"prompt", "messages", "pin"}
    if unknown:
        raise ConfigError(f"{where}: unknown key {sorted(map(str, unknown))[0]!r}; there are prompt, messages and pin")
    prompt, messages, pin = fields.get("prompt"), fields.get("messages"), fields.get("pin", False)
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where}: needs either a prompt or messages")
    if not isinstance(pin, bool):
        raise ConfigError(f"{where}: pin must be true or false, got {pin!r}")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{where}: prompt must be a text that is not empty, got {prompt!r}")
        return Prefix(prompt=prompt, pin=pin)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ConfigError(f"{where}: messages must be a list of {{role, content}} that is not empty")
    return Prefix(messages=tuple(messages), pin=pin)


class PrefixCache:
    """The prefix cache of one engine, as its operator sees it. salt: see SchedulerParts; max_model_len bounds
    what pins may take: what they leave holds at least one request of that length. pins: those that come back when the
    cache was forgotten, which is the engine's work."""

    def __init__(self, allocator: Allocator, salt: Callable[[int], str], max_model_len: int) -> None:
        self._allocator, self._salt, self._max_model_len = allocator, salt, max_model_len
        self.pins = WantedPins(self._pin)

    def pin(self, tokens: Sequence[int]) -> Warmed:
        """Pin what is cached of a warmed prefix, until `unpin`."""
        ids = np.asarray(tokens, np.int32)
        pinned, leave = self._pin(ids), self._allocator.blocks(self._max_model_len)
        if pinned:
            self.pins.want(ids)
        return Warmed(len(ids), pinned=pinned, note="" if pinned else self._why_not(len(ids), leave))

    def _why_not(self, tokens: int, leave: int) -> str:
        if self._allocator.blocks(tokens + 1) == self._allocator.blocks(1):  # not one block of it is full
            return "it does not fill one KV block, and only whole blocks are kept: a prefix must be longer to be of use"
        return (
            f"nothing of it is cached, or the {self._allocator.usage().total} KV blocks less all pins would not hold the {leave} "
            f"of one request of {self._max_model_len} tokens any more"
        )

    def _pin(self, ids: np.ndarray) -> int:
        return self._allocator.pin(ids, PUBLIC, self._salt(len(ids) + 1), leave=self._allocator.blocks(self._max_model_len))

    def unpin(self, tokens: Sequence[int]) -> Warmed:
        """Undo `pin`; `pinned` is what was."""
        ids = np.asarray(tokens, np.int32)
        self.pins.let_go(ids)
        pinned = self._allocator.unpin(ids, PUBLIC, self._salt(len(ids) + 1))
        return Warmed(len(ids), pinned=pinned, note="" if pinned else "it was not pinned")

    def state(self) -> dict[str, Any]:
        """Numbers for people."""
        found = self._allocator.memory()
        queries = found["prefix_queries"]
        rate = found["prefix_hits"] / queries if queries else 0.0
        return {**found, "hit_rate": rate, "pins_returning": self.pins.returning}

    def reset(self, *, pins: bool = False) -> None:
        """Forget every prefix. What is pinned is computed again and pinned again; with `pins` that is forgotten too."""
        self._allocator.reset()
        if pins:
            self.pins.let_all_go()
        self.pins.forgotten()
