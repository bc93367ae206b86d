"""The FP8 Triton kernels without a GPU: arithmetic, masks and addresses under Triton's interpreter.

Small shapes only: the interpreter runs every program in numpy. The oracle is the plugin's torch code, which has its own tests.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + """
import json, traceback
from functools import partial
import torch
import numpy as np
import triton.language as tl
convert = interpreter._convert_float
def converted(data, source, target, mode):  # the interpreter's own rounding to float8 loses carries: torch's instead
    if target == tl.float8e4nv:
        wide = torch.from_numpy(np.ascontiguousarray(data).view({16: np.float16, 32: np.float32}[source.primitive_bitwidth]))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if source == tl.float8e4nv:
        narrow = torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn)
        kind = {16: torch.float16, 32: torch.float32}[target.primitive_bitwidth]
        return narrow.to(kind).numpy().view(getattr(np, f"uint{target.primitive_bitwidth}"))
    return convert(data, source, target, mode)
interpreter._convert_float = converted
torch.set_num_threads(1)
torch.manual_seed(1)
from octavo.catalog import Device
from octavo.interfaces import Activation, OperatorParts
from octavo_ops_triton.launch import Launcher
from octavo_quant_fp8 import fused, numerics, operators, products, tiles
from octavo_quant_fp8.reference import ReferenceProduct
from octavo_quant_fp8.scheme import Scheme
from octavo_quant_fp8.weights import GatheredWeights
from octavo.testing.bare_model import DictWeights

parts = OperatorParts(Device("cpu"), "float32")
ops, oracle = fused.TritonOperators(None, parts).ops, operators.TorchOperators(None, parts).ops
launch = Launcher(pdl=False)

def same(got, want):
    assert got.data.dtype == want.data.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.scale, want.scale, rtol=3e-6, atol=0, equal_nan=True)
    a, b = got.data.float(), want.data.float()
    assert a.shape == b.shape and (a.isnan() == b.isnan()).all()
    step = torch.where(b.isnan(), 0.0, (a - b).abs() / b.abs().clamp_min(2.0 ** -6))
    assert step.max() <= 0.13, step.max()  # a value on the edge between two neighbours may fall on either side
    assert (step > 0).float().mean() < 0.01

def norms():
    for size in (128, 200):
        for format in ("fp8_token", "fp8_block"):
            x, residual, weight = torch.randn(3, size), torch.randn(3, size), torch.rand(size)
            same(ops["rms_norm", format](residual, weight, 1e-5, torch.float32), oracle["rms_norm", format](residual, weight, 1e-5, torch.float32))
            want, total = oracle["add_rms_norm", format](x, residual.clone(), weight, 1e-5)
            got, mine = ops["add_rms_norm", format](x, residual, weight, 1e-5)
            same(got, want)
            assert torch.equal(mine, total) and mine.data_ptr() == residual.data_ptr()

def gates():
    for size in (128, 300):
        for format in ("fp8_token", "fp8_block"):
            x = torch.randn(3, 2 * size)
            x[1] = 0
            same(ops["silu_mul", format](x), oracle["silu_mul", format](x))

def inputs():
    x = torch.randn(4, 200)
    x[1, 7], x[2, 150] = float("nan"), float("inf")
    same(fused.quantise_input(launch, False, x), Activation(*numerics.quantise_rows(x)))
    same(fused.quantise_input(launch, True, x), Activation(*numerics.quantise_groups(x)))
    x = torch.randn(4, 200) * 100
    same(fused.quantise_input(launch, False, x, 50.0), Activation(*numerics.quantise_rows(x, 50.0)))
    scale = torch.tensor([0.3])
    same(fused.quantise_static(launch, x, scale), Activation(numerics.quantise_static(x, scale), scale.expand(4, 1)))

def gathered(scheme, rows, k, bias):
    table = DictWeights()
    made = GatheredWeights(rows, k, scheme, bias=bias, weights=table, device=torch.device("cpu"), dtype=torch.float32)
    tensors = {}
    for name, n in rows.items():
        weight = torch.randn(n, k)
        if scheme.weight == "block":
            data, scale = numerics.quantise_blocks(weight)
            tensors |= {f"{name}.weight": data, f"{name}.weight_scale_inv": scale}
        else:
            data, scale = numerics.quantise_rows(weight)
            tensors |= {f"{name}.weight": data, f"{name}.weight_scale": scale}
        if bias:
            tensors[f"{name}.bias"] = torch.randn(n)
    table.fill(tensors, lambda name: False)
    return made

def products_of(kind, scheme, cases):
    for rows, k, m, bias in cases:
        made = gathered(scheme, rows, k, bias)
        want = ReferenceProduct(made, torch.float32)
        mine = kind(made, launch, torch.float32)
        x = torch.randn(m, k)
        torch.testing.assert_close(mine(x), want(x), rtol=2e-3, atol=2e-3 * k ** 0.5)

def row_products():
    for split in (1, 2):
        products.product_tile = lambda m, n, k: tiles.Tile(16, 32, 64, split, 4, 2)
        products_of(products.RowProduct, Scheme("channel", "token"),
                    (({"a": 64}, 128, 2, False), ({"a": 40, "b": 9}, 100, 17, True), ({"a": 33}, 300, 3, True)))
    assert not products.scratch(torch.device("cpu")).counts.any(), "counters must be zero between launches"

def one_row():
    for tile in (tiles.RowTile(8, 512, 512, 4), tiles.RowTile(8, 128, 64, 4), tiles.RowTile(8, 128, 128, 4)):
        products.row_tile = lambda n, k: tile
        for rows, k, bias in (({"a": 40, "b": 9}, 256, True), ({"a": 33}, 300, False)):
            made = gathered(Scheme("channel", "token"), rows, k, bias)
            mine, want = products.RowProduct(made, launch, torch.float32), ReferenceProduct(made, torch.float32)
            x = torch.randn(1, k)
            quantised = Activation(*numerics.quantise_rows(x))
            torch.testing.assert_close(mine(quantised), want(quantised), rtol=2e-3, atol=1e-3)
            made.scheme = Scheme("channel", "none")  # a plain row is not quantised
            torch.testing.assert_close(mine(x), ReferenceProduct(made, torch.float32)(x), rtol=2e-3, atol=1e-3)

def one_gated_row():
    for rows, k, bias in (({"gate": 20, "up": 20}, 256, True), ({"gate": 18, "up": 18}, 300, False)):
        products.row_tile = lambda n, k: tiles.RowTile(8, 512, 512, 4)
        made = gathered(Scheme("channel", "token"), rows, k, bias)
        mine, x = products.RowProduct(made, launch, torch.float32), torch.randn(1, k)
        made.scheme = Scheme("channel", "none")  # a plain row is not quantised
        gate, up = ReferenceProduct(made, torch.float32)(x).chunk(2, -1)
        torch.testing.assert_close(mine.gated("silu")(x), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=1e-3)
        x = torch.randn(3, k)
        same(mine.gated("silu")(x), oracle["silu_mul", "fp8_token"](mine(x)))
        assert mine.gated("gelu_tanh") is None
        products.row_tile = lambda n, k: tiles.RowTile(8, 128, 64, 4)  # a row that is too long to hold
        assert mine.gated("silu") is None

def weights_only():
    products.mixed_tile = lambda m, *, blocks: tiles.Tile(16, 32, 128 if blocks else 64, 1, 4, 2)
    cases = (({"a": 64}, 128, 2, False), ({"a": 40, "b": 9}, 140, 17, True), ({"a": 33}, 300, 1, True))
    for weight in ("channel", "block"):
        scheme = Scheme(weight, "none", scale_name="weight_scale_inv" if weight == "block" else "weight_scale")
        for bytewise in (False, True):
            products_of(partial(products.MixedProduct, bytewise=bytewise), scheme, cases)

def widening():
    # every byte but the two that are not numbers, through a product with the unit matrix
    bytes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8).view(2, 128)
    for dtype in (torch.float16, torch.float32):
        made = gathered(Scheme("channel", "none"), {"a": 2}, 128, False)
        made._data, made._scale = bytes.view(torch.float8_e4m3fn), torch.ones(2)
        got = products.MixedProduct(made, launch, torch.float32, bytewise=True)(torch.eye(128, dtype=dtype)[:17])
        assert torch.equal(got.T, bytes.view(torch.float8_e4m3fn).float()[:, :17])

def block_products():
    products.block_tile = lambda m, n: tiles.Tile(16, 64, 128, 1, 4, 2)
    products_of(products.BlockProduct, Scheme("block", "block", scale_name="weight_scale_inv"),
                (({"a": 128}, 256, 2, False), ({"a": 100, "b": 60}, 140, 20, True)))

found = {}
for check in (norms, gates, inputs, row_products, one_row, one_gated_row, weights_only, widening, block_products):
    try:
        check()
        found[check.__name__] = ""
    except Exception:
        found[check.__name__] = traceback.format_exc()
print(json.dumps(found))
"""
)

CHECKS = ("norms", "gates", "inputs", "row_products", "one_row", "one_gated_row", "weights_only", "widening", "block_products")


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    """Of every check, what was wrong: all in one process, which has the interpreter on from its first import of triton."""
    found: dict[str, str] = json.loads(interpreted(SCRIPT, plugins=("quant_fp8", "ops_triton")))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_compute_what_torch_does(check: str, complaints: dict[str, str]) -> None:
    assert not complaints[check], complaints[check]
