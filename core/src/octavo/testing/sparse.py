"""The conformance suite of sparse latent attention (`interfaces.SparseBackend`): choosing keys by an index, attending to chosen
ones, windows and sinks over latent caches, entries of several tokens and how they are made.

Owns what such a backend must do beyond `octavo.testing.latent`, in the same manner: oracles in float64 written from the
definition, NaN wherever nothing was written, pages in random order. Needs pytest. A third party writes one class:

    class TestMine(SparseSuite):
        target = AttentionTarget(my_provider, Device("cuda", ...), dtypes=("bfloat16",))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.testing.attention import TOLERANCE, AttentionTarget, Work, check
from octavo.testing.paged import Scene, Shape, stored

LENGTHS = (1, 5, 40, 64, 65, 130, 700)
WORK = [(0, 0, 1), (1, 4, 1), (2, 0, 40), (3, 63, 1), (4, 30, 35), (5, 129, 1), (6, 699, 1)]
SHAPES = ((128, 512, 64), (64, 512, 0), (4, 32, 16))
"""(query heads, latent, rope): DeepSeek V3.2's, V4's, a small one."""
FLOAT8 = "float8_e4m3fn"


class SparseSuite:
    """Subclass it as `class TestX(SparseSuite)` and set `target`."""

    target: AttentionTarget

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.target.dtypes)

    def stepped(self, shape: Shape, work: Sequence[Work] = WORK) -> tuple[Scene, Any]:
        """A scene in which all keys up to each row's newest are written, and a step of `work`, planned."""
        scene = self.target.scene(shape, LENGTHS)
        scene.fill(LENGTHS)
        step = scene.step(work)
        scene.backend.prepare(step)
        scene.backend.plan(step)
        return scene, step

    def test_pages_are_in_proportion_to_blocks_also_to_those_of_less_than_an_entry(self, dtype: str) -> None:
        """The pool asks for pages of a small block, and lengthens blocks until the pages of all groups are as long."""
        backend = self.target.build(dtype)
        for every in (1, 4, 128):
            spec = Shape((64, 1), 64, 64, 8, dtype, latent=True, every=every).spec()
            assert backend.layout(spec, 128).page_bytes == 16 * backend.layout(spec, 8).page_bytes, f"{every} tokens an entry"

    # ------------------------------------------------------------ the index

    @pytest.mark.parametrize(("heads", "dim", "size", "count"), [(64, 128, 200, 64), (3, 16, 8, 20)])
    def test_an_index_chooses_the_keys_with_the_highest_scores(
        self, heads: int, dim: int, size: int, count: int, dtype: str
    ) -> None:
        """Exactly as many as there are, none twice, none that is better left out; of ragged rows, decoding and in chunks."""
        scene, step = self.stepped(Shape((heads, 1), dim, dim, size, dtype, latent=True))
        weights = torch.randn(len(step.positions), heads, generator=torch.Generator().manual_seed(3)).to(scene.torch_device)
        queries = torch.cat([scene.rows[i].q[0][at : at + n] for i, at, n in WORK])
        found = scene.backend.choose(0, step, queries, weights, count)  # type: ignore[attr-defined]
        assert found.dtype == torch.int32 and tuple(found.shape) == (len(queries), count)
        token = 0
        for index, start, new in WORK:
            keys = scene.rows[index].k[0][:, 0].double()
            for position in range(start, start + new):
                products = (queries[token].double() @ keys[: position + 1].T) * dim**-0.5
                right = (products.relu() * weights[token].double().unsqueeze(1)).sum(0)
                self._is_the_choice(found[token], right, count, f"row {index}, token {position}")
                token += 1
        scene.check_untouched()

    @staticmethod
    def _is_the_choice(found: Tensor, scores: Tensor, count: int, what: str) -> None:
        wanted = min(count, len(scores))
        chosen = found[:wanted].long()
        assert bool((found[wanted:] == -1).all()), f"{what}: sees {len(scores)} keys, chose {found.tolist()}"
        assert len(set(chosen.tolist())) == wanted and int(chosen.min()) >= 0 and int(chosen.max()) < len(scores), what
        worst = float(scores.topk(wanted).values[-1])
        slack = 1e-5 * float(scores.abs().max())  # float32 sums: which of two so near is taken is open
        assert float(scores[chosen].min()) >= worst - slack, f"{what}: a key of {float(scores[chosen].min())} for one of {worst}"

    def test_equal_scores_are_chosen_from_without_repetition(self, dtype: str) -> None:
        scene, step = self.stepped(Shape((4, 1), 16, 16, 16, dtype, latent=True))
        queries = torch.cat([scene.rows[i].q[0][at : at + n] for i, at, n in WORK])
        nothing = torch.zeros(len(queries), 4, device=scene.torch_device)
        found = scene.backend.choose(0, step, queries, nothing, 50)  # type: ignore[attr-defined]
        assert len(set(found[-1].tolist())) == 50 and int(found[-1].min()) >= 0 and int(found[-1].max()) < 700

    # ------------------------------------------------------------ chosen keys

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("each", SHAPES, ids=str)
    def test_chosen_keys_alone_are_attended_to(self, each: tuple[int, int, int], sinks: bool, dtype: str) -> None:
        """In any order, with -1 in any place, fewer than there is room for, and none at all."""
        heads, dim, rope = each
        scene, step = self.stepped(Shape((heads, 1), dim + rope, dim, 16, dtype, latent=True, sinks=sinks))
        select = self._some([at + i for _, at, n in WORK for i in range(n)], 70, 1).to(scene.torch_device)
        self._attended(scene, step, select)

    @staticmethod
    def _some(seen: list[int], room: int, every: int) -> Tensor:
        """For tokens at these positions a random choice of what they see, int32 [T, room]; nothing for every 7th."""
        random = torch.Generator().manual_seed(5)
        select = torch.full((len(seen), room), -1, dtype=torch.int32)
        for token, position in enumerate(seen):
            held = (position + 1) // every
            some = torch.randperm(held, generator=random)[: int(torch.randint(1, room + 1, (), generator=random))]
            if token % 7 != 6:
                select[token, torch.randperm(room, generator=random)[: len(some)]] = some.int()
        return select

    def _attended(self, scene: Scene, step: Any, select: Tensor | None) -> None:
        """`run` against the definition, token by token: out and lse."""
        shape, limit = scene.shape, TOLERANCE[scene.shape.dtype]
        queries = torch.cat([scene.rows[i].q[0][at : at + n] for i, at, n in WORK])
        width = shape.v_dim or shape.k_dim
        out = torch.full((len(queries), shape.heads[0], width), math.nan, dtype=queries.dtype, device=queries.device)
        lse = torch.full(out.shape[:2], math.nan, device=queries.device)
        extra = {} if select is None else {"select": select}
        scene.backend.run(0, step, queries, out, lse=lse, **extra)
        token, sinks = 0, scene.sinks[0]
        for index, start, new in WORK:
            held = stored(scene.rows[index].k[0][shape.every - 1 :: shape.every, 0], shape.kv_dtype, shape.k_scale).double()
            for position in range(start, start + new):
                chosen = (
                    torch.arange((position + 1) // shape.every) if select is None else select[token][select[token] >= 0].long()
                )
                keys = held[chosen.to(held.device)]
                scores = queries[token].double() @ keys.T * shape.k_dim**-0.5
                if sinks is not None:
                    scores = torch.cat((scores, sinks.double().unsqueeze(1)), 1)
                right = scores.logsumexp(1) if scores.shape[1] else torch.full_like(lse[token].double(), -math.inf)
                weights = (scores - right.nan_to_num(neginf=0.0).unsqueeze(1)).exp()[:, : len(keys)]
                what = f"row {index}, token {position}, {len(keys)} keys of {shape}"
                wanted = weights @ keys[:, :width]
                error = float((out[token].double() - wanted).abs().max())
                slack = limit * max(1.0, float(wanted.abs().max()))  # one key may be all there is: then it is no mean
                assert error <= slack, f"off by {error:.2e} (at most {slack:.0e}): {what}"
                assert torch.allclose(lse[token].double(), right, rtol=0, atol=2 * limit), f"lse: {what}"
                token += 1
        scene.check_untouched()

    # ------------------------------------------------------------ windows, entries of several tokens

    @pytest.mark.parametrize("heads", [16, 3])
    def test_a_window_with_sinks_over_keys_that_are_values(self, heads: int, dtype: str) -> None:
        """Blocks that no query can see any more are taken away."""
        shape = Shape((heads, 1), 64, 64, 16, dtype, window=33, latent=True, sinks=True)
        scene = self.target.scene(shape, LENGTHS)
        scene.fill([at for _, at, _ in WORK])
        for index, start, _ in WORK:
            scene.drop_blocks_before(index, start)
        check(scene, WORK, lse=True)

    @pytest.mark.parametrize("every", [4, 16])
    def test_an_entry_of_several_tokens_is_seen_once_its_last_token_has_come(self, every: int, dtype: str) -> None:
        scene, step = self.stepped(Shape((64, 1), 64, 64, 32, dtype, latent=True, every=every))
        self._attended(scene, step, None)
        seen = [at + i for _, at, n in WORK for i in range(n)]
        self._attended(scene, step, self._some(seen, 20, every).to(scene.torch_device))
        keys, _ = scene.backend.gather(0, scene.rows[6].slot, 700 // every, 3)  # type: ignore[call-arg]
        assert torch.equal(keys, scene.rows[6].k[0][every - 1 :: every][3 : 700 // every])

    @pytest.mark.parametrize(("rate", "dim", "overlapping"), [(4, 32, True), (8, 48, False), (128, 512, False)])
    def test_entries_are_made_of_the_windows_that_close(self, rate: int, dim: int, overlapping: bool, dtype: str) -> None:
        width = 2 * dim if overlapping else dim
        shape = Shape((0, 1), 2 * width, width, 16, dtype, window=2 * rate if overlapping else rate, latent=True)
        work = [*WORK[:5], (5, 120, 10), (6, 600, 50)]
        scene, step = self.stepped(shape, work)
        places = torch.randn(rate, width, generator=torch.Generator().manual_seed(2)).to(scene.torch_device)
        found = scene.backend.compress(0, step, places, overlapping=overlapping)  # type: ignore[attr-defined]
        assert found.dtype == torch.float32 and tuple(found.shape) == (len(step.positions), dim)
        token = made = 0
        for index, start, new in work:
            values, gates = scene.rows[index].k[0][:, 0].double().chunk(2, -1)
            for position in range(start, start + new):
                if (position + 1) % rate == 0:
                    own = slice(position + 1 - rate, position + 1)
                    parts = [(values[own], gates[own] + places.double())]
                    if overlapping:
                        parts = [(parts[0][0][:, dim:], parts[0][1][:, dim:])]
                        before = slice(own.start - rate, own.start)
                        if before.start >= 0:
                            parts.append((values[before][:, :dim], (gates[before] + places.double())[:, :dim]))
                    value, gate = (torch.cat(part) for part in zip(*parts, strict=True))
                    right = (value * gate.softmax(0)).sum(0)
                    assert float((found[token].double() - right).abs().max()) <= 1e-5, f"row {index}, token {position}"
                    made += 1
                token += 1
        assert made >= 2, "the scene closes no window"

    # ------------------------------------------------------------ float8

    def test_float8_entries_lose_only_their_own_precision(self, dtype: str) -> None:
        """Chosen keys and all keys: decode, and a prompt in chunks."""
        shape = Shape((16, 1), 80, 64, 16, dtype, FLOAT8, latent=True, k_scale=0.02, v_scale=0.02)
        scene, step = self.stepped(shape)
        select = self._some([at + i for _, at, n in WORK for i in range(n)], 70, 1).to(scene.torch_device)
        self._attended(scene, step, select)
        scene = self.target.scene(shape, LENGTHS)
        scene.fill([at for _, at, _ in WORK])
        check(scene, WORK, lse=True)
