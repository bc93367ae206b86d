"""4-bit checkpoints written from their definition, number by number, for the tests of quant_awq: nothing of the plugin's is used.

A matrix is q and z in 0..15 and s: w = (q - z) * s. `LAYOUTS` writes it as each of the checkpoint layouts does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from octavo.testing.quantizer import Stored
from torch import Tensor

SOURCE = str(Path(__file__).parents[2] / "plugins" / "quant_awq" / "src")
if SOURCE not in sys.path:
    sys.path.insert(0, SOURCE)

PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a gemm word holds this column of its eight


@dataclass(frozen=True)
class Integers:
    """q int64 [out, in], z int64 [out, groups] (8 everywhere: symmetric), s float16 [out, groups]."""

    q: np.ndarray
    z: np.ndarray
    s: np.ndarray
    group: int

    @property
    def weight(self) -> Tensor:
        spread = lambda v: np.repeat(v, self.group, 1)[:, : self.q.shape[1]]  # noqa: E731
        return torch.from_numpy((self.q - spread(self.z)).astype(np.float64) * spread(self.s.astype(np.float64)))


def rounded(weight: Tensor, group: int, *, symmetric: bool = False) -> Integers:
    """Round to nearest, in groups of `group` inputs (-1: all)."""
    rows, inputs = weight.shape
    group = inputs if group == -1 else group
    w = weight.double().numpy().reshape(rows, -1, group)
    low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    if symmetric:
        s = (np.abs(w).max(-1) / 7.5).astype(np.float16)
        z = np.full(s.shape, 8)
    else:
        s = (np.maximum(high - low, 1e-5) / 15).astype(np.float16)
        z = np.clip(np.round(-low / s.astype(np.float64)), 0, 15).astype(np.int64)
    q = np.clip(np.round(w / s.astype(np.float64)[..., None]) + z[..., None], 0, 15).astype(np.int64)
    return Integers(q.reshape(rows, inputs), z, s, group)


def words(nibbles: np.ndarray, place: Mapping[int, int] | None = None) -> Tensor:
    """int [rows, 8 n] -> int32 [rows, n]: element e of eight goes to nibble place[e] (default: its own)."""
    total = np.zeros((nibbles.shape[0], nibbles.shape[1] // 8), dtype=np.uint32)
    for element in range(8):
        total |= nibbles[:, element::8].astype(np.uint32) << np.uint32(4 * (place[element] if place else element))
    return torch.from_numpy(total.view(np.int32))


def padded(values: np.ndarray, width: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def gemm(m: Integers) -> dict[str, Tensor]:
    place = {column: nibble for nibble, column in enumerate(AWQ_COLUMN)}
    return {"qweight": words(m.q.T, place), "qzeros": words(m.z.T, place), "scales": torch.from_numpy(m.s.T.copy())}


def gemv(m: Integers) -> dict[str, Tensor]:
    multiple = {128: 1, 64: 2, 32: 4}.get(m.group, 1)
    width = math.ceil(math.ceil(m.z.shape[1] / 8) / multiple) * multiple
    return {
        "qweight": words(m.q),
        "qzeros": words(padded(m.z, 8 * width)),
        "scales": torch.from_numpy(padded(m.s, 8 * width)),
    }


def gptq(m: Integers) -> dict[str, Tensor]:
    return {
        "qweight": words(m.q).T.contiguous(),
        "qzeros": words(m.z.T - 1),
        "scales": torch.from_numpy(m.s.T.copy()),
        "g_idx": torch.arange(m.q.shape[1], dtype=torch.int32) // m.group,
    }


def packed(m: Integers) -> dict[str, Tensor]:
    return {
        "weight_packed": words(padded(m.q, -(-m.q.shape[1] // 8) * 8)),
        "weight_scale": torch.from_numpy(m.s),
        "weight_shape": torch.tensor(m.q.shape),
    }


def packed_asymmetric(m: Integers) -> dict[str, Tensor]:
    return packed(m) | {"weight_zero_point": words(m.z.T).T.contiguous()}


def cut_gemm(stored: Stored, start: int, stop: int) -> Stored:
    """Inputs [start, stop) of a gemm matrix, whose groups are those of its qzeros: what one rank of several would hold."""
    group = stored.tensors["qweight"].shape[0] // stored.tensors["qzeros"].shape[0]
    assert start % group == 0 and stop % group == 0
    groups = slice(start // group, stop // group)
    tensors = {end: t[start:stop] if end == "qweight" else t[groups] for end, t in stored.tensors.items()}
    return Stored(tensors, stored.weight[:, start:stop])


@dataclass(frozen=True)
class Layout:
    """A checkpoint layout: how a matrix is written, whether its zero points are 8, and its quantization_config."""

    write: Callable[[Integers], dict[str, Tensor]]
    symmetric: bool
    config: Callable[[int], dict[str, object]]

    def store(self, group: int) -> Callable[[Tensor], Stored]:
        def store(weight: Tensor) -> Stored:
            made = rounded(weight, group, symmetric=self.symmetric)
            return Stored(self.write(made), made.weight)

        return store


def awq_config(version: str) -> Callable[[int], dict[str, object]]:
    return lambda group: {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}


def packed_config(symmetric: bool) -> Callable[[int], dict[str, object]]:
    def config(group: int) -> dict[str, object]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": symmetric,
            "dynamic": False,
            "strategy": "group",
            "group_size": group,
        }
        if group == -1:
            weights |= {"strategy": "channel", "group_size": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }

    return config


LAYOUTS = {
    "gemm": Layout(gemm, False, awq_config("gemm")),
    "gemv": Layout(gemv, False, awq_config("gemv")),
    "gptq": Layout(
        gptq, True, lambda group: {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False}
    ),
    "packed": Layout(packed, True, packed_config(True)),
    "packed-asymmetric": Layout(packed_asymmetric, False, packed_config(False)),
}


def quantised(
    weights: Mapping[str, Tensor], layout: Layout, group: int, plain: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A whole model's tensors with its projections stored in `layout` but for modules that contain one of `plain`; and the
    same model with the weights that they stand for, float32."""
    stored: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith(PROJECTIONS) or any(part in name for part in plain):
            stored[name] = stands_for[name] = tensor
            continue
        made = layout.store(group)(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{end}": t.contiguous() for end, t in made.tensors.items()}
        stands_for[name] = made.weight.to(torch.float32)
    return stored, stands_for


def mixture_of_experts(
    weights: Mapping[str, Tensor], hidden: int, inner: int, *, layers: int, experts: int = 4
) -> dict[str, Tensor]:
    """A tiny model's tensors with Mixtral's router and experts in place of every MLP."""
    random = torch.Generator().manual_seed(3)
    made = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    for layer in range(layers):
        module = f"model.layers.{layer}.block_sparse_moe"
        made[f"{module}.gate.weight"] = torch.randn(experts, hidden, generator=random)
        for e in range(experts):
            for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                made[f"{module}.experts.{e}.{name}.weight"] = 0.3 * torch.randn(shape, generator=random)
    return made


class Installed:
    """The plugin as pip leaves it: its package and its dist-info on the path, for as long as the context lasts."""

    def __init__(self, site: Path) -> None:
        self._site = site

    def __enter__(self) -> None:
        info = self._site / "octavo_quant_awq-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-quant-awq\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[octavo]\nquant_awq = octavo_quant_awq\n")
        sys.path.insert(0, str(self._site))

    def __exit__(self, *error: object) -> None:
        sys.path.remove(str(self._site))
