"""Core's own quantizer through the conformance suite of quantizers: weights as they are."""

from __future__ import annotations

import torch
from octavo.builtin import register_quantizers
from octavo.catalog import Device
from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget, Stored


def store(weight: torch.Tensor) -> Stored:
    """In bfloat16, which is exact in float32 as well."""
    made = weight.bfloat16()
    return Stored({"weight": made}, made.double())


def cut(stored: Stored, start: int, stop: int) -> Stored:
    return Stored({"weight": stored.tensors["weight"][:, start:stop].contiguous()}, stored.weight[:, start:stop])


class TestNone(QuantizerSuite):
    target = QuantizerTarget(register_quantizers()[0], Device(), ("float32", "bfloat16"), store, cut=cut)
