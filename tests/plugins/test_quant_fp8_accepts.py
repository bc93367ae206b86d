"""What the FP8 quantizer takes and refuses: asked without a model, without torch, and answered with what it does not read."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from octavo.catalog import Accept, Device, Needs, Reject

from tests.plugins.fp8 import DIALECTS, compressed, inputs

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

from octavo_quant_fp8 import provider


def ask(method: str, config: dict[str, Any], device: Device | None = None, dtype: str = "bfloat16") -> Accept | Reject:
    facts = {"method": method, "config": config, "architecture": "LlamaForCausalLM"}
    return provider.accepts(Needs("quantizer", device or Device(), dtype, facts), provider.Fp8Options())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_accepted(dialect: str) -> None:
    config = DIALECTS[dialect][0]
    assert isinstance(ask(config["quant_method"], config), Accept)


GROUP = compressed("channel", inputs("token"))["config_groups"]["group_0"]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"quant_method": "awq"}, "not 'awq'"),
    ("", {}, "not quantised, and nobody asked"),
    ("fp8", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ("fp8", {"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "static"),
    ("compressed-tensors", {"quant_method": "compressed-tensors"}, "without config_groups"),
    ("compressed-tensors", {"format": "pack-quantized", "config_groups": {"g": GROUP}}, "pack-quantized"),
    ("compressed-tensors", {"format": "float-quantized", "config_groups": {"g": GROUP | {"targets": ["re:.*q_proj"]}}}, "targets"),
    ("compressed-tensors", {"format": "float-quantized", "config_groups": {"g": GROUP | {"weights": {"num_bits": 4, "type": "int"}}}}, "4-bit int"),
    ("compressed-tensors", compressed("group", None), "strategy 'group'"),
    ("compressed-tensors", compressed("block", inputs("token")), "dynamic groups of 128"),
    ("compressed-tensors", compressed("channel", inputs("token")) | {"ignore": ["lm_head", "re:["]}, r"ignore 're:\[' is not a regular expression"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "config", "reason"), WRONG)
def test_what_is_not_read_is_rejected_with_the_reason(method: str, config: dict[str, Any], reason: str) -> None:
    answer = ask(method, config)
    assert isinstance(answer, Reject) and re.search(reason, answer.reason), answer


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 5), "float16", "7.5 .* below 8.0"),
        ((9, 0), "float32", "dtype float32"),
        ((8, 0), "bfloat16", None),
        ((9, 0), "bfloat16", None),
    ],
)
def test_hardware_is_taken_or_refused_with_the_reason(capability: tuple[int, int], dtype: str, reason: str | None) -> None:
    answer = ask("fp8", {}, Device("cuda", name="a GPU", capability=capability), dtype)
    if reason is None:
        assert isinstance(answer, Accept)
        assert ("no FP8 units" in answer.reason) == (capability < (8, 9))
    else:
        assert isinstance(answer, Reject) and re.search(reason, answer.reason)
