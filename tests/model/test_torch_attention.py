"""Core's torch backend passes the conformance suite on the CPU, and the suite can fail."""

from __future__ import annotations

import pytest
import torch
from octavo.attention import plan
from octavo.attention.torch_backend import FEW_TASKS, TorchAttention
from octavo.builtin import register_attention_backends
from octavo.catalog import Device
from octavo.interfaces import AttentionParts, Step
from octavo.testing.attention import AttentionSuite, AttentionTarget, check
from octavo.testing.paged import Scene, Shape
from torch import Tensor

PROVIDER = next(p for p in register_attention_backends() if p.name == "torch")
PARTS = AttentionParts(Device(), "float32")


class TestTorchAttention(AttentionSuite):
    target = AttentionTarget(PROVIDER, Device(), dtypes=("float32", "bfloat16", "float16"))


class OneKeyTooMany(TorchAttention):
    """Reads one entry past each row's end."""

    def plan(self, step: Step) -> None:
        step.host.seq_lens = step.host.seq_lens + 1
        super().plan(step)
        step.host.seq_lens = step.host.seq_lens - 1


class WrongHead(TorchAttention):
    """Takes kv head h % kv_heads instead of h // group."""

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None) -> Tensor:
        order = torch.arange(q.shape[1]).view(2, -1).t().reshape(-1)
        super().run(layer, step, q[:, order].contiguous(), out, lse=lse)
        out[:, order] = out.clone()
        return out


class ForgetsToWrite(TorchAttention):
    """Drops the last token's key and value."""

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        before = step.scratch["attention.torch.0"].writes
        step.scratch["attention.torch.0"].writes = before[: -2 * k.shape[1]]
        super().write(layer, step, k[:-1], v[:-1])


class WritesOutside(TorchAttention):
    """Touches a block that is nobody's."""

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        super().write(layer, step, k, v)
        cache = self._layers[layer].cache
        free = sorted(set(range(len(cache))) - set(step.tables[0].flatten().tolist()))
        cache[free[0]].view(-1)[0] = 0


@pytest.mark.parametrize("broken", [OneKeyTooMany, WrongHead, ForgetsToWrite, WritesOutside])
def test_the_suite_catches_a_broken_backend(broken: type[TorchAttention]) -> None:
    def scene(cls: type[TorchAttention]) -> Scene:
        made = Scene(cls(None, PARTS), Shape(heads=(4, 2), block_size=4), Device(), [6, 9])
        made.fill([5, 0])
        return made

    work = [(0, 5, 1), (1, 0, 9)]
    check(scene(TorchAttention), work)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(scene(broken), work)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("rows", [1, 2, 3, FEW_TASKS // 3, FEW_TASKS // 3 + 1])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_few_and_many_decoding_rows_give_the_same(beside: bool, rows: int, window: int | None) -> None:
    """Few rows take another operator than more: both are right, for ragged lengths."""
    lengths = [1 + 13 * i for i in range(rows)] + [40] * beside
    scene = Scene(
        TorchAttention(None, AttentionParts(Device(), "bfloat16")),
        Shape(heads=(9, 3), window=window, dtype="bfloat16"),
        Device(),
        lengths,
    )
    scene.fill([n - 1 for n in lengths[:rows]])
    check(scene, [(i, lengths[i] - 1, 1) for i in range(rows)] + [(rows, 0, 40)] * beside)


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    """One row of 5000 keys and fifteen of 10 must not cost sixteen rows of 5000."""
    scene = Scene(TorchAttention(None, PARTS), Shape(block_size=16), Device(), [5000] + [10] * 15)
    step = scene.step([(i, row.length - 1, 1) for i, row in enumerate(scene.rows)])
    scene.backend.plan(step)
    tiles: list[plan.ShortTile] = step.scratch["attention.torch.0"].short
    assert sum(tile.size * tile.keys for tile in tiles) <= 2 * sum(row.length for row in scene.rows)
