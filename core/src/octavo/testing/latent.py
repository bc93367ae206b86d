"""The conformance suite of attention over latent caches (MLA): one shared head, whose V is the first part of its K.

Owns what a backend of KV kind "latent" must do, in the manner of `octavo.testing.attention`: a float64 oracle, NaN wherever
nothing was written, guard bands, pages in random order. Needs pytest. A third party writes one class:

    class TestMine(LatentSuite):
        target = AttentionTarget(my_provider, Device("cuda", ...), dtypes=("bfloat16",))
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from octavo.catalog import Reject
from octavo.testing.attention import TOLERANCE, AttentionTarget, check
from octavo.testing.paged import Shape

SHAPES = ((128, 512, 64), (16, 512, 64), (40, 512, 64), (4, 32, 16), (3, 64, 32), (64, 256, 64))
"""(query heads, latent, rope)"""
SIZES = (8, 16, 128, 64)
LENGTHS = (1, 15, 63, 64, 65, 129, 300, 700, 17, 200, 40)
WORK = [(i, n - 1, 1) for i, n in enumerate(LENGTHS[:8])] + [(8, 0, 17), (9, 130, 70), (10, 37, 3)]


def latent(heads: int, dim: int, rope: int, dtype: str, block_size: int = 64) -> Shape:
    return Shape((heads, 1), dim + rope, dim, block_size, dtype, latent=True)


COMMON = SHAPES[0]


class LatentSuite:
    """Subclass it as `class TestX(LatentSuite)` and set `target`; fewer `shapes` where a second kernel is tested beside a first."""

    target: AttentionTarget
    shapes: Sequence[tuple[int, int, int]] = SHAPES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize(("shape", "size", "dtype"), self._cases(), ids=str)
        elif "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.target.dtypes)

    def _cases(self) -> list[tuple[tuple[int, int, int], int, str]]:
        """(shape, block size, dtype): the common shape in every dtype, and in two block sizes; all others in one of each in
        turn. A case may be two more kernels to compile."""
        dtypes = self.target.dtypes
        common = [(COMMON, 64, dtype) for dtype in dtypes] + [(COMMON, 16, dtypes[0])]
        others = [(shape, SIZES[i % len(SIZES)], dtypes[i % len(dtypes)]) for i, shape in enumerate(self.shapes[1:])]
        return common + others

    def test_the_backend_accepts_the_common_shape(self, dtype: str) -> None:
        """So that a suite in which everything is skipped does not pass."""
        answer = self.target.answer(latent(*COMMON, dtype))
        assert not isinstance(answer, Reject), answer

    def test_decode_and_chunks_share_a_step(self, shape: tuple[int, int, int], size: int, dtype: str) -> None:
        """Any head count, latent and block size, ragged, for one new token and for several."""
        scene = self.target.scene(latent(*shape, dtype, size), LENGTHS)
        scene.fill([*(n - 1 for n in LENGTHS[:8]), 0, 130, 37])
        check(scene, WORK, lse=True)

    def test_a_page_holds_each_entry_once(self, dtype: str) -> None:
        """What a latent cache is for: k_dim values a token, however many heads, and no V beside them."""
        shape = latent(*COMMON, dtype)
        layout = self.target.build(dtype).layout(shape.spec(), 64)
        assert layout.page_bytes == 64 * 576 * getattr(torch, dtype).itemsize

    def test_one_long_row_among_short_ones(self, dtype: str) -> None:
        lengths = [1, 3000, 3, 700, 64, 1]
        scene = self.target.scene(latent(*COMMON, dtype), lengths)
        scene.fill([n - 1 for n in lengths])
        check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)], lse=True)

    def test_a_prompt_in_chunks_is_the_prompt_at_once(self, dtype: str) -> None:
        shape = latent(*COMMON, dtype)
        at_once = check(self.target.scene(shape, [150]), [(0, 0, 150)], lse=True)[0].out
        for sizes in ([1, 149], [50, 50, 50], [7, 16, 17, 1, 1, 64, 44]):
            scene, parts, start = self.target.scene(shape, [150]), [], 0
            for size in sizes:
                parts.append(check(scene, [(0, start, size)], lse=True)[0].out)
                start += size
            error = float((torch.cat(parts).double() - at_once.double()).abs().max())
            assert error <= 2 * TOLERANCE[dtype], f"chunks {sizes} differ by {error:.2e}"

    def test_tokens_of_one_sequence_may_be_rows_of_their_own(self, dtype: str) -> None:
        """A captured step runs the end of a prompt as rows of one token, in any order, beside rows that decode."""
        scene = self.target.scene(latent(*COMMON, dtype), [60, 17, 33, 90, 5])
        scene.fill([52, 16, 32, 89, 0])
        prompt = [(0, position, 1) for position in (59, 52, 54, 53, 58, 57, 55, 56)]
        check(scene, [*prompt[:1], (1, 16, 1), *prompt[1:]], lse=True)

    def test_gather_gives_back_what_was_written(self, dtype: str) -> None:
        scene = self.target.scene(latent(4, 32, 16, dtype, 16), [50, 33])
        scene.fill([50, 33])
        for row in scene.rows:
            keys, values = scene.backend.gather(0, row.slot, row.length)
            assert torch.equal(keys, row.k[0]) and torch.equal(values, row.v[0])

    def test_a_copied_block_is_the_block(self, dtype: str) -> None:
        """Copy on write: in every layer of the group, and in no other block."""
        scene = self.target.scene(latent(4, 32, 16, dtype, 16), [32, 32], layers=2)
        for layer in (0, 1):
            scene.fill([32, 32], layer=layer)
        source, target = (scene.table[row.slot, :2].long() for row in scene.rows)
        before = [cache.clone() for cache in scene.caches]
        scene.backend.copy_blocks(0, source, target)
        for cache, old in zip(scene.caches, before, strict=True):
            assert torch.equal(cache[target], old[source]) and torch.equal(cache[source], old[source])
        scene.check_untouched()
