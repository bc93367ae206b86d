"""What lies around each quantised matrix of a decoder: what its scale can be folded into, and by what output it is judged.

Owns the reading of module names, which are those of transformers' decoders. A name that is not known costs quality, never
correctness: such a matrix is rounded without a scale.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Module:
    """One checkpoint matrix [rows, inputs], as `X.weight`."""

    name: str
    rows: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that share one input. fold: what its scale goes into: "norm" (the tensor `source`), "rows" (the last rows of
    the module `source`, as many as there are inputs), None (no scale). judge: the first module of the group whose output
    says how good a scale is: its own, or where attention or MLP ends."""

    modules: tuple[Module, ...]
    fold: Literal["norm", "rows"] | None = None
    source: str = ""
    judge: str = ""

    @property
    def key(self) -> str:
        return self.modules[0].name

    @property
    def inputs(self) -> int:
        return self.modules[0].inputs

    @property
    def clipped(self) -> tuple[Module, ...]:
        """Modules whose ranges may be cut: not q and k, whose products are between themselves."""
        ends = ("q_proj", "k_proj", "qkv_proj")
        return tuple(m for m in self.modules if not m.name.endswith(ends))


_STARTS = {"q_proj": "o_proj", "qkv_proj": "o_proj", "gate_proj": "down_proj", "gate_up_proj": "down_proj"}


def describe(linears: Sequence[tuple[Module, ...]], norms: Collection[str]) -> tuple[Group, ...]:
    """The group of each Linear. norms: names of the model's other tensors."""
    modules = {m.name: m for linear in linears for m in linear}
    return tuple(_group(linear, modules, norms) for linear in linears)


def _group(linear: tuple[Module, ...], modules: dict[str, Module], norms: Collection[str]) -> Group:
    first = linear[0]
    owner, _, part = first.name.rpartition(".")
    layer, _, block = owner.rpartition(".")
    if part in _STARTS:
        names = ("input_layernorm",) if block == "self_attn" else ("pre_feedforward_layernorm", "post_attention_layernorm")
        norm = next((n for n in (f"{layer}.{name}.weight" for name in names) if n in norms), "")
        judge = f"{owner}.{_STARTS[part]}"
        if norm and judge in modules:
            return Group(linear, "norm", norm, judge)
    if part == "down_proj":
        source = next((n for n in (f"{owner}.up_proj", f"{owner}.gate_up_proj") if n in modules), "")
        if source:
            return Group(linear, "rows", source, first.name)
    if part == "o_proj":
        # under GQA one v row feeds several inputs of o, which cannot have scales of their own
        v = modules.get(f"{owner}.v_proj")
        if v is not None and v.rows == first.inputs:
            return Group(linear, "rows", v.name, first.name)
    return Group(linear)
