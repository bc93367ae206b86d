"""The conformance suite of attention backends. Needs pytest.

Owns what every backend must do, whatever its layout and hardware. A third party writes one class:

    from octavo.testing.attention import AttentionSuite, AttentionTarget

    class TestMine(AttentionSuite):
        target = AttentionTarget(my_provider, Device("cuda", ...), dtypes=("bfloat16", "float16"))

Each test asks the provider's own `accepts` first, and is skipped with its reason where it rejects:
what a backend does not do is said once, in its provider. Everything is compared with a float64
oracle; caches are NaN wherever nothing was written, with guard bands on both sides, and pages lie
in random order. Sized for backends that compile: about 120 combinations of shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from octavo.attention.layer import prologue_spreads
from octavo.catalog import Accept, Device, Needs, Provider, Reject
from octavo.engine.plan import attention_facts
from octavo.interfaces import AttentionBackend, AttentionParts, ModelFacts, SharedPrefix
from octavo.model.operators import qk_norm_rope, spread
from octavo.testing.paged import Answer, Scene, Shape, stored

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest absolute error against the oracle, for values of unit variance."""

RATIOS = ((9, 3), (14, 2), (40, 8), (24, 1), (32, 32), (7, 7))
DIMS = (64, 80, 96, 112, 128, 192, 256)
BLOCKS = (1, 5, 8, 16, 32, 64, 128)
LENGTHS = (1, 15, 16, 17, 257)

Work = tuple[int, int, int]
"""(row index, first new token, new tokens)"""


@dataclass(frozen=True)
class AttentionTarget:
    """The backend under test, the device that it runs on, and the dtypes to try."""

    provider: Provider
    device: Device
    dtypes: Sequence[str]
    options: Any = None

    def needs(self, shape: Shape) -> Needs:
        """What a model with layers of this shape would ask of the backend."""
        layer, spec = shape.layer(), shape.spec()
        model = ModelFacts("Conformance", 512, shape.heads[0] * shape.k_dim, 1 << 17, (layer,), (spec,))
        facts = attention_facts(model, spec.dtype, shape.block_size)
        return Needs("attention", self.device, shape.dtype, {**facts, "sinks": shape.sinks})

    def answer(self, shape: Shape) -> Accept | Reject:
        return self.provider.accepts(self.needs(shape), self._options())

    def _options(self) -> Any:
        return self.provider.options() if self.options is None else self.options

    def scene(self, shape: Shape, lengths: Sequence[int], **kw: Any) -> Scene:
        """A scene with a fresh backend; skips the test where the provider rejects the shape."""
        answer = self.answer(shape)
        if isinstance(answer, Reject):
            pytest.skip(f"{self.provider.name}: {answer.reason}")
        return Scene(self.build(shape.dtype), shape, self.device, lengths, **kw)

    def build(self, dtype: str) -> AttentionBackend:
        module, _, name = self.provider.load.partition(":")
        backend: AttentionBackend = getattr(import_module(module), name)(self._options(), AttentionParts(self.device, dtype))
        return backend


def check(
    scene: Scene, work: Sequence[Work], *, layer: int = 0, lse: bool = False, shared: tuple[SharedPrefix, ...] = ()
) -> list[Answer]:
    """Run a step and compare every row with the oracle; free blocks and guard bands must be untouched. shared: what
    the host knows of common blocks, which must change nothing."""
    answers = scene.run(work, layer=layer, lse=lse, shared=shared)
    limit = TOLERANCE[scene.shape.dtype]
    for item, answer in zip(work, answers, strict=True):
        right = scene.expected(item, layer=layer)
        what = f"row {item[0]}, tokens [{item[1]}, {item[1] + item[2]}) of {scene.shape}"
        assert torch.isfinite(answer.out).all(), f"not finite: {what}"
        error = float((answer.out.double() - right.out).abs().max())
        assert error <= limit, f"off by {error:.2e} (at most {limit:.0e}): {what}"
        if lse:
            assert answer.lse is not None and right.lse is not None
            error = float((answer.lse.double() - right.lse).abs().max())
            assert error <= 2 * limit, f"lse off by {error:.2e} (at most {2 * limit:.0e}): {what}"
    scene.check_untouched()
    return answers


def check_prologue(scene: Scene, work: Sequence[Work], *, rotary: int, norm: bool, spreads: bool = False) -> None:
    """The backend's fused prologue against core's operator and what its own `write` stores: queries and keys
    within twice the dtype's rounding, values exactly. The scene's rows have K as wide as V. spreads: with spread=True, whose
    channels are sums over a head, so within twice the rounding of its largest."""
    shape, step = scene.shape, scene.step(work)
    (heads, kv_heads), dim, dtype = shape.heads, shape.k_dim, getattr(torch, shape.dtype)
    random = torch.Generator().manual_seed(9)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random).to(scene.torch_device, dtype)

    tokens = len(step.token_ids)
    qkv = draw(tokens, heads + 2 * kv_heads, dim)
    weight = draw(heads + kv_heads, dim) if norm else None
    angle = torch.rand(tokens, 1, rotary // 2, generator=random) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(scene.torch_device, dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(scene.torch_device, dtype)
    turned = qk_norm_rope(
        qkv[:, : heads + kv_heads].double(), None if weight is None else weight.double(), 1e-5, cos.double(), sin.double()
    )
    if spreads:
        turned = spread(turned).double()
    keys = stored(turned[:, heads:].to(dtype), shape.kv_dtype, shape.k_scale)
    values = stored(qkv[:, heads + kv_heads :].clone(), shape.kv_dtype, shape.v_scale)
    with torch.inference_mode():
        scene.backend.prepare(step)
        scene.backend.plan(step)
        extra = {"spread": True} if spreads else {}
        q = scene.backend.prologue(0, step, qkv, weight, 1e-5, cos, sin, **extra)  # type: ignore[attr-defined]
        slack = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[shape.dtype]
        torch.testing.assert_close(q.double(), turned[:, :heads], rtol=slack, atol=slack)
        at = 0
        for index, start, count in work:
            row = slice(at, at + count)
            found = scene.backend.gather(0, scene.rows[index].slot, start + count)
            coarse = {None: slack, "float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2}[shape.kv_dtype]  # one step of the cache's dtype
            torch.testing.assert_close(found[0][start:].double(), keys[row].double(), rtol=coarse, atol=coarse * shape.k_scale)
            torch.testing.assert_close(found[1][start:].double(), values[row].double(), rtol=0, atol=0)
            at += count
    scene.check_untouched()


def _shape_cases() -> list[Any]:
    """Pairwise over ratios, dims and block sizes (a Latin square); dtypes are taken in turn."""
    cases = []
    for i, heads in enumerate(RATIOS):
        for j, dim in enumerate(DIMS):
            size = BLOCKS[(i + j) % len(BLOCKS)]
            cases.append(pytest.param(heads, dim, size, i + j, id=f"{heads[0]}q{heads[1]}kv-d{dim}-block{size}"))
    return cases


class AttentionSuite:
    """Subclass it as `class TestX(AttentionSuite)` and set `target`."""

    target: AttentionTarget

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.target.dtypes)

    def dtype_in_turn(self, turn: int) -> str:
        return self.target.dtypes[turn % len(self.target.dtypes)]

    # ------------------------------------------------------------ shapes and lengths

    def test_the_backend_accepts_a_common_shape(self, dtype: str) -> None:
        """So that a suite in which everything is skipped does not pass."""
        shape = Shape(heads=(32, 8), k_dim=128, block_size=64, dtype=dtype)
        answer = self.target.answer(shape)
        assert not isinstance(answer, Reject), answer

    @pytest.mark.parametrize(("heads", "dim", "size", "turn"), _shape_cases())
    def test_decode_and_prefill_of_every_head_shape(self, heads: tuple[int, int], dim: int, size: int, turn: int) -> None:
        """Any GQA ratio, head width and block size, for decode and for chunks, ragged, in one step."""
        shape = Shape(heads=heads, k_dim=dim, block_size=size, dtype=self.dtype_in_turn(turn))
        scene = self.target.scene(shape, [*LENGTHS, 17, 257, 40])
        scene.fill([n - 1 for n in LENGTHS] + [0, 240, 37])
        check(scene, [(i, n - 1, 1) for i, n in enumerate(LENGTHS)] + [(5, 0, 17), (6, 240, 17), (7, 37, 3)])

    @pytest.mark.parametrize("size", [1, 4, 5, 16, 32, 64])
    def test_lengths_around_block_borders(self, size: int, dtype: str) -> None:
        """One token before, on and after every border; nothing past a row's end is read."""
        lengths = sorted({n for k in (1, 2, 3) for n in (k * size - 1, k * size, k * size + 1) if n > 0} | {1, 3, 7, 9})
        scene = self.target.scene(Shape(heads=(9, 3), block_size=size, dtype=dtype), [n + 1 for n in lengths])
        scene.fill([n - 1 for n in lengths])
        check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)])
        check(scene, [(i, n, 1) for i, n in enumerate(lengths)])

    def test_one_long_row_among_short_ones(self, dtype: str) -> None:
        lengths = [1, 5000, 3, 700, 64, 1]
        scene = self.target.scene(Shape(heads=(8, 2), k_dim=64, block_size=64, dtype=dtype), lengths)
        scene.fill([n - 1 for n in lengths])
        check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)], lse=True)

    def test_keys_and_values_of_different_width(self, dtype: str) -> None:
        scene = self.target.scene(Shape(heads=(4, 4), k_dim=192, v_dim=128, dtype=dtype), [33, 90])
        scene.fill([32, 0])
        check(scene, [(0, 32, 1), (1, 0, 90)])

    # ------------------------------------------------------------ masks

    @pytest.mark.parametrize("window", [1, 3, 16, 17, 64])
    def test_a_window_shows_that_many_keys(self, window: int, dtype: str) -> None:
        """W keys, the current one included: for decode, for a whole prompt, and for a chunk of one."""
        scene = self.target.scene(Shape(heads=(6, 2), window=window, dtype=dtype), [1, 2, 16, 17, 18, 200, 200, 200, 90])
        scene.fill([0, 1, 15, 16, 17, 199, 0, 130, 80])
        decode = [(i, n - 1, 1) for i, n in enumerate([1, 2, 16, 17, 18, 200])]
        check(scene, [*decode, (6, 0, 200), (7, 130, 70), (8, 80, 10)], lse=True)

    def test_blocks_out_of_the_window_are_never_loaded(self, dtype: str) -> None:
        """They have been given back: the table names no block, and what was theirs is NaN."""
        scene = self.target.scene(Shape(window=20, block_size=8, dtype=dtype), [150, 150, 150])
        scene.fill([149, 100, 140])
        for i, position in enumerate((149, 100, 140)):
            scene.drop_blocks_before(i, position)
        check(scene, [(0, 149, 1), (1, 100, 50), (2, 140, 10)])

    @pytest.mark.parametrize("window", [None, 24])
    @pytest.mark.parametrize(("softcap", "sinks"), [(0.0, True), (5.0, False), (5.0, True)])
    def test_sinks_and_softcap(self, softcap: float, sinks: bool, window: int | None, dtype: str) -> None:
        shape = Shape(heads=(8, 2), softcap=softcap, sinks=sinks, window=window, dtype=dtype)
        scene = self.target.scene(shape, [1, 40, 100, 100, 30])
        scene.fill([0, 39, 0, 60, 25])
        check(scene, [(0, 0, 1), (1, 39, 1), (2, 0, 100), (3, 60, 40), (4, 25, 5)], lse=True)

    # ------------------------------------------------------------ what must not matter

    @pytest.mark.parametrize("window", [None, 50])
    def test_a_prompt_in_chunks_is_the_prompt_at_once(self, window: int | None, dtype: str) -> None:
        shape = Shape(heads=(9, 3), window=window, dtype=dtype)
        at_once = check(self.target.scene(shape, [300]), [(0, 0, 300)])[0].out
        for sizes in ([1, 299], [100, 100, 100], [7, 16, 17, 1, 1, 64, 194]):
            scene, parts, start = self.target.scene(shape, [300]), [], 0
            for size in sizes:
                parts.append(check(scene, [(0, start, size)])[0].out)
                start += size
            error = float((torch.cat(parts).double() - at_once.double()).abs().max())
            assert error <= 2 * TOLERANCE[dtype], f"chunks {sizes} differ by {error:.2e}"

    def test_rows_of_any_kind_in_any_order_share_a_step(self, dtype: str) -> None:
        lengths = [50, 1, 130, 9, 77, 20, 64]
        starts = [49, 0, 0, 5, 76, 0, 30]
        work = [(i, start, n - start) for i, (start, n) in enumerate(zip(starts, lengths, strict=True))]
        shape = Shape(heads=(14, 2), dtype=dtype)
        for order in (work, work[::-1], work[3:] + work[:3]):
            scene = self.target.scene(shape, lengths)
            scene.fill(starts)
            check(scene, order, lse=True)

    @pytest.mark.parametrize("window", [None, 20])
    def test_tokens_of_one_sequence_may_be_rows_of_their_own(self, window: int | None, dtype: str) -> None:
        """A captured step runs the end of a prompt as rows of one token, in any order, beside rows that decode."""
        scene = self.target.scene(Shape(heads=(8, 2), window=window, dtype=dtype), [60, 17, 60, 33, 90, 5, 8])
        scene.fill([48, 16, 59, 32, 89, 0, 7])
        prompt = [(0, position, 1) for position in (59, 48, 50, 49, 58, 57, 51, 56, 55, 52, 54, 53)]
        check(scene, [*prompt[:1], (1, 16, 1), (6, 7, 1), *prompt[1:]], lse=True)

    def test_the_order_of_pages_does_not_matter(self, dtype: str) -> None:
        answers = []
        for page_seed in (1, 2):
            scene = self.target.scene(Shape(dtype=dtype), [100, 35], page_seed=page_seed)
            scene.fill([99, 0])
            answers.append(check(scene, [(0, 99, 1), (1, 0, 35)]))
        for one, other in zip(*answers, strict=True):
            assert float((one.out.double() - other.out.double()).abs().max()) <= TOLERANCE[dtype]

    def test_one_rows_nan_stays_its_own(self, dtype: str) -> None:
        """A request whose numbers have gone bad must not take its neighbours along."""
        scene = self.target.scene(Shape(dtype=dtype), [40, 40, 25])
        scene.rows[1].k[0][7] = scene.rows[1].v[0][7] = float("nan")
        scene.fill([39, 39, 0])
        work = [(0, 39, 1), (1, 39, 1), (2, 0, 25)]
        answers = scene.run(work)
        assert torch.isnan(answers[1].out).all()
        for i in (0, 2):
            error = float((answers[i].out.double() - scene.expected(work[i]).out).abs().max())
            assert error <= TOLERANCE[dtype], f"row {i} is off by {error:.2e}"

    def test_layers_do_not_mix(self, dtype: str) -> None:
        scene = self.target.scene(Shape(dtype=dtype), [30, 45], layers=2)
        for layer in (0, 1):
            scene.fill([29, 0], layer=layer)
        for layer in (1, 0):
            check(scene, [(0, 29, 1), (1, 0, 45)], layer=layer)

    # ------------------------------------------------------------ the prologue

    @pytest.mark.parametrize(
        ("heads", "dim", "rotary"),
        [((9, 3), 64, 64), ((16, 8), 128, 128), ((8, 2), 96, 32), ((7, 7), 80, 80), ((6, 2), 256, 256)],
    )
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize("spreads", [False, True], ids=["", "spread"])
    @pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
    def test_a_prologue_is_norm_rope_and_write(
        self, heads: tuple[int, int], dim: int, rotary: int, norm: bool, spreads: bool, kv_dtype: str | None, dtype: str
    ) -> None:
        shape = replace(Shape(heads=heads, k_dim=dim, block_size=16, dtype=dtype), kv_dtype=kv_dtype, k_scale=0.5, v_scale=2.0)
        scene = self.target.scene(shape, [33, 20, 40])
        if not hasattr(scene.backend, "prologue"):
            pytest.skip("the backend has no prologue of its own")
        if spreads and not prologue_spreads(scene.backend, shape.layer()):
            pytest.skip(f"the backend's prologue does not spread heads of {dim} channels")
        scene.fill([32, 0, 37])
        check_prologue(scene, [(0, 32, 1), (1, 0, 20), (2, 37, 3)], rotary=rotary, norm=norm, spreads=spreads)

    # ------------------------------------------------------------ the cache

    def test_gather_gives_back_what_was_written(self, dtype: str) -> None:
        scene = self.target.scene(Shape(heads=(6, 3), block_size=8, dtype=dtype), [21, 40])
        scene.fill([21, 40])
        for row in scene.rows:
            keys, values = scene.backend.gather(0, row.slot, row.length)
            assert torch.equal(keys, row.k[0]) and torch.equal(values, row.v[0])

    def test_copied_blocks_are_equal_and_the_source_stays(self, dtype: str) -> None:
        """Copy on write: in every layer of the group, and in no other block."""
        scene = self.target.scene(Shape(dtype=dtype), [32, 32], layers=2)
        for layer in (0, 1):
            scene.fill([32, 32], layer=layer)
        source = scene.table[scene.rows[0].slot, :2].long()
        target = scene.table[scene.rows[1].slot, :2].long()
        before = [cache.clone() for cache in scene.caches]
        scene.backend.copy_blocks(0, source, target)
        for cache, old in zip(scene.caches, before, strict=True):
            assert torch.equal(cache[target], old[source]) and torch.equal(cache[source], old[source])
        scene.check_untouched()

    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("scales", [(1.0, 1.0), (0.02, 0.5)])
    def test_a_float8_cache_loses_only_its_own_precision(self, kv_dtype: str, scales: tuple[float, float], dtype: str) -> None:
        shape = Shape(heads=(8, 2), k_dim=64, block_size=16, dtype=dtype)
        shape = replace(shape, kv_dtype=kv_dtype, k_scale=scales[0], v_scale=scales[1])
        scene = self.target.scene(shape, [64, 100, 70])
        scene.fill([63, 0, 60])
        check(scene, [(0, 63, 1), (1, 0, 100), (2, 60, 10)])
