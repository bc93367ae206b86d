"""Tensors out of files: raw safetensors bytes, dequantised GGUF blocks, or random dummies.

Owns how stored bytes become torch tensors. Every tensor is read into memory of its own, one at a
time (no file is mapped), so that a load needs the final weights plus one tensor. Headers come from
`octavo.model.checkpoint` and are trusted here: it has checked them against the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.model.checkpoint import Header

_CHUNK = 1 << 16  # elements dequantised at once: float32 chunks stay in the second-level cache


def read_safetensors(headers: Iterable[Header]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they are stored: dtype and shape untouched, on the CPU, owned by the receiver."""
    with _Files() as files:
        for header in headers:
            yield header.name, _stored(files, header)  # no local name: it would keep the tensor while the next is read


def read_gguf(path: Path, headers: Iterable[Header], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Dequantised tensors of `dtype`, rows in checkpoint order, on the CPU, owned by the receiver.

    The arithmetic is the `gguf` package's in float32, rounded once to `dtype`.
    """
    from octavo.model.gguf import checkpoint_name, family, row_order, stored_offset
    from octavo.model.gguf_file import read_gguf as read_header

    file = read_header(path)
    kind = family(file)
    tensors = {checkpoint_name(t.name, kind): t for t in file.tensors}
    with _Files() as files:
        for header in headers:
            order = row_order(file, tensors[header.name])
            if offset := stored_offset(header.name, kind):
                yield header.name, _dequantised(files, header, torch.float32, order).sub_(offset).to(dtype)
            else:
                yield header.name, _dequantised(files, header, dtype, order)


def _stored(files: _Files, header: Header) -> Tensor:
    raw = torch.empty(header.nbytes, dtype=torch.uint8)
    files.read(header, 0, raw.numpy())
    return raw.view(getattr(torch, header.dtype)).reshape(header.shape)


def dequantisable(kind: int) -> bool:
    """Whether a GGML type can be turned into floats."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8), GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True


def _dequantised(files: _Files, header: Header, dtype: torch.dtype, order: np.ndarray | None) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(int(header.dtype.removeprefix("gguf:")))
    plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}.get(kind)
    out = torch.empty(header.shape, dtype=dtype)
    rows = out.view(-1, 1) if out.ndim == 1 and order is not None else out.view(-1, header.shape[-1])
    count, width = rows.shape
    stored = header.nbytes // count  # bytes a row
    step = max(1, _CHUNK // width)
    buffer = np.empty((step, stored), dtype=np.uint8)
    places = None if order is None else torch.from_numpy(order)
    for start in range(0, count, step):
        part = buffer[: min(step, count - start)]
        files.read(header, start * stored, part.reshape(-1))
        # as one long row: the package computes sixteen rows at a time, and short rows take longer to part than to compute
        flat = part.reshape(1, -1)
        values = (flat.view(plain).astype(np.float32) if plain else dequantize(flat, kind)).reshape(len(part), width)
        chunk = torch.from_numpy(values)
        if places is None:
            rows[start : start + len(part)].copy_(chunk)
        else:
            rows[places[start : start + len(part)]] = chunk.to(dtype)
    return out


def dummies(
    declared: Iterable[tuple[str, tuple[int, ...], str]], seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Random tensors (name, shape, torch dtype name), the same for the same seed, name and type of device.
    Made on `device`: a GPU draws eight billion numbers in the time that a CPU draws fifty million.

    Norms are near one and everything else small, so that activations stay finite; scales of
    quantised formats are a positive constant. Integers are random bits, but those of 64 bits are numbers of things, such as a
    token's experts: 0, 1, 2, ... along the last dimension.
    """
    for name, shape, dtype in declared:
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        kind: torch.dtype = getattr(torch, dtype)
        last = name.rsplit(".", 1)[-1]
        if kind is torch.int64:
            yield name, torch.arange(shape[-1], device=device).expand(shape).contiguous()
        elif not kind.is_floating_point:
            top = 2 if kind is torch.bool else 256
            raw = torch.randint(0, top, (*shape, max(1, kind.itemsize)), dtype=torch.uint8, generator=generator, device=device)
            yield name, raw.view(kind).reshape(shape)
        elif "scale" in last:
            yield name, torch.full(shape, 0.01, device=device).to(kind)
        else:
            noise = torch.randn(shape, generator=generator, device=device).mul_(0.02)
            yield name, (noise.add_(1.0) if "norm" in name else noise).to(kind)


class _Files:
    """Files that stay open while tensors of theirs are read, one at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: FileIO | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, header: Header, skip: int, into: np.ndarray) -> None:
        """Fill `into` (uint8, contiguous) with the bytes of a tensor from `skip` on."""
        if header.file != self._path or self._file is None:
            self.__exit__()
            self._path, self._file = header.file, FileIO(str(header.file))
        self._file.seek(header.offset + skip)
        view, at = into.data, 0
        while at < len(view):
            got = self._file.readinto(view[at:])
            if not got:
                raise LoadError(f"{header.file}: ends inside the tensor {header.name!r}; it changed while it was read")
            at += got
