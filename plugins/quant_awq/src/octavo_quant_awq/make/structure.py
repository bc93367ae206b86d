"""What lies around each quantised matrix of a decoder: what its scale can be folded into, and by what output it is judged.

Owns the reading of module names, which are those of transformers' decoders. A name that is not known costs quality, never
correctness: such a matrix is rounded without a scale. So are gate and up of experts, whose input all experts and the router share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Module:
    """One checkpoint matrix [rows, inputs], as `X.weight`."""

    name: str
    rows: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that share one input. fold: what its scale goes into: "norm" (the tensor `source`), "rows" (the last rows of
    the module `source`), None (no scale). judge: the first module of the group whose output says how good a scale is: its
    own, or where attention or MLP ends. repeat: how many inputs one row feeds, `width` apart: the heads that share a v head
    under GQA, which must have one scale."""

    modules: tuple[Module, ...]
    fold: Literal["norm", "rows"] | None = None
    source: str = ""
    judge: str = ""
    repeat: int = 1
    width: int = 1

    @property
    def key(self) -> str:
        return self.modules[0].name

    @property
    def inputs(self) -> int:
        return self.modules[0].inputs

    def tied(self, values: Tensor) -> Tensor:
        """[inputs] -> [inputs]: the mean of those that one row feeds, for each of them."""
        shared = values.view(-1, self.repeat, self.width)
        return shared.mean(1, keepdim=True).expand_as(shared).flatten()

    def of_rows(self, scale: Tensor) -> Tensor:
        """[inputs] -> [rows that feed them]: a scale that is tied, once for each row."""
        return scale.view(-1, self.repeat, self.width)[:, 0].flatten()

    @property
    def clipped(self) -> tuple[Module, ...]:
        """Modules whose ranges may be cut: not q and k, whose products are between themselves."""
        ends = ("q_proj", "k_proj", "qkv_proj")
        return tuple(m for m in self.modules if not m.name.endswith(ends))


_STARTS = {"q_proj": "o_proj", "qkv_proj": "o_proj", "gate_proj": "down_proj", "gate_up_proj": "down_proj"}


def describe(linears: Sequence[tuple[Module, ...]], norms: Collection[str], v: tuple[int, int]) -> tuple[Group, ...]:
    """The group of each Linear. norms: names of the model's other tensors; v: (heads, width) of the values."""
    modules = {m.name: m for linear in linears for m in linear}
    return tuple(_group(linear, modules, norms, *v) for linear in linears)


def _group(linear: tuple[Module, ...], modules: dict[str, Module], norms: Collection[str], v_heads: int, v_width: int) -> Group:
    first = linear[0]
    owner, _, part = first.name.rpartition(".")
    layer, _, block = owner.rpartition(".")
    if part in _STARTS:
        names = ("input_layernorm",) if block == "self_attn" else ("pre_feedforward_layernorm", "post_attention_layernorm")
        norm = next((n for n in (f"{layer}.{name}.weight" for name in names) if n in norms), "")
        judge = f"{owner}.{_STARTS[part]}"
        if norm and judge in modules:
            return Group(linear, "norm", norm, judge)
    if part in ("down_proj", "w2"):  # w1, w2 and w3: an expert of Mixtral
        source = next((n for n in (f"{owner}.up_proj", f"{owner}.gate_up_proj", f"{owner}.w3") if n in modules), "")
        if source:
            return Group(linear, "rows", source, first.name)
    if part == "o_proj":
        source = next((n for n in (f"{owner}.v_proj", f"{owner}.qkv_proj") if n in modules), "")
        rows = v_heads * v_width
        if source and first.inputs % rows == 0:
            return Group(linear, "rows", source, first.name, first.inputs // rows, v_width)
    return Group(linear)
