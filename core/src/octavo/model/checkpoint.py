"""Which tensors a checkpoint holds, and where: read from headers, before any weight is.

Owns the safetensors header format, the sharding index, and GGUF tensor sizes. Reads no tensor data
and never imports torch, so that sizes can be known in the server process.

safetensors layout (the published format): 8 bytes little-endian length of a JSON object, that object
(name -> dtype, shape, data_offsets relative to its end), then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.model.files import inside, pickles, read_json

if TYPE_CHECKING:
    from octavo.model.source import ModelSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit

DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8),
    "U64": ("uint64", 64), "U32": ("uint32", 32), "U16": ("uint16", 16), "U8": ("uint8", 8), "BOOL": ("bool", 8),
}  # fmt: skip
"""safetensors dtype -> (torch dtype name, bits an element)."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes of unquantised weights: what a declaration without `dtypes` accepts."""


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor of a checkpoint. dtype is a torch dtype name, or "gguf:<number>" for a GGML type;
    offset and nbytes locate the stored bytes in `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def checkpoint_headers(source: ModelSource) -> dict[str, Header]:
    """Every tensor of a source by checkpoint name, in file order. LoadError, naming the file and the tensor."""
    return gguf_headers(source.path) if source.kind == "gguf" else folder_headers(source.path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that the index names, else model.safetensors; nothing else is read."""
    index = folder / INDEX
    if index.exists() or index.is_symlink():
        inside(folder, INDEX, folder)
        return [inside(folder, name, index) for name in dict.fromkeys(_weight_map(index).values())]
    single = folder / SINGLE
    if single.exists() or single.is_symlink():
        return [inside(folder, SINGLE, folder)]
    found = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.glob("*.safetensors"))
    if found:
        raise LoadError(f"{folder}: there is no {INDEX} and no {SINGLE}; {', '.join(found)} would be a guess, and is not read")
    if stray := pickles(folder):
        raise LoadError(
            f"{folder}: the weights are pickles ({', '.join(stray[:4])}), which could run code and are never opened. "
            "Convert them to safetensors, or use a checkpoint that has it."
        )
    raise LoadError(f"{folder}: there are no weights: neither {SINGLE} nor {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: the key 'weight_map' is {str(weight_map)[:40]}; an object of tensor -> file is expected")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise LoadError(f"{index}: weight_map[{name!r}] is {file!r}, not a file name")
    return weight_map


def folder_headers(folder: Path) -> dict[str, Header]:
    """Headers of a safetensors folder, checked against its index."""
    files = weight_files(folder)
    headers: dict[str, Header] = {}
    for file in files:
        for header in safetensors_headers(file):
            if header.name in headers:
                other = headers[header.name].file.name
                raise LoadError(
                    f"{folder}: the tensor {header.name!r} is in both {other} and {file.name}: it would be filled twice"
                )
            headers[header.name] = header
    index = folder / INDEX
    if index.exists():
        for name, file_name in _weight_map(index).items():
            real = inside(folder, file_name, index)
            if name not in headers:
                raise LoadError(f"{index}: says that {name!r} is in {file_name!r}, which does not contain it")
            if headers[name].file != real:
                raise LoadError(f"{index}: says that {name!r} is in {file_name!r}, but it is in {headers[name].file.name!r}")
    return headers


def safetensors_headers(file: Path) -> list[Header]:
    """The tensors of one safetensors file in the order of their data, every number checked against the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as raw:
            start = raw.read(8)
            if start.startswith(b"version "):
                raise LoadError(f"{file}: this is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
                raise LoadError(
                    f"{file}: not a safetensors file, or cut off: {size} bytes, and a header of {length} is announced"
                )
            text = raw.read(length)
    except OSError as error:
        raise LoadError(f"{file}: cannot be read: {error.strerror or error}") from error
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file}: damaged safetensors header: {error}") from error
    if not isinstance(table, dict):
        raise LoadError(f"{file}: damaged safetensors header: a JSON {type(table).__name__}")
    data = 8 + length
    headers = sorted((_entry(file, n, e, data) for n, e in table.items() if n != "__metadata__"), key=lambda h: h.offset)
    at = data
    for header in headers:  # the format demands no holes and no overlaps
        if header.offset != at:
            raise LoadError(f"{file}: the data of {header.name!r} starts at byte {header.offset}; {at} is expected")
        at += header.nbytes
    if at != size:
        raise LoadError(f"{file}: has {size} bytes and its header describes {at}; the download is incomplete or damaged")
    return headers


def _entry(file: Path, name: str, entry: Any, data: int) -> Header:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
            raise ValueError(f"shape {shape} and offsets {begin}, {end}")
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{file}: damaged safetensors header at {name!r}: {error}") from error
    if code not in DTYPES:
        raise LoadError(f"{file}: the tensor {name!r} has the unknown dtype {code!r}")
    dtype, bits = DTYPES[code]
    if end - begin != math.prod(shape) * bits // 8:
        raise LoadError(f"{file}: the tensor {name!r} of {code} {shape} cannot have {end - begin} bytes")
    return Header(name, tuple(shape), dtype, file, data + begin, end - begin)


def gguf_headers(path: Path) -> dict[str, Header]:
    """Headers of a GGUF file under checkpoint names. rope_freqs is left out: it is part of the config."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    from octavo.model.gguf import ROPE_FREQS, checkpoint_name, family
    from octavo.model.gguf_file import read_gguf

    headers: dict[str, Header] = {}
    file = read_gguf(path)
    kind = family(file)
    for tensor in sorted(file.tensors, key=lambda t: t.offset):
        if tensor.name == ROPE_FREQS:
            continue
        name = checkpoint_name(tensor.name, kind) or tensor.name  # an unknown name is reported as unexpected by the loader
        try:
            block, stored = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        except (ValueError, KeyError):
            raise LoadError(f"{path}: the tensor {tensor.name!r} has the unknown GGML type {tensor.type}") from None
        if tensor.shape[-1] % block:
            raise LoadError(f"{path}: the tensor {tensor.name!r} has rows of {tensor.shape[-1]}, not a multiple of {block}")
        nbytes = math.prod(tensor.shape) // block * stored
        if tensor.offset + nbytes > file.size:
            raise LoadError(
                f"{path}: the tensor {tensor.name!r} ends past the file's {file.size} bytes; the download is incomplete"
            )
        if name in headers:
            raise LoadError(f"{path}: two tensors are called {name!r}: it would be filled twice")
        headers[name] = Header(name, tensor.shape, f"gguf:{tensor.type}", path, tensor.offset, nbytes)
    return headers
