"""The CPU attention backend passes the conformance suite, with vectors of every width that its shapes lead to."""

from __future__ import annotations

import pytest
from octavo.catalog import Device
from octavo.engine.device import cpu_features
from octavo.testing.attention import AttentionSuite, AttentionTarget

pytest.importorskip("llvmlite")
pytest.importorskip("octavo_ops_cpu")

from octavo_ops_cpu.provider import attention_provider, unfit

HERE = Device(features=cpu_features())
pytestmark = pytest.mark.skipif(bool(unfit(HERE, "float32")), reason=unfit(HERE, "float32"))


class TestCpuAttention(AttentionSuite):
    target = AttentionTarget(attention_provider, HERE, dtypes=("float32", "bfloat16"))
