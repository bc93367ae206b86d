"""The torch backend keeps latent caches, and is the oracle of those who do: the suite, and float8 entries."""

from __future__ import annotations

import pytest
from octavo.attention.torch_backend import TorchAttention
from octavo.builtin import register_attention_backends
from octavo.catalog import Device
from octavo.interfaces import AttentionParts, KVSpec
from octavo.testing.attention import AttentionTarget, check
from octavo.testing.latent import LatentSuite
from octavo.testing.paged import Scene, Shape

CPU = Device()


class TestTorch(LatentSuite):
    target = AttentionTarget(register_attention_backends()[0], CPU, ("float32", "bfloat16"))


def test_a_float8_entry_loses_only_its_own_precision() -> None:
    shape = Shape((4, 1), 48, 32, 16, "float32", "float8_e4m3fn", latent=True, k_scale=0.02, v_scale=0.02)
    scene = Scene(TorchAttention(None, AttentionParts(CPU, "float32")), shape, CPU, [64, 100])
    scene.fill([63, 0])
    check(scene, [(0, 63, 1), (1, 0, 100)])


def test_a_latent_cache_of_several_heads_is_refused() -> None:
    backend = TorchAttention(None, AttentionParts(CPU, "float32"))
    with pytest.raises(ValueError, match="one shared head, not 2"):
        backend.layout(KVSpec("latent", 2, 48, 32, "float32"), 16)
