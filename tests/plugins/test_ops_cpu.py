"""The CPU kernels against float64, and against the operators of core whose place they take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.engine.device import cpu_features
from octavo.errors import PluginError
from octavo.interfaces import AttentionLayer, KVSpec, OperatorParts
from octavo.sampling.rng import uniforms
from octavo.sampling.truncation import BLOCK, draw
from torch import Tensor

pytest.importorskip("llvmlite")
pytest.importorskip("octavo_ops_cpu")

from octavo_ops_cpu.jit import compiler
from octavo_ops_cpu.jit.compiler import compile_kernel, lanes
from octavo_ops_cpu.jit.emitter import Emitter, Value
from octavo_ops_cpu.matrix import MatrixPacker
from octavo_ops_cpu.operators import CpuOperators
from octavo_ops_cpu.provider import accepts_attention, accepts_operators, unfit

HERE = Device(features=cpu_features())
PRODUCTS = pytest.mark.skipif("avx512_bf16" not in HERE.features, reason="the CPU has no AVX512_BF16")
pytestmark = pytest.mark.skipif(bool(unfit(HERE, "float32")), reason=unfit(HERE, "float32"))

DTYPES = (torch.float32, torch.bfloat16)
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-8}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ops() -> dict[str, Any]:
    device = Device(features=HERE.features - {"amx_bf16"})
    return {name: op for (name, _), op in CpuOperators(None, OperatorParts(device, "bfloat16")).ops.items()}


def near(found: Tensor, right: Tensor, slack: float = 1.0) -> None:
    """Rounded once from what float64 gives, and the float32 sums on the way."""
    unit = ULP[found.dtype]
    torch.testing.assert_close(found.double(), right, rtol=slack * unit, atol=2e-6 * slack)


# ---------------------------------------------------------------- vector code


def mapped(body: Any, x: Tensor, out: Tensor) -> Tensor:
    """body(emitter, address of 16 values, address of their results) over all of x."""

    def kernel(e: Emitter, thread: Value, threads: Value, x: Value, out: Value, count: Value) -> None:
        with e.loop(0, count, e.lanes) as i:
            body(e, x + i * 4, out, i)

    compile_kernel("mapped", 3, kernel).alone(x.data_ptr(), out.data_ptr(), len(x))
    return out


def test_exp_is_good_to_two_units_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-87.3, 88.0, 1 << 16), torch.tensor([-88.0, -1e30, -torch.inf, torch.nan]), torch.zeros(12)))
    found = mapped(lambda e, x, out, i: e.store(e.exp(e.load(x, "float32")), out + i * 4, "float32"), x, torch.empty_like(x))
    right = x.double().exp()
    body, edge = slice(0, 1 << 16), slice(1 << 16, (1 << 16) + 3)
    assert float(((found.double() - right) / right)[body].abs().max()) <= 2 * 2**-23
    assert found[edge].tolist() == [0.0, 0.0, 0.0] and bool(found[(1 << 16) + 3].isnan())


def test_rounding_to_bfloat16_is_torch_s() -> None:
    """Of every kind of float32: normal, subnormal, halfway, infinite, NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    bits[:4096] = (bits[:4096] & 0xFFFF0000) | 0x8000  # exactly between two
    x = torch.from_numpy(bits.view(np.float32))
    found = mapped(
        lambda e, x, out, i: e.store(e.load(x, "float32"), out + i * 2, "bfloat16"), x, torch.empty(len(x), dtype=torch.bfloat16)
    )
    right = x.bfloat16()
    assert torch.equal(found.isnan(), right.isnan())
    keep = ~right.isnan()
    assert torch.equal(found[keep].view(torch.int16), right[keep].view(torch.int16))


def test_vectors_are_as_wide_as_the_processor_s() -> None:
    assert lanes() == (16 if "avx512f" in HERE.features else 8)


def test_a_kernel_runs_on_as_many_threads_as_torch_was_told(threads: int) -> None:
    def body(e: Emitter, thread: Value, threads: Value, out: Value) -> None:
        e.store_raw(threads, out + thread * 8, 8)

    kernel, seen = compile_kernel("threads", 1, body), torch.zeros(4, dtype=torch.int64)
    kernel.pooled(seen.data_ptr())
    assert seen.tolist() == [threads] * threads + [0] * (4 - threads)
    kernel.alone(seen.zero_().data_ptr())
    assert seen.tolist() == [1, 0, 0, 0]


def test_an_openmp_library_that_cannot_be_entered_is_an_error_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.link_thread_pool.cache_clear()
    monkeypatch.setattr(compiler, "_POOL", ("GOMP_nowhere",))
    with pytest.raises(PluginError, match=r"no GOMP_nowhere.*uninstall octavo-ops-cpu"):
        CpuOperators(None, OperatorParts(HERE, "float32"))
    monkeypatch.undo()
    CpuOperators(None, OperatorParts(HERE, "float32"))


# ---------------------------------------------------------------- norms and gates


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_core_s(ops: dict[str, Any], threads: int, dtype: torch.dtype, rows: int) -> None:
    x, residual, weight = torch.randn(rows, 576).to(dtype), torch.randn(rows, 576), torch.rand(576) + 0.5
    total = residual.double() + x.double()
    right = F.rms_norm(total, (576,), weight.double(), 1e-5)
    normal, stream = ops["add_rms_norm"](x, residual.clone(), weight, 1e-5)
    near(normal, right, 2)
    assert normal.dtype == dtype and torch.equal(stream, residual + x)
    near(ops["rms_norm"](total.float(), weight, 1e-5, dtype), right, 2)


def test_rows_of_a_norm_may_lie_apart_and_a_width_of_no_whole_vectors_is_core_s(ops: dict[str, Any]) -> None:
    wide = torch.randn(5, 200)
    near(
        ops["rms_norm"](wide[:, :96], torch.ones(96), 1e-5, torch.float32), F.rms_norm(wide[:, :96].double(), (96,), eps=1e-5), 2
    )
    near(
        ops["rms_norm"](wide[:, :50], torch.ones(50), 1e-5, torch.float32), F.rms_norm(wide[:, :50].double(), (50,), eps=1e-5), 2
    )


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("width", [1536, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_core_s_rounded_once(ops: dict[str, Any], threads: int, dtype: torch.dtype, width: int, rows: int) -> None:
    x = (torch.randn(rows, 2 * width) * 4).to(dtype)
    x[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -0.0])
    gate, up = x.double().chunk(2, -1)
    slack = 4 if width % 16 == 0 else 2000  # core's operators round in between
    near(ops["silu_mul"](x), F.silu(gate) * up, slack)
    near(ops["gelu_tanh_mul"](x), F.gelu(gate, approximate="tanh") * up, slack)


# ---------------------------------------------------------------- products


def packed(outputs: int, inputs: int, *, head: bool = False, bias: bool = False) -> tuple[Any, Tensor, Tensor | None]:
    weight = torch.randn(outputs, inputs).bfloat16()
    added = torch.randn(outputs).bfloat16() if bias else None
    return MatrixPacker()(weight, added, head=head), weight, added


@PRODUCTS
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 11, 16, 17, 23, 64, 300])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(16, 8, False), (176, 576, True), (64, 1544, False)])
def test_a_product_is_exact_up_to_its_sums(threads: int, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """Whatever the rows, and for blocks that threads cannot share evenly."""
    x = torch.randn(rows, inputs).bfloat16()
    for head in (True, False):
        matrix, weight, added = packed(outputs, inputs, head=head, bias=bias)
        right = F.linear(x.double(), weight.double(), None if added is None else added.double())
        scale = float(F.linear(x.double().abs(), weight.double().abs()).max())
        found = matrix(x)
        assert found.dtype == (torch.float32 if head else torch.bfloat16)
        assert float((found.double() - right).abs().max()) <= scale * 2**-21 + (0 if head else float(right.abs().max()) * 2**-8)


@PRODUCTS
@pytest.mark.parametrize("rows", [1, 6, 16, 17, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product_is_the_product_and_the_gate(threads: int, rows: int, bias: bool) -> None:
    matrix, weight, added = packed(2 * 80, 256, bias=bias)
    x = torch.randn(rows, 256).bfloat16() / 8
    gate, up = F.linear(x.double(), weight.double(), None if added is None else added.double()).chunk(2, -1)
    for name, act in (("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))):
        torch.testing.assert_close(matrix.gated(name)(x).double(), act(gate) * up, rtol=2**-8, atol=2e-4)
    assert matrix.gated("relu") is None


@PRODUCTS
def test_one_row_s_nan_stays_its_own() -> None:
    matrix, _, _ = packed(48, 64)
    x = torch.randn(5, 64).bfloat16()
    x[2, 7] = torch.nan
    found = matrix(x)
    assert found[2].isnan().all() and torch.isfinite(found[[0, 1, 3, 4]]).all()


@PRODUCTS
def test_a_matrix_that_cannot_be_packed_is_left_to_core() -> None:
    make = MatrixPacker()
    assert make(torch.randn(40, 64).bfloat16(), None, head=False) is None
    assert make(torch.randn(48, 60).bfloat16(), None, head=False) is None
    assert make(torch.randn(48, 64), None, head=False) is None


# ---------------------------------------------------------------- the draw


def drawn(ops: dict[str, Any], logits: Tensor, temperature: list[float], vocab: int) -> tuple[list[int], list[bool]]:
    count = len(logits)
    tokens, failed = ops["draw"](logits, torch.tensor(temperature), torch.arange(count), torch.arange(count) + 7, vocab)
    return tokens.tolist(), failed.tolist()


@pytest.mark.parametrize("vocab", [49152, 1000, 5])
def test_a_draw_is_core_s_with_the_same_number(ops: dict[str, Any], threads: int, vocab: int) -> None:
    """Padding past the vocabulary is never looked at."""
    temperature = [0.5, 1.0, 2.0] * 8
    logits = torch.randn(24, vocab + 3) * 3
    logits[:, vocab:] = torch.nan
    x = torch.full((24, -(-vocab // BLOCK) * BLOCK), -torch.inf)
    x[:, :vocab] = (logits[:, :vocab] - logits[:, :vocab].amax(-1, keepdim=True)) / torch.tensor(temperature)[:, None]
    right = draw(x, torch.from_numpy(uniforms(np.arange(24), np.arange(24) + 7)))
    assert drawn(ops, logits, temperature, vocab) == (right.tolist(), [False] * 24)


def test_temperature_0_takes_the_first_of_the_likeliest(ops: dict[str, Any]) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, 999] = logits[1, 17] = logits[1, 18] = logits[1, 900] = 2.0
    assert drawn(ops, logits, [0.0] * 3, 1000) == ([999, 17, 0], [False] * 3)


def test_what_is_excluded_is_never_drawn_and_a_row_without_a_choice_fails_alone(ops: dict[str, Any]) -> None:
    logits = torch.full((5, 600), -torch.inf)
    logits[0, 599] = logits[1, 3] = 0.0
    logits[3, 5], logits[4, 6] = torch.nan, torch.inf
    for temperature in (0.0, 1.0):
        tokens, failed = drawn(ops, logits, [temperature] * 5, 600)
        assert tokens[:2] == [599, 3] and failed == [False, False, True, True, True]


def test_a_kept_token_goes_into_the_table(ops: dict[str, Any]) -> None:
    logits, table = torch.zeros(2, 64), torch.zeros(4, 9, dtype=torch.int32)
    logits[0, 7] = logits[1, 8] = 1.0
    ops["draw"](logits, torch.zeros(2), torch.zeros(2).long(), torch.tensor([4, 5]), 64, (table, torch.tensor([3, 1])))
    assert table.nonzero().tolist() == [[1, 5], [3, 4]] and (table[3, 4], table[1, 5]) == (7, 8)


# ---------------------------------------------------------------- what it takes


def asked(kind: Any, device: Device, dtype: str = "bfloat16", **facts: Any) -> Accept | Reject:
    accepts = accepts_operators if kind == "operators" else accepts_attention
    return accepts(Needs(kind, device, dtype, facts), None)


@pytest.mark.parametrize(
    ("device", "dtype", "facts", "words"),
    [
        (Device("cuda", capability=(9, 0)), "bfloat16", {}, "device is cuda"),
        (Device(), "bfloat16", {}, "no AVX2"),
        (HERE, "float16", {}, "dtype float16"),
        (HERE, "bfloat16", {"hidden_size": 72}, "hidden_size 72 is not a multiple of 16"),
    ],
)
def test_a_refusal_of_the_operators_names_the_need(device: Device, dtype: str, facts: dict[str, Any], words: str) -> None:
    answer = asked("operators", device, dtype, **facts)
    assert isinstance(answer, Reject) and words in answer.reason


LAYER = AttentionLayer(index=3, num_heads=8, num_kv_heads=2, k_dim=64, v_dim=64, scale=0.125)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype float8_e4m3fn with bfloat16 queries"),
        ({"block_size": 24}, "block_size 24"),
        ({"kv_specs": (KVSpec("latent", 1, 576, 512, "bfloat16"),)}, "kind 'latent'"),
        ({"layers": (AttentionLayer(3, 8, 2, 192, 128, 0.1),)}, "layer 3: K is 192 wide and V 128"),
        ({"layers": (AttentionLayer(3, 8, 2, 44, 44, 0.1),)}, "layer 3: heads are 44 wide"),
        ({"layers": (AttentionLayer(3, 130, 1, 64, 64, 0.1),)}, "130 query heads for 1 KV heads"),
    ],
)
def test_a_refusal_of_the_attention_names_the_need(facts: dict[str, Any], words: str) -> None:
    answer = asked("attention", HERE, **facts)
    assert isinstance(answer, Reject) and words in answer.reason


def test_who_multiplies_is_said() -> None:
    with_units = Device(features=(HERE.features | {"avx512_bf16"}) - {"amx_bf16"})
    reasons = {
        "this plugin's": asked("operators", with_units),
        "torch's, for float32": asked("operators", with_units, "float32"),
        "no AVX512_BF16": asked("operators", Device(features=frozenset({"avx2"}))),
        "AMX": asked("operators", Device(features=with_units.features | {"amx_bf16"})),
        "prompts: this plugin's": asked("attention", with_units, layers=(LAYER,), block_size=16),
        "prompts: core's": asked("attention", with_units, "float32", layers=(LAYER,), block_size=16),
    }
    for words, answer in reasons.items():
        assert isinstance(answer, Accept) and words in answer.reason
    assert isinstance(asked("attention", HERE, layers=(LAYER,), block_size=16), Accept)
