"""quant_fp8 on a GPU: the conformance suite, its operators against torch's, shapes of public models, an engine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.extend(str(p / "src") for p in (Path(__file__).parents[2] / "plugins").iterdir())

from octavo.bench.kernel import cuda_device
from octavo.catalog import Device
from octavo.interfaces import Activation, AttentionLayer, AttentionParts, BoundGroup, KVGroup, Limits, Linear, OperatorParts
from octavo.testing.bare_model import DictWeights
from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget
from octavo_quant_fp8 import fused, numerics, operators, products
from octavo_quant_fp8.kernels import rows
from octavo_quant_fp8.provider import QUANTIZER
from octavo_quant_fp8.scheme import Scheme
from octavo_quant_fp8.weights import GatheredWeights
from torch import Tensor

from tests.plugins.fp8 import DIALECTS, BlockSuite, by_block, by_channel, compressed, inputs, stored

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = cuda_device()
OLD = Device("cuda", name="a GPU without FP8 units", capability=(8, 0))
LOOSE = {"bfloat16": 0.04, "float16": 0.04}
DTYPES = ("bfloat16", "float16")


def activated(linear: Linear, x: Tensor) -> Tensor | Activation:
    found = operators.FORMATS.get(linear.activation)
    return x if found is None else Activation(*found(x))


class TestWeightsByChannel(QuantizerSuite):
    target = QuantizerTarget(QUANTIZER, DEVICE, DTYPES, store=stored(by_channel), config=compressed("channel", None))


class TestWeightsByBlock(BlockSuite):
    target = QuantizerTarget(
        QUANTIZER, DEVICE, DTYPES, store=stored(lambda w: by_block(w, "weight_scale")), config=compressed("block", None)
    )


class TestWithoutUnits(QuantizerSuite):
    """As a device below 8.9 runs it: activations stay plain although the checkpoint has scales for them."""

    target = QuantizerTarget(
        QUANTIZER, OLD, ("bfloat16",), store=stored(by_channel), config=compressed("channel", inputs("token"))
    )


class TestInputsByToken(QuantizerSuite):
    target = QuantizerTarget(
        QUANTIZER, DEVICE, DTYPES, store=stored(by_channel), config=compressed("channel", inputs("token")),
        tolerance=LOOSE, activate=activated,
    )  # fmt: skip


class TestPlainInputsThatTheLinearQuantises(QuantizerSuite):
    target = QuantizerTarget(
        QUANTIZER, DEVICE, ("bfloat16",), store=stored(by_channel), config=compressed("channel", inputs("token")), tolerance=LOOSE
    )


class TestInputsByGroup(BlockSuite):
    target = QuantizerTarget(
        QUANTIZER, DEVICE, DTYPES, store=stored(by_block), config=DIALECTS["block"][0], tolerance=LOOSE, activate=activated
    )


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Tensors that a test makes are on the GPU, and the same each time."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        yield


def same(got: Activation, want: Activation) -> None:
    """Equal but for values that lie between two neighbours."""
    assert got.data.dtype == want.data.dtype == numerics.E4M3 and got.data.shape == want.data.shape
    torch.testing.assert_close(got.scale, want.scale, rtol=1e-5, atol=0, equal_nan=True)
    a, b = got.data.float(), want.data.float()
    assert torch.equal(a.isnan(), b.isnan())
    off = torch.where(b.isnan(), 0.0, (a - b).abs() / b.abs().clamp_min(2.0**-6))
    assert float(off.max()) <= 0.13 and float((off > 0).float().mean()) < 0.01


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("format", ["fp8_token", "fp8_block"])
@pytest.mark.parametrize(("dtype", "size"), [(BF16, 4096), (BF16, 5000), (FP16, 576)])
@pytest.mark.parametrize("tokens", [2, 33])
def test_norms_and_gates_quantise_as_torch_does(format: str, dtype: torch.dtype, size: int, tokens: int) -> None:
    parts = OperatorParts(DEVICE, "bfloat16")
    ops, oracle = fused.TritonOperators(None, parts).ops, operators.TorchOperators(None, parts).ops
    x, residual, weight = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size) * 9, torch.randn(size)
    same(ops["rms_norm", format](residual, weight, 1e-5, dtype), oracle["rms_norm", format](residual, weight, 1e-5, dtype))
    want, total = oracle["add_rms_norm", format](x, residual.clone(), weight, 1e-5)
    got, stream = ops["add_rms_norm", format](x, residual, weight, 1e-5)
    same(got, want)
    torch.testing.assert_close(stream, total)
    gate_up = (torch.randn(tokens, 2 * size) * 3).to(dtype)
    same(ops["silu_mul", format](gate_up), oracle["silu_mul", format](gate_up))


@pytest.mark.usefixtures("on_gpu")
def test_one_row_is_left_plain_for_a_product_without_matrix_units() -> None:
    ops = fused.TritonOperators(None, OperatorParts(DEVICE, "bfloat16")).ops
    x, residual, weight = torch.randn(1, 4096).to(BF16), torch.randn(1, 4096), torch.rand(4096)
    found, stream = ops["add_rms_norm", "fp8_token"](x, residual.clone(), weight, 1e-5)
    want = torch.rms_norm(x + residual, (4096,), weight, 1e-5)
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(stream, x + residual)
    for n, k in ((6144, 4096), (4096, 14336), (28672, 4096), (72, 100), (40, 9000)):
        made, dense = product(n, k, Scheme("channel", "token"), BF16)
        row = torch.randn(1, k).to(BF16)
        want = row.double() @ dense.T
        torch.testing.assert_close(made(row).double(), want, rtol=1e-2, atol=1e-2 * float(dense.norm()) / n**0.5)
        if (gated := made.gated("silu")) is not None:
            gate, up = want.chunk(2, -1)
            want = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(gated(row).double(), want, rtol=2e-2, atol=1e-2 * float(want.norm()) / (n / 2) ** 0.5)


@pytest.mark.usefixtures("on_gpu")
def test_a_row_that_is_not_finite_stays_so_and_its_neighbours_do_not_notice() -> None:
    x = torch.randn(5, 4096).to(BF16)
    clean = fused.quantise_input(fused.launcher(DEVICE), False, x)
    x[1, 9], x[3, 2000] = float("nan"), float("inf")
    got = fused.quantise_input(fused.launcher(DEVICE), False, x)
    assert (got.data.float() * got.scale).isnan().any(1).tolist() == [False, True, False, True, False]
    for row in (0, 2, 4):
        assert torch.equal(got.data[row].float(), clean.data[row].float())


def product(n: int, k: int, scheme: Scheme, dtype: torch.dtype, *, head: bool = False) -> tuple[Any, Tensor]:
    table = DictWeights()
    weights = GatheredWeights({"a": n}, k, scheme, bias=False, weights=table, device=torch.device("cuda"), dtype=dtype)
    values = (torch.randn(n, k) * 60).clamp(-448, 448).to(numerics.E4M3)
    if scheme.weight == "block":
        scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
        table.fill({"a.weight": values, "a.weight_scale_inv": scale}, lambda name: False)
        dense = values.double() * numerics.spread_blocks(scale, n, k).double()
    else:
        scale = torch.rand(n, 1) + 0.5
        table.fill({"a.weight": values, "a.weight_scale": scale}, lambda name: False)
        dense = values.double() * scale.double()
    return products.cuda_product(weights, DEVICE, dtype, head=head), dense


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_products_of_a_public_model_s_shapes_at_every_batch(n: int, k: int, kind: str) -> None:
    """Fast accumulation keeps sums to 14 bits or so: a quarter of a percent, a tenth of what rounding inputs costs."""
    scheme = Scheme("block", "block", scale_name="weight_scale_inv") if kind == "block" else Scheme("channel", "token")
    made, dense = product(n, k, scheme, BF16)
    quantise = numerics.quantise_groups if kind == "block" else numerics.quantise_rows
    for m in (1, 3, 8, 16, 17, 48, 64, 65, 128, 200, 256, 300):
        x = Activation(*quantise(torch.randn(m, k)))
        wide = numerics.spread_groups(x.scale, k) if kind == "block" else x.scale
        want = (x.data.double() * wide.double()) @ dense.T
        error = float((made(x).double() - want).norm() / want.norm())
        assert error < 6e-3, (m, error)
        assert torch.equal(made(x), made(x)), "split sums are added in a fixed order"


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1040, 2064), (4096, 1024), (272, 8208), (16400, 1040)])
def test_the_cuda_product_ends_where_its_matrices_do(n: int, k: int, dtype: torch.dtype) -> None:
    """No dimension is a multiple of a tile; a bias; results that were not written would be NaN."""
    if not rows.supported(torch.device("cuda"), n, k):
        pytest.skip("rows.cu needs compute capability 9 and CuPy")
    data, scale = (torch.randn(n, k) * 60).clamp(-448, 448).to(numerics.E4M3), torch.rand(n) * 1e-3 + 1e-4
    bias = torch.randn(n).to(dtype)
    few = rows.FewRows(data, scale, bias, dtype)
    for m in (2, 7, 8, 9, 31, 64, 65, 128, 129, 255):
        if few.serves(m):
            x = Activation(*numerics.quantise_rows(torch.randn(m, k) * torch.arange(1, m + 1)[:, None]))
            want = (x.data.double() * x.scale.double()) @ (data.double() * scale.double()[:, None]).T + bias.double()
            torch.empty(m, n, dtype=dtype).fill_(float("nan"))  # what the allocator gives next
            error = (few(x).double() - want).norm(dim=1) / want.norm(dim=1)
            assert float(error.max()) < 6e-3, (m, error)
            assert torch.equal(few(x), few(x)), "split sums are added in a fixed order"


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("m", [1, 2, 8, 16, 27, 32, 64, 72, 100, 128, 136, 200, 256])
def test_captured_layers_read_nothing_before_it_is_written(m: int) -> None:
    """Kernels of a graph begin before the one in front has ended. Inputs change in size from one replay to the next, so that what was read
    too early, or kept from the replay before, is far off; what it should be comes from the same kernels, each waited for."""
    ops = fused.TritonOperators(None, OperatorParts(DEVICE, "bfloat16")).ops
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    linear = {name: product(n, k, Scheme("channel", "token"), BF16)[0] for name, (n, k) in shapes.items()}
    gated = linear["gate_up"].gated("silu")
    x0, stream, weight = torch.empty(m, 4096, dtype=BF16), torch.empty(m, 4096), torch.rand(4096) + 0.1

    def two_layers(then: Callable[[], None]) -> Tensor:
        def op(name: str, *args: Any) -> Any:
            found = ops[name, "fp8_token"](*args)
            then()
            return found

        def multiplied(name: str, x: Tensor | Activation) -> Tensor:
            found = linear[name](x)
            then()
            return found  # type: ignore[no-any-return]

        x = x0
        for _ in range(2):
            qkv = multiplied("qkv", op("add_rms_norm", x, stream, weight, 1e-5)[0])
            x = op("add_rms_norm", multiplied("o", qkv[:, :4096]), stream, weight, 1e-5)[0]
            inner = gated(x)
            then()
            x = multiplied("down", inner)
        return x

    def begin(seed: int) -> None:
        random = torch.Generator("cuda").manual_seed(seed)
        sizes = 10.0 ** (4 * torch.rand(m, 1, generator=random) - 2)
        x0.copy_(torch.randn(m, 4096, generator=random) * sizes)
        stream.copy_(torch.randn(m, 4096, generator=random) * sizes)

    begin(0)
    two_layers(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = two_layers(lambda: None)
    for seed in range(1, 9):
        begin(seed)
        want, after = two_layers(torch.cuda.synchronize).double(), stream.double()
        begin(seed)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in ((out.double(), want), (stream.double(), after)):
            error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert float(error.max()) < 1e-2, (m, seed, error)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("n", "k"), [(32000, 2048), (49152, 576)])
def test_a_quantised_head_gives_float32_at_every_batch(n: int, k: int) -> None:
    made, dense = product(n, k, Scheme("channel", "token", stored=True), BF16, head=True)
    for m in (1, 2, 40, 100, 256, 300):
        x = torch.randn(m, k).to(BF16)
        if m == 1:
            want = x.double() @ dense.T
        else:
            data, scale = numerics.quantise_rows(x)
            want = (data.double() * scale.double()) @ dense.T
        got = made(x)
        assert got.dtype == torch.float32 and got.shape == (m, n)
        assert float((got.double() - want).norm() / want.norm()) < 3e-3, m


@pytest.mark.usefixtures("on_gpu")
def test_counters_of_split_sums_are_left_at_zero() -> None:
    made, _ = product(4096, 14336, Scheme("channel", "token"), BF16)
    for m in (1, 16, 64):
        made(Activation(*numerics.quantise_rows(torch.randn(m, 14336))))
    assert all(not scratch.counts.any() for scratch in products._scratch.values())


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize(("length", "mebibytes"), [(4096, 16), (1 << 20, 512)])
def test_the_memory_plan_knows_what_widened_pages_of_an_fp8_cache_take(name: str, length: int, mebibytes: int) -> None:
    """Prompts over an FP8 cache are read from a workspace of 16-bit pages, which holds as many tokens as a step may see, up to a bound."""
    if DEVICE.capability != (9, 0):
        pytest.skip("only the Hopper kernel reads widened pages")
    parts = AttentionParts(DEVICE, "bfloat16")
    backend: Any
    if name == "cupy":
        pytest.importorskip("cupy")
        from octavo_attention_cupy.backend import CupyAttention
        from octavo_attention_cupy.provider import CupyOptions

        backend = CupyAttention(CupyOptions(), parts)
    else:
        from octavo_attention_triton.backend import TritonAttention
        from octavo_attention_triton.provider import TritonOptions

        backend = TritonAttention(TritonOptions(), parts)
    layer, limits = AttentionLayer(0, 32, 8, 128, 128, 0.1), Limits(4, 2048, length)
    spec = layer.kv_spec("float8_e4m3fn")
    layout = backend.layout(spec, 64)
    group = KVGroup(0, spec, (0,), 64, layout.page_bytes)
    cache = torch.zeros(2, *layout.page_shape, dtype=torch.float8_e4m3fn, device="cuda")
    planned = backend.workspace_bytes([group], [layer], limits)
    gc.collect()  # backends of earlier tests hold memory until then, and would give it back in between
    before = torch.cuda.memory_allocated()
    backend.bind([BoundGroup(group, layout, (layer,), (cache,))], limits)
    taken = torch.cuda.memory_allocated() - before
    assert planned == mebibytes << 20
    assert planned <= taken <= planned + (64 << 20), "besides small lists"


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"activations": "none"}])
def test_an_engine_serves_fp8_as_bfloat16_would(options: dict[str, Any], tmp_path: Path) -> None:
    """Through captured graphs, the checkpoint of a tiny model: the log-probabilities of a prompt, then a few tokens."""
    from octavo.bench.perplexity import score
    from octavo.config import EngineConfig
    from octavo.engine.build import build_engine
    from octavo.plugins import discover

    from tests.tiny import tiny_llama

    folder = tiny_llama(tmp_path / "m", hidden_size=256, intermediate_size=512, head_dim=64, std=0.05, dtype=BF16)
    plugins = {"quantizer": {"fp8": {"activations": options.pop("activations")}}} if "activations" in options else {}
    found = []
    for more in ({}, {"quantization": "fp8", **options}):
        config = EngineConfig(
            model=str(folder), max_model_len=128, num_gpu_blocks_override=64, plugins=plugins if more else {}, **more
        )
        extra = ["octavo_quant_fp8", "octavo_ops_triton", "octavo_attention_triton"]
        engine = build_engine(config, discover(config.plugins, extra_modules=extra))
        found.append(torch.tensor(score(engine, [list(range(8, 100)), list(range(300, 340))])[0]))
    assert 1e-5 < float((found[0] - found[1]).abs().mean()) < 0.1
