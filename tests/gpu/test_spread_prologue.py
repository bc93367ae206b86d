"""A prologue that spreads heads against the operator and `write`, which do the same in two kernels: the bytes of the cache, and q."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from octavo.bench.kernel import cuda_device
from octavo.interfaces import AttentionParts, OperatorParts
from octavo.testing.paged import Scene, Shape

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops() -> dict[str, Any]:
    provider = pytest.importorskip("octavo_ops_triton.provider")
    operators = pytest.importorskip("octavo_ops_triton.operators")
    made = operators.TritonOperators(provider.TritonOptions(), OperatorParts(cuda_device(), "bfloat16"))
    return {name: op for (name, _), op in made.ops.items()}


@pytest.mark.parametrize("tokens", [1, 67, 2500])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "norm", "kv_dtype", "block"),
    [
        ((32, 8), 128, 128, False, "float8_e4m3fn", 64),
        ((16, 8), 128, 128, True, "float8_e5m2", 64),
        ((9, 3), 64, 64, False, "float8_e4m3fn", 16),
        ((8, 2), 96, 40, True, "float8_e4m3fn", 64),
        ((6, 2), 256, 256, True, "float8_e5m2", 64),
        ((8, 1), 80, 32, False, "float8_e4m3fn", 64),
    ],
)
def test_keys_are_stored_as_the_operator_and_write_store_them(
    ops: dict[str, Any], heads: tuple[int, int], dim: int, rotary: int, norm: bool, kv_dtype: str, block: int, tokens: int
) -> None:
    """Sums may differ in the last bit of a float32, and so a few of the rounded in their last."""
    backend = pytest.importorskip("octavo_attention_triton.backend")
    options = pytest.importorskip("octavo_attention_triton.provider").TritonOptions()
    shape = Shape(heads=heads, k_dim=dim, block_size=block, dtype="bfloat16", kv_dtype=kv_dtype, k_scale=0.37, v_scale=0.021)
    device, (q_heads, kv_heads) = cuda_device(), heads
    made = [
        Scene(backend.TritonAttention(options, AttentionParts(device, "bfloat16")), shape, device, [tokens]) for _ in range(2)
    ]
    like: dict[str, Any] = {"device": made[0].torch_device, "dtype": torch.bfloat16}
    qkv = torch.randn(tokens, q_heads + 2 * kv_heads, dim, **like) * torch.logspace(-3, 1, dim, **like)
    qkv[0, -1, 0], qkv[0, q_heads, 1] = float("inf"), float("nan")
    weight = torch.randn(q_heads + kv_heads, dim, **like) if norm else None
    angle = torch.rand(tokens, 1, rotary // 2, device=like["device"]) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1).bfloat16(), torch.cat((-angle.sin(), angle.sin()), -1).bfloat16()
    with torch.inference_mode():
        steps = [scene.step([(0, 0, tokens)]) for scene in made]
        for scene, step in zip(made, steps, strict=True):
            scene.backend.prepare(step)
            scene.backend.plan(step)
        both = ops["qk_norm_rope_spread"](qkv[:, : q_heads + kv_heads], weight, 1e-5, cos, sin)
        made[0].backend.write(0, steps[0], both[:, q_heads:], qkv[:, q_heads + kv_heads :])
        q = made[1].backend.prologue(0, steps[1], qkv.clone(), weight, 1e-5, cos, sin, spread=True)  # type: ignore[attr-defined]
        right, found = (torch.stack(scene.backend.gather(0, scene.rows[0].slot, tokens)).float() for scene in made)
    assert bool(right[0, 0, 0].isnan().all()), "a NaN is in all channels that its own is spread over"
    most = torch.finfo(getattr(torch, kv_dtype)).max * 0.021
    assert float(right[1, 0, -1, 0]) == float(torch.tensor(most).bfloat16()), "an infinity is not saturated"
    for what, a, b in (("q", both[:, :q_heads].float(), q.float()), ("k", right[0], found[0]), ("v", right[1], found[1])):
        same = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
        assert float((~same).float().mean()) <= (0.0 if what == "v" else 2e-3), (
            f"{what}: {int((~same).sum())} of {same.numel()} differ"
        )
        torch.testing.assert_close(b, a, rtol=0.26, atol=1e-2 * float(a.nan_to_num(0, 0, 0).abs().max()), equal_nan=True)
