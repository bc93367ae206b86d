"""The container of a GGUF file: its metadata and where each tensor lies.

Owns the byte layout of GGUF versions 2 and 3 and every bound check on it. Knows nothing about
architectures, tokenizers or torch, and reads no tensor data. It exists because the `gguf` package's
own reader takes two seconds to open a file with a vocabulary of 49,000; this one takes a twentieth.

Layout (the published GGUF specification): magic, version, counts; then key-value pairs; then tensor
descriptions; then, aligned, the data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from octavo.errors import LoadError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_FIRST_READ = 8 << 20  # most headers fit; the read grows for larger vocabularies


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's description. shape is in row-major order (rows first), the reverse of the file's;
    type is GGML's number; offset is from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GGUFFile:
    """A parsed header. metadata values are int, float, bool, str or list of these."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    size: int

    def require(self, key: str, kind: type | tuple[type, ...] = object) -> Any:
        """The value of `key`. LoadError, naming file and key, if it is absent or of another type."""
        if key not in self.metadata:
            raise LoadError(f"{self.path}: the GGUF metadata has no key {key!r}, which this file's kind needs")
        return self.get(key, None, kind)

    def get(self, key: str, default: Any = None, kind: type | tuple[type, ...] = object) -> Any:
        """The value of `key`, or `default` if it is absent. LoadError if it is of another type."""
        value = self.metadata.get(key, default)
        if key in self.metadata and not isinstance(value, kind):
            raise LoadError(f"{self.path}: the GGUF key {key!r} has the value {str(value)[:60]!r} of type {type(value).__name__}")
        return value


class _Short(Exception):
    """The header goes on past the bytes read so far."""


class _Cursor:
    """Reads little-endian values; raises _Short past the end of what was read."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.at, self.size = data, 0, size

    def take(self, count: int) -> int:
        """Advance by `count` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            raise ValueError(f"a value of {count} bytes at offset {start} reaches past the end of the file ({self.size} bytes)")
        if start + count > len(self.data):
            raise _Short
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        fmt = "<" + code
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def texts(self, count: int) -> list[str]:
        # A vocabulary and its merges are 100,000 strings: this loop is the cost of opening a file.
        data, at, end, unpack = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        out: list[str] = []
        append = out.append
        for _ in range(count):
            if at + 8 > end:
                raise _Short
            stop = at + 8 + unpack(data, at)[0]
            if stop > end:
                if stop > self.size:
                    raise ValueError(f"a string at offset {at} reaches past the end of the file ({self.size} bytes)")
                raise _Short
            append(data[at + 8 : stop].decode("utf-8", errors="replace"))
            at = stop
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind} at offset {self.at}")
        item, count = self.scalar("I"), self.scalar("Q")
        least = 8 if item == _STRING else struct.calcsize("<" + _SCALARS[item]) if item in _SCALARS else 0
        if not least:
            raise ValueError(f"an array of value type {item} at offset {self.at}")
        if count * least > self.size - self.at:
            raise ValueError(f"an array of {count} values at offset {self.at} reaches past the end of the file")
        if item == _STRING:
            return self.texts(count)
        dtype = np.dtype("<" + _SCALARS[item]) if item != 7 else np.dtype("bool")
        start = self.take(count * least)
        return np.frombuffer(self.data, dtype, count, start).tolist()


def _parse(cursor: _Cursor, path: Path) -> GGUFFile:
    cursor.take(4)
    version = cursor.scalar("I")
    if version & 0xFFFF == 0:
        raise ValueError("the file is big-endian, which is not supported")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (2 and 3 are); convert the model again")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    raw: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, dims = cursor.text(), cursor.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))
        raw.append((name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    names = [name for name, *_ in raw]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice!r} is there twice")
    for name, _, _, offset in raw:
        if offset % alignment or start + offset > cursor.size:
            raise ValueError(f"tensor {name!r} starts at {start + offset}, outside the file ({cursor.size} bytes) or unaligned")
    tensors = tuple(GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in raw)
    return GGUFFile(path, version, metadata, tensors, cursor.size)


_HELD: WeakValueDictionary[tuple[Path, int, int], GGUFFile] = WeakValueDictionary()
"""Headers that somebody still holds, by path, size and time of writing: a vocabulary takes long to parse."""


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse the header of a GGUF file, once for as long as anybody holds it. LoadError, naming the file and what is wrong in it."""
    path = Path(path)
    try:
        state = path.stat()
        key = (path.absolute(), state.st_size, state.st_mtime_ns)
        found = _HELD.get(key)
        if found is None:
            found = _HELD[key] = _read(path, state.st_size)
        return found
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(path: Path, size: int) -> GGUFFile:
    try:
        with path.open("rb") as file:
            data = file.read(_FIRST_READ)
            if data[:4] != MAGIC:
                hint = " It is a Git LFS pointer: fetch the real file." if data.startswith(b"version https://git-lfs") else ""
                raise LoadError(f"{path}: not a GGUF file (it starts with {data[:4]!r}).{hint}")
            while True:
                try:
                    return _parse(_Cursor(data, size), path)
                except _Short:
                    more = file.read(len(data))
                    if not more:
                        raise LoadError(
                            f"{path}: the GGUF header is cut off at {size} bytes; the download is incomplete"
                        ) from None
                    data += more
    except (ValueError, struct.error) as error:
        raise LoadError(f"{path}: damaged GGUF header: {error}") from error
