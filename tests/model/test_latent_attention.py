"""The torch backend keeps latent caches, and is the oracle of those who do: the suite, float8 entries, chosen keys."""

from __future__ import annotations

import pytest
import torch
from octavo.attention import sparse
from octavo.attention.torch_backend import TorchAttention
from octavo.builtin import register_attention_backends
from octavo.catalog import Device
from octavo.interfaces import AttentionParts, KVSpec
from octavo.testing.attention import AttentionTarget, check
from octavo.testing.latent import LatentSuite
from octavo.testing.paged import Scene, Shape, reference
from octavo.testing.sparse import SparseSuite

CPU = Device()


class TestTorch(LatentSuite):
    target = AttentionTarget(register_attention_backends()[0], CPU, ("float32", "bfloat16"))


class TestTorchSparse(SparseSuite):
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


def test_an_index_chooses_the_keys_with_the_highest_scores_among_those_up_to_its_own() -> None:
    random = torch.Generator().manual_seed(0)
    q, keys = torch.randn(5, 8, 16, generator=random), torch.randn(30, 16, generator=random)
    weights = torch.randn(5, 8, generator=random)
    found = sparse.choose(q, weights, keys, torch.arange(26, 31), 6, 0.25)
    assert sparse.choose(q[:1], weights[:1], keys[:4], torch.tensor([4]), 6, 0.25)[0, 4:].tolist() == [-1, -1]
    for token in range(5):
        scores = [
            sum(float(weights[token, h]) * max(0.0, float(q[token, h].double() @ keys[k].double()) * 0.25) for h in range(8))
            for k in range(25 + token + 1)
        ]
        assert set(found[token].tolist()) == set(sorted(range(len(scores)), key=scores.__getitem__)[-6:])


def test_portions_of_tokens_choose_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    q, keys, weights = (torch.randn(*shape, generator=random) for shape in ((9, 4, 16), (40, 16), (9, 4)))
    seen = torch.arange(32, 41)
    whole = sparse.choose(q, weights, keys, seen, 7, 1.0)
    monkeypatch.setattr(sparse, "PORTION", 4 * 40 * 2)
    assert torch.equal(sparse.choose(q, weights, keys, seen, 7, 1.0), whole)


@pytest.mark.parametrize("portion", [1 << 24, 1])
def test_chosen_keys_alone_are_attended_to(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a paged cache that is NaN wherever nothing was written; the oracle sees the chosen entries as a sequence of their own."""
    monkeypatch.setattr(sparse, "PORTION", portion)
    scene = Scene(TorchAttention(None, AttentionParts(CPU, "float32")), Shape((4, 1), 48, 32, 16, latent=True), CPU, [50, 20])
    scene.fill([49, 17])
    step = scene.step([(0, 49, 1), (1, 17, 3)])
    q = torch.cat((scene.rows[0].q[0][49:50], scene.rows[1].q[0][17:20]))
    k = torch.cat((scene.rows[0].k[0][49:50], scene.rows[1].k[0][17:20]))
    select = torch.tensor([[3, 40, 49, 16, 7], [0, 17, 5, -1, -1], [18, 2, -1, -1, -1], [19, 18, 1, 0, 9]], dtype=torch.int32)
    out, lse = torch.full((4, 4, 32), torch.nan), torch.full((4, 4), torch.nan)
    scene.backend.plan(step)
    scene.backend.write(0, step, k, k[..., :32])
    scene.backend.run(0, step, q, out, lse=lse, select=select)
    for token, row in enumerate((0, 1, 1, 1)):
        keys = scene.rows[row].k[0][select[token][select[token] >= 0].long()]
        right = reference(q[token : token + 1], keys, keys[..., :32], scale=48**-0.5)
        assert torch.allclose(out[token].double(), right.out[0], atol=1e-5)
        assert torch.allclose(lse[token].double(), right.lse[0], atol=1e-5)
