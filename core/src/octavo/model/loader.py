"""Filling a model with its weights: every declared tensor exactly once, or not at all.

Owns `WeightTable` (what the layers asked for) and `load_weights` (asked against found, then filled).
All checks are made on headers, before a single weight is read or any memory for it is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.model.checkpoint import FLOATS, Header, checkpoint_headers
from octavo.model.readers import dequantisable, dummies, read_gguf, read_safetensors
from octavo.model.source import ModelSource

log = logging.getLogger(__name__)

Fill = Callable[[Tensor], None]
Progress = Callable[[int, int], None]
"""Called with the stored bytes done so far and in total; done never falls."""
_SHOWN = 5  # names listed in an error before "and N more"


@dataclass(slots=True)
class _Wish:
    shape: tuple[int, ...] | None
    fill: Fill
    optional: bool
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: tensors filled, bytes handed to layers, names skipped on purpose, seconds."""

    tensors: int
    nbytes: int
    skipped: tuple[str, ...]
    seconds: float


class WeightTable:
    """`octavo.interfaces.Weights`: the checkpoint tensors that the layers of one model want.

    Layers declare while the model is built; nothing is allocated by it. The tensor that a fill gets
    is on the CPU and is the receiver's to keep; it has the checkpoint's dtype (the load's dtype where
    it was dequantised), so a layer casts as it copies.
    """

    def __init__(self) -> None:
        self._wishes: dict[str, _Wish] = {}
        self._filled: set[str] = set()

    def declare(
        self, name: str, shape: tuple[int, ...] | None, fill: Fill, *, optional: bool = False, dtypes: tuple[str, ...] = ()
    ) -> None:
        """Ask for the checkpoint tensor `name`. shape None: any. dtypes: accepted torch dtype names; ()
        means unquantised floats. LoadError if the name was declared before: two layers would share it
        and one of them would stay empty."""
        if name in self._wishes:
            raise LoadError(f"the checkpoint tensor {name!r} was declared twice: every tensor goes to exactly one place")
        self._wishes[name] = _Wish(None if shape is None else tuple(shape), fill, optional, dtypes)

    def __len__(self) -> int:
        return len(self._wishes)

    def __contains__(self, name: object) -> bool:
        return name in self._wishes

    def match(self, headers: Mapping[str, Header], where: str, *, ignored: Callable[[str], bool], tied: bool) -> list[Header]:
        """The headers to read, in file order. LoadError that lists everything wrong at once."""
        plan: list[Header] = []
        skipped: list[str] = []
        unexpected: list[str] = []
        wrong: list[str] = []
        for header in headers.values():
            wish = self._wishes.get(header.name)
            if wish is not None:
                wrong.extend(_misfit(header, wish))
                plan.append(header)
            elif tied and header.name.startswith("lm_head."):
                skipped.append(header.name)
            elif not ignored(header.name):
                unexpected.append(header.name)
        missing = [name for name, wish in self._wishes.items() if not wish.optional and name not in headers]
        problems = list(wrong[:_SHOWN])
        if len(wrong) > _SHOWN:
            problems.append(f"and {len(wrong) - _SHOWN} more like these")
        if missing:
            hint = ""
            if "lm_head.weight" in missing:
                hint = "; the config does not tie the head to the embedding (tie_word_embeddings), so it needs its own weight"
            problems.append(f"missing: {_names(missing)}{hint}")
        if unexpected:
            problems.append(
                f"unexpected: {_names(unexpected)}; the model has no place for them, so it is another architecture or format"
            )
        if problems:
            raise LoadError(f"{where} does not fit the model:\n  " + "\n  ".join(problems))
        if skipped:
            log.warning(
                "%s: %s ignored: the config ties the output head to the embedding (tie_word_embeddings)",
                where,
                ", ".join(skipped),
            )
        return plan

    def wanted(self, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """What a dummy checkpoint must hold: (name, shape, dtype name) of every tensor that is not optional."""
        out = []
        for name, wish in self._wishes.items():
            if wish.optional:
                continue
            if wish.shape is None:
                raise LoadError(f"load_format=dummy: {name!r} was declared without a shape, so there is nothing to make up")
            out.append((name, wish.shape, dtype if not wish.dtypes or dtype in wish.dtypes else wish.dtypes[0]))
        return out

    def fill(self, name: str, tensor: Tensor) -> None:
        """Hand a tensor to its layer. LoadError if it was handed over before."""
        if name in self._filled:
            raise LoadError(f"the checkpoint tensor {name!r} was filled twice")
        self._filled.add(name)
        self._wishes[name].fill(tensor)

    def verify(self) -> None:
        """LoadError unless every tensor that is not optional has been filled. The last step of a load."""
        empty = [name for name, wish in self._wishes.items() if not wish.optional and name not in self._filled]
        if empty:
            raise LoadError(f"not filled: {_names(empty)}")


def _misfit(header: Header, wish: _Wish) -> Iterator[str]:
    if wish.shape is not None and header.shape != wish.shape:
        yield f"{header.name} has the shape {list(header.shape)} in {header.file.name}, the model needs {list(wish.shape)}"
    if header.dtype.startswith("gguf:"):
        number = int(header.dtype.removeprefix("gguf:"))
        if wish.dtypes and not set(wish.dtypes) & set(FLOATS):
            yield f"{header.name} comes from GGUF as floats, the layer needs {' or '.join(wish.dtypes)}"
        elif not dequantisable(number):
            yield f"{header.name} is stored as GGML type {number}, which cannot be dequantised"
    elif header.dtype not in (wish.dtypes or FLOATS):
        need = " or ".join(wish.dtypes) if wish.dtypes else "an unquantised float"
        yield f"{header.name} is {header.dtype} in {header.file.name}, the layer needs {need}"


def _names(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def load_weights(
    source: ModelSource,
    table: WeightTable,
    dtype: str,
    *,
    tied: bool = False,
    ignored: Callable[[str], bool] = lambda name: False,
    canonical: Callable[[str], str] = lambda name: name,
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto",
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total: None,
) -> LoadReport:
    """Fill every declared tensor exactly once.

    dtype is the torch dtype name that dequantised and dummy tensors get; stored tensors keep theirs.
    tied: the model's head shares the embedding, so that an lm_head in the checkpoint is skipped with
    a warning. ignored: names that the architecture knows and does not use (ModelAdapter.ignored). canonical: of the names
    that checkpoints of the architecture use for one tensor, the one that the model declares (CanonicalNames.canonical).
    device is where dummies are made; stored tensors come on the CPU. progress is called with stored bytes,
    before the first tensor and after each. LoadError before any weight is read if the checkpoint does not fit.
    """
    begun = time.monotonic()
    target: torch.dtype = getattr(torch, dtype)
    tensors: Iterator[tuple[str, Tensor]]
    skipped: list[str] = []
    if load_format == "dummy":
        wanted = table.wanted(dtype)
        sizes = {name: _bytes(shape, kind) for name, shape, kind in wanted}
        tensors = dummies(wanted, seed, device)
    else:
        stored = "gguf" if source.kind == "gguf" else "safetensors"
        if load_format not in ("auto", stored):
            raise LoadError(f"{source.path}: load_format is {load_format!r}, but the weights are {stored}")
        headers, plan = match_checkpoint(source, table, tied=tied, ignored=ignored, canonical=canonical)
        chosen = {h.name for h in plan}
        skipped = [name for name in headers if name not in chosen]
        sizes = {h.name: h.nbytes for h in plan}
        tensors = read_gguf(source.path, plan, target) if source.kind == "gguf" else read_safetensors(plan)
    total, done, count, nbytes = sum(sizes.values()), 0, 0, 0
    progress(0, total)
    with _one_thread():
        for name, tensor in tensors:
            size = tensor.nbytes
            table.fill(name, tensor)
            del tensor  # a layer that copied it lets the memory go before the next one is read
            count, nbytes, done = count + 1, nbytes + size, done + sizes[name]
            progress(done, total)
    table.verify()
    return LoadReport(count, nbytes, tuple(skipped), time.monotonic() - begun)


def match_checkpoint(
    source: ModelSource,
    table: WeightTable,
    *,
    tied: bool,
    ignored: Callable[[str], bool],
    canonical: Callable[[str], str] = lambda name: name,
) -> tuple[dict[str, Header], list[Header]]:
    """(all headers of the checkpoint by their canonical names, those to read in file order). Reads no weights. LoadError that
    lists everything that does not fit. The parameters are those of `load_weights`."""
    headers = _renamed(checkpoint_headers(source), canonical)
    return headers, table.match(headers, str(source.path), ignored=ignored, tied=tied)


def _renamed(headers: Mapping[str, Header], canonical: Callable[[str], str]) -> dict[str, Header]:
    """Headers under their canonical names. LoadError where two tensors claim one."""
    found: dict[str, Header] = {}
    for name, header in headers.items():
        new = canonical(name)
        if new in found:
            raise LoadError(f"{header.file.name}: {name!r} is another name of {new!r}, which the checkpoint has already")
        found[new] = header if new == name else replace(header, name=new)
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies on one thread: memory bounds them, and on a busy machine every meeting of threads costs
    milliseconds (the demo: 1.3 s on one thread; 10 s on two, with two cores that are taken)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return torch.Size(shape).numel() * kind.itemsize
