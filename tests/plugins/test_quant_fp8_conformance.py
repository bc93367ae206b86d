"""The conformance suite of quantizers over FP8's reference, which runs on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from octavo.catalog import Device
from octavo.interfaces import Activation, Linear
from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget
from torch import Tensor

from tests.plugins.fp8 import DIALECTS, BlockSuite, by_block, by_channel, compressed, inputs, stored

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

from octavo_quant_fp8.operators import FORMATS
from octavo_quant_fp8.provider import QUANTIZER

E4M3_INPUTS = {"float32": 0.04, "bfloat16": 0.04, "float16": 0.04}
"""What rounding activations to three bits may cost: a relative error of up to 2^-4 in each, 2.6% together."""


def activated(linear: Linear, x: Tensor) -> Tensor | Activation:
    """x as an operator of the Linear's format would hand it over."""
    return Activation(*FORMATS[linear.activation](x)) if linear.activation in FORMATS else x


class TestWeightsByChannel(QuantizerSuite):
    target = QuantizerTarget(
        QUANTIZER, Device(), ("float32", "bfloat16"), store=stored(by_channel), config=compressed("channel", None)
    )


class TestWeightsByBlock(BlockSuite):
    """float32 only: in bfloat16 the reference rounds a weight with its block's scale folded in."""

    target = QuantizerTarget(
        QUANTIZER, Device(), ("float32",), store=stored(lambda w: by_block(w, "weight_scale")), config=compressed("block", None)
    )


class TestInputsByToken(QuantizerSuite):
    target = QuantizerTarget(
        QUANTIZER, Device(), ("bfloat16",), store=stored(by_channel), config=compressed("channel", inputs("token")),
        tolerance=E4M3_INPUTS, activate=activated,
    )  # fmt: skip


class TestInputsByGroup(BlockSuite):
    target = QuantizerTarget(
        QUANTIZER, Device(), ("float32",), store=stored(by_block), config=DIALECTS["block"][0],
        tolerance=E4M3_INPUTS, activate=activated,
    )  # fmt: skip


def test_the_suite_s_inputs_are_rounded_by_as_much_as_its_tolerance_says() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512)
    data, scale = FORMATS["fp8_token"](x)
    error = float((data.float() * scale - x).norm() / x.norm())
    assert 0.02 < error < 0.03
