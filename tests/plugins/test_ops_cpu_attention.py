"""The CPU attention backend passes the conformance suite: with products of its own, and where torch's take their place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from octavo.catalog import Device
from octavo.engine.device import cpu_features
from octavo.interfaces import OperatorParts
from octavo.model.operators import add_rms_norm
from octavo.testing.attention import AttentionSuite, AttentionTarget, check, check_prologue
from octavo.testing.paged import Shape

pytest.importorskip("llvmlite")
pytest.importorskip("octavo_ops_cpu")

import llvmlite.binding as llvm
from octavo_ops_cpu.jit import compiler
from octavo_ops_cpu.kernels import decode, draw, norm, prologue
from octavo_ops_cpu.operators import CpuOperators
from octavo_ops_cpu.provider import attention_provider, multiplies, unfit

HERE = Device(features=cpu_features())
OTHER = Device(features=HERE.features - {"avx512_bf16"})
pytestmark = pytest.mark.skipif(bool(unfit(HERE, "float32")), reason=unfit(HERE, "float32"))


class TestCpuAttention(AttentionSuite):
    target = AttentionTarget(attention_provider, HERE, dtypes=("float32", "bfloat16"))


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Code as for a processor with AVX2 and nothing later."""
    compiler.target()  # which makes LLVM ready
    machine = llvm.Target.from_default_triple().create_target_machine(cpu="haswell", opt=3, jit=True, codemodel="jitdefault")
    monkeypatch.setattr(compiler, "target", lambda: machine)
    for module in (compiler, decode, prologue):
        monkeypatch.setattr(module, "lanes", lambda: 8)
    caches = [decode.decode, prologue.prologue, norm.add_rms_norm, draw.draw]
    for kernel in caches:
        kernel.cache_clear()
    yield Device(features=frozenset({"avx2"}))
    for kernel in caches:
        kernel.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_of_eight_give_the_same(avx2: Device, dtype: str) -> None:
    target = AttentionTarget(attention_provider, avx2, dtypes=(dtype,))
    shape = Shape(heads=(9, 3), k_dim=64, block_size=16, window=100, softcap=5.0, dtype=dtype)
    scene = target.scene(shape, [1, 17, 257, 40])
    scene.fill([0, 16, 256, 37])
    check(scene, [(0, 0, 1), (1, 16, 1), (2, 256, 1), (3, 37, 3)], lse=True)
    scene = target.scene(Shape(heads=(9, 3), k_dim=64, block_size=16, dtype=dtype), [33, 20, 40])
    scene.fill([32, 0, 37])
    check_prologue(scene, [(0, 32, 1), (1, 0, 20), (2, 37, 3)], rotary=64, norm=True)

    ops = CpuOperators(None, OperatorParts(avx2, dtype)).ops
    assert ("matrix", "plain") not in ops
    x, stream, weight = torch.randn(5, 576).to(getattr(torch, dtype)), torch.randn(5, 576), torch.rand(576)
    found, right = (op(x, stream.clone(), weight, 1e-5)[0] for op in (ops["add_rms_norm", "plain"], add_rms_norm))
    torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-5)
    logits = torch.randn(4, 1003)
    tokens, _ = ops["draw", "plain"](logits, torch.zeros(4), torch.arange(4), torch.arange(4), 1003)
    assert torch.equal(tokens.long(), logits.argmax(-1))


@pytest.mark.skipif(not multiplies(HERE, "bfloat16"), reason="the suite above goes through torch already")
class TestPromptsThroughTorch(AttentionSuite):
    target = AttentionTarget(attention_provider, OTHER, dtypes=("bfloat16",))
