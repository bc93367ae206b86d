"""DeepSeek's adapters pass the conformance suite of model adapters, as any third party's should."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.testing.model import ModelSuite, ModelTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))

from octavo_models_deepseek.adapter import DeepseekAdapter
from octavo_models_deepseek.v4_adapter import V4Adapter

from tests.plugins.test_models_deepseek import V32
from tests.plugins.test_models_deepseek_v4 import V4


class TestSparseLatent(ModelSuite):
    target = ModelTarget(DeepseekAdapter, {"v3.2": V32})


class TestCompressed(ModelSuite):
    target = ModelTarget(V4Adapter, {"v4": V4})
