"""FP8 checkpoints of tiny models, written by the formats' own rules and not by the plugin's code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from octavo.model.loader import WeightTable
from octavo.testing.quantizer import QuantizerSuite, Stored, random_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
Quantised = tuple[dict[str, Tensor], Tensor]
"""Tensors to store under the module's name, and the weight that they stand for, float64."""


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest value of e4m3fn (4 exponent bits of bias 7, 3 mantissa bits), computed and not cast; ties to even."""
    x = x.double()
    exponent = torch.floor(torch.log2(x.abs().clamp_min(1e-30))).clamp(-6, 8)
    step = torch.exp2(exponent - 3)
    return (torch.round(x / step) * step).clamp(-448, 448)


def by_tensor(weight: Tensor, **more: Tensor) -> Quantised:
    scale = weight.abs().max().float() / 448
    values = round_e4m3(weight / scale)
    return {"weight": values.float().to(E4M3), "weight_scale": scale.view(1), **more}, values * scale.double()


def by_channel(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True).float() / 448
    values = round_e4m3(weight / scale)
    return {"weight": values.float().to(E4M3), "weight_scale": scale}, values * scale.double()


def by_block(weight: Tensor, name: str = "weight_scale_inv", exponent: bool = False) -> Quantised:
    """128 x 128 blocks; exponent: scales are powers of two, stored as uint8 b for 2^(b - 127)."""
    n, k = weight.shape
    scale = torch.empty(-(-n // 128), -(-k // 128))
    values = torch.empty_like(weight, dtype=torch.float64)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            peak = weight[part].abs().max().float() / 448
            scale[i, j] = torch.exp2(torch.ceil(torch.log2(peak))) if exponent else peak
            values[part] = round_e4m3(weight[part] / scale[i, j])
    wide = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    stored = (torch.log2(scale) + 127).to(torch.uint8) if exponent else scale
    return {"weight": values.float().to(E4M3), name: stored}, values * wide


def compressed(strategy: str, inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}, **more,
    }  # fmt: skip


def inputs(strategy: str, *, dynamic: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


INPUT_SCALE = torch.tensor([0.05])

DIALECTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantised]]] = {
    "compressed-tensor": (
        compressed("tensor", inputs("tensor", dynamic=False)),
        lambda w: by_tensor(w, input_scale=INPUT_SCALE),
    ),
    "compressed-channel": (compressed("channel", inputs("token")), by_channel),
    "compressed-block": (compressed("block", inputs("group", group_size=128)), lambda w: by_block(w, "weight_scale")),
    "compressed-weights-only": (compressed("channel", None, format="naive-quantized"), by_channel),
    "autofp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w: by_tensor(w, input_scale=INPUT_SCALE),
    ),
    "autofp8-dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}, by_tensor),
    "block": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head"]},
        by_block,
    ),
    "block-exponents": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        lambda w: by_block(w, exponent=True),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        by_channel,
    ),
}  # fmt: skip
"""name -> (quantization_config, how a matrix is stored)."""


def write_fp8(source: Path, folder: Path, dialect: str, *, plain: Path | None = None, extra: dict[str, Tensor] | None = None,
              **config: Any) -> Path:  # fmt: skip
    """The checkpoint of `source` in a dialect; and at `plain`, if given, the float32 checkpoint that it stands for."""
    settings, quantise = DIALECTS[dialect]
    tensors, dense = dict(extra or {}), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored, meant = quantise(tensor)
            tensors |= {f"{name.removesuffix('weight')}{key}": value.clone() for key, value in stored.items()}
            dense[name] = meant.float()
        else:
            tensors[name] = dense[name] = tensor
    for path, content, quantization in ((folder, tensors, {**settings, **config}), (plain, dense, None)):
        if path is not None:
            shutil.copytree(source, path)
            save_file(content, path / "model.safetensors", metadata={"format": "pt"})
            facts = json.loads((source / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(facts | ({"quantization_config": quantization} if quantization else {})))
    return folder


def stored(quantise: Callable[[Tensor], Quantised]) -> Callable[[Tensor], Stored]:
    """`QuantizerTarget.store` of one of the above."""
    return lambda weight: Stored(*quantise(weight))


class BlockSuite(QuantizerSuite):
    """The conformance suite of a format whose rows share scales, 128 at a time."""

    def test_outputs_can_be_divided(self, dtype: str, tmp_path: Path) -> None:
        """At the borders of blocks: the rows of one are quantised as they were in the whole."""
        whole = self.target.store(random_weight(300, 256))
        for start, stop in ((0, 128), (128, 300)):
            part = self.target.store(random_weight(300, 256)[start:stop])
            assert torch.equal(part.weight, whole.weight[start:stop])
            table = WeightTable()
            linear = self.target.build(dtype, table).linear("m", 256, {"a": stop - start})
            self.target.load(tmp_path / str(start), table, {f"m.a.{end}": t for end, t in part.tensors.items()}, dtype)
            linear.finish()
            x = self._x(5, 256, dtype)
            self._check(self._product(linear, x), self._right(x, part.weight), dtype, f"rows {start} to {stop}")
