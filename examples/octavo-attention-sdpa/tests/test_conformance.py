"""Octavo's conformance suite, run against this backend on the CPU."""

from __future__ import annotations

from octavo.catalog import Device
from octavo.testing.attention import AttentionSuite, AttentionTarget
from octavo_attention_sdpa.provider import PROVIDER


class TestSdpaAttention(AttentionSuite):
    target = AttentionTarget(PROVIDER, Device(), dtypes=("float32", "bfloat16"))
