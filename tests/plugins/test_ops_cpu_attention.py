"""The CPU attention backend passes the conformance suite: with products of its own, and where torch's take their place."""

from __future__ import annotations

import pytest
from octavo.catalog import Device
from octavo.engine.device import cpu_features
from octavo.testing.attention import AttentionSuite, AttentionTarget

pytest.importorskip("llvmlite")
pytest.importorskip("octavo_ops_cpu")

from octavo_ops_cpu.provider import attention_provider, multiplies, unfit

HERE = Device(features=cpu_features())
OTHER = Device(features=HERE.features - {"avx512_bf16"})
pytestmark = pytest.mark.skipif(bool(unfit(HERE, "float32")), reason=unfit(HERE, "float32"))


class TestCpuAttention(AttentionSuite):
    target = AttentionTarget(attention_provider, HERE, dtypes=("float32", "bfloat16"))


@pytest.mark.skipif(not multiplies(HERE, "bfloat16"), reason="the suite above goes through torch already")
class TestPromptsThroughTorch(AttentionSuite):
    target = AttentionTarget(attention_provider, OTHER, dtypes=("bfloat16",))
