"""The layouts that checkpoints store 4-bit matrices in: their tensors' names and shapes, and their integers.

Owns the refusals that shapes justify, by layer and with the numbers. A layout answers for one checkpoint module [out, in];
each of its tensors is read for itself and in slices of output rows, so that nobody needs the whole matrix in wider integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from octavo.errors import LoadError
from torch import Tensor

from octavo_quant_awq.packing import INVERSE, pack, unpack
from octavo_quant_awq.settings import Scheme

INT32, INT64, HALVES = ("int32",), ("int64",), ("float16", "bfloat16")
Part = Literal["q", "zeros", "scales", "check"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a module: what of the matrix it holds ("check": nothing, it is only compared), shape and dtypes."""

    part: Part
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Format(Protocol):
    """Tensors of a module [rows, inputs] by the end of their names, and how to read slices [start, stop) of its rows."""

    def tensors(self, rows: int, inputs: int, group: int) -> Mapping[str, Stored]: ...

    def q(self, stored: Tensor, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, inputs]; inputs may be padded at the end."""

    def zeros(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        """uint8 [rows, groups], the z of (q - z) * s."""

    def scales(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        """[rows, groups], dtype as stored."""

    def check(self, name: str, stored: Tensor, rows: int, inputs: int, group: int) -> None:
        """LoadError if a tensor that only confirms says otherwise."""


class Gemm:
    """AutoAWQ "gemm": packed along outputs in AWQ's order; everything is [inputs or groups, outputs]."""

    def tensors(self, rows: int, inputs: int, group: int) -> Mapping[str, Stored]:
        groups = inputs // group
        return {
            "qweight": Stored("q", (inputs, rows // 8), INT32),
            "qzeros": Stored("zeros", (groups, rows // 8), INT32),
            "scales": Stored("scales", (groups, rows), HALVES),
        }

    def q(self, stored: Tensor, start: int, stop: int) -> Tensor:
        return unpack(stored[:, start // 8 : -(-stop // 8)], INVERSE)[:, start % 8 :][:, : stop - start].T.contiguous()

    def zeros(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return unpack(stored, INVERSE).T

    def scales(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return stored.T

    def check(self, name: str, stored: Tensor, rows: int, inputs: int, group: int) -> None:
        raise AssertionError("this layout has no tensor that only confirms")


class Gemv(Gemm):
    """AutoAWQ "gemv": packed along inputs in sequence; groups padded to whole words, and those rounded up."""

    @staticmethod
    def padded(inputs: int, group: int) -> int:
        """Words that hold the zero points of a row: enough for its groups, rounded up to 1, 2 or 4 for groups of at least
        128, 64 or 32 inputs."""
        multiple = 1 if group >= 128 else 2 if group == 64 else 4
        words = -(-(inputs // group) // 8)
        return -(-words // multiple) * multiple

    def tensors(self, rows: int, inputs: int, group: int) -> Mapping[str, Stored]:
        words = self.padded(inputs, group)
        return {
            "qweight": Stored("q", (rows, inputs // 8), INT32),
            "qzeros": Stored("zeros", (rows, words), INT32),
            "scales": Stored("scales", (rows, words * 8), HALVES),
        }

    def q(self, stored: Tensor, start: int, stop: int) -> Tensor:
        return unpack(stored[start:stop])

    def zeros(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return unpack(stored)[:, :groups]

    def scales(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return stored[:, :groups]


class Gptq(Gemm):
    """Symmetric GPTQ: packed in sequence, weights along inputs and zero points along outputs. Zero points are stored, all of
    them 8; the first version of the format stores z - 1."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def tensors(self, rows: int, inputs: int, group: int) -> Mapping[str, Stored]:
        groups = inputs // group
        return {
            "qweight": Stored("q", (inputs // 8, rows), INT32),
            "qzeros": Stored("check", (groups, rows // 8), INT32, optional=True),
            "scales": Stored("scales", (groups, rows), HALVES),
            "g_idx": Stored("check", (inputs,), INT32, optional=True),
        }

    def q(self, stored: Tensor, start: int, stop: int) -> Tensor:
        return unpack(stored[:, start:stop].T.contiguous())

    def check(self, name: str, stored: Tensor, rows: int, inputs: int, group: int) -> None:
        if name.endswith(".qzeros"):
            zeros = unpack(stored) + self._offset
            if not bool((zeros == 8).all()):
                where, row = (int(i) for i in (zeros != 8).nonzero()[0])
                raise LoadError(
                    f"{name}: the zero point of output {row} in group {where} is {int(zeros[where, row])}, and the config's sym "
                    "says that all are 8"
                )
            return
        right = torch.arange(inputs, device=stored.device) // group
        if not torch.equal(stored.to(right.dtype), right):
            at = int((stored != right).nonzero()[0])
            raise LoadError(
                f"{name}: input {at} is of group {int(stored[at])}, not {at // group}: weights in the order of activations "
                "(act-order) are not read"
            )


class Packed(Gemm):
    """compressed-tensors pack-quantized: in sequence, weights along inputs and zero points along outputs."""

    def __init__(self, zeros: bool) -> None:
        self._zeros = zeros

    def tensors(self, rows: int, inputs: int, group: int) -> Mapping[str, Stored]:
        groups = inputs // group
        stored = {
            "weight_packed": Stored("q", (rows, -(-inputs // 8)), INT32),
            "weight_scale": Stored("scales", (rows, groups), HALVES),
            "weight_shape": Stored("check", (2,), INT64, optional=True),
        }
        if self._zeros:
            stored["weight_zero_point"] = Stored("zeros", (rows // 8, groups), INT32)
        return stored

    def q(self, stored: Tensor, start: int, stop: int) -> Tensor:
        return unpack(stored[start:stop])

    def zeros(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return unpack(stored.T.contiguous()).T

    def scales(self, stored: Tensor, rows: int, groups: int) -> Tensor:
        return stored

    def check(self, name: str, stored: Tensor, rows: int, inputs: int, group: int) -> None:
        if stored.tolist() != [rows, inputs]:
            raise LoadError(f"{name} says that the matrix is {stored.tolist()}; the model needs [{rows}, {inputs}]")


def format_of(scheme: Scheme) -> Format:
    """The layout of a scheme."""
    if scheme.layout in ("gptq", "gptq_v2"):
        return Gptq(1 if scheme.layout == "gptq" else 0)
    return {"gemm": Gemm(), "gemv": Gemv(), "pack": Packed(scheme.zeros)}[scheme.layout]


def check_shape(name: str, scheme: Scheme, rows: int, inputs: int) -> int:
    """The inputs of one group of the module. LoadError, by name and number, if the layout cannot hold [rows, inputs]."""
    group = inputs if scheme.group == -1 else scheme.group
    if inputs % group:
        raise LoadError(
            f"{name}: its {inputs} inputs do not divide into groups of {group}; a checkpoint with a group_size of "
            f"{fitting(inputs)} would, or leave the module unquantised (modules_to_not_convert)"
        )
    if scheme.layout != "pack" and inputs % 8:
        raise LoadError(f"{name}: {inputs} inputs are not a multiple of 8, so they do not fill words of eight 4-bit numbers")
    if rows % 8 and (scheme.zeros or scheme.layout.startswith("gptq")) and scheme.layout != "gemv":
        raise LoadError(f"{name}: {rows} outputs are not a multiple of 8, so they do not fill words of eight 4-bit numbers")
    return group


def check_shard(name: str, inputs: int, group: int, size: int) -> int:
    """Inputs of each of `size` equal shards of a module whose inputs are divided. LoadError, which names shard counts that
    would do, if a border would lie inside a group."""
    if inputs % size or (inputs // size) % group:
        good = [n for n in range(1, inputs // group + 1) if (inputs // group) % n == 0]
        raise LoadError(
            f"{name}: {inputs} inputs in groups of {group} cannot be divided among {size}: a border would lie inside a group. "
            f"A tensor-parallel size of {', '.join(map(str, good))} would do"
        )
    return inputs // size


def fitting(inputs: int) -> str:
    """ "64 or 32 or -1": the group sizes that divide so many inputs."""
    return " or ".join(str(g) for g in (128, 64, 32, -1) if g == -1 or inputs % g == 0)


def gemm_tensors(q: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """The tensors of an AutoAWQ gemm module, by the end of their names: q uint8 [out, in], scales [out, groups], zeros uint8
    [out, groups]. The inverse of `Gemm`."""
    return {
        "qweight": pack(q.T.contiguous(), INVERSE),
        "qzeros": pack(zeros.T.contiguous(), INVERSE),
        "scales": scales.T.contiguous().to(torch.float16),
    }
