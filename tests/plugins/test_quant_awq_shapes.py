"""Which shapes of the CUDA kernels of quant_awq serve which product: whether they fit a multiprocessor and cover the matrix. Needs no GPU."""

from __future__ import annotations

import pytest
from octavo_quant_awq.kernels import narrow_gemm, split_gemm, stationary_gemm
from octavo_quant_awq.kernels.limits import NARROW_ROWS, SPLIT_ROWS, STATIONARY_ROWS
from octavo_quant_awq.kernels.variant import Variant

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
OTHERS = [(1024, 14336), (4112, 8192), (8192, 28672), (2048, 14336), (16, 8192), (4096, 7168), (5120, 25600), (576, 1536)]
VARIANTS = [Variant(True, False, True, 1, False), Variant(False, False, False, 1, False), Variant(True, False, True, 4, False)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "inputs"), [*LLAMA_8B.values(), *OTHERS])
def test_a_shape_fits_a_multiprocessor_and_covers_the_matrix(rows: int, inputs: int, variant: Variant) -> None:
    for m in range(SPLIT_ROWS[0], SPLIT_ROWS[1] + 1):
        split = split_gemm.choose_shape(m, rows, inputs, variant)
        if split is not None:
            assert m <= split.tokens and split.threads <= 1024 and split.taken(variant, inputs) <= narrow_gemm.MOST
            assert split.strips(rows) * split.rows >= rows and split.strips(rows) % split_gemm.PAIR == 0
            assert split.stages * 2048 >= split.tokens * 36 * 4, "a warp's sums have no room where its weights were"
    for m in range(STATIONARY_ROWS[0], STATIONARY_ROWS[1] + 1):
        shape = stationary_gemm.choose_shape(m, rows, inputs, variant)
        if shape is not None:
            assert m <= shape.tokens and shape.threads <= 1024 and shape.taken(variant) + 1024 <= narrow_gemm.MOST
            covered = shape.warps * shape.turns * 128
            assert inputs <= covered and shape.uneven == (covered >= inputs + 128)
            assert shape.turns * shape.tokens * 2 + 64 <= 65536 // shape.threads, "x has no room in registers"
    for m in range(1, NARROW_ROWS + 1):
        narrow = narrow_gemm.choose_shape(m, rows, inputs, variant)
        if narrow is not None:
            assert (
                m <= narrow_gemm.held(m)
                and narrow.threads <= 1024
                and narrow.taken(variant, narrow_gemm.held(m), inputs) <= narrow_gemm.MOST
            )


def test_every_product_of_the_8b_model_has_a_block_for_each_multiprocessor() -> None:
    for m in (1, 4, 8):
        for name, (rows, inputs) in LLAMA_8B.items():
            narrow = narrow_gemm.choose_shape(m, rows, inputs, VARIANTS[0])
            assert narrow is not None and 120 <= -(-rows // narrow.rows) <= narrow_gemm.PROCESSORS, f"{name} at {m} rows"
    for m in (2, 8, 9, 16):
        split = split_gemm.choose_shape(m, *LLAMA_8B["down"], VARIANTS[0])
        assert split is not None and split.strips(4096) * split_gemm.PARTS == 128


def test_x_stands_in_registers_where_outputs_are_many_for_it() -> None:
    for m in (2, 8, 9, 16):
        wide = stationary_gemm.choose_shape(m, *LLAMA_8B["gate_up"], VARIANTS[0])
        assert wide is not None and -(-28672 // wide.rows) == 128 and not wide.uneven
        assert stationary_gemm.choose_shape(m, *LLAMA_8B["down"], VARIANTS[0]) is None
        assert stationary_gemm.choose_shape(m, *LLAMA_8B["o"], VARIANTS[0]) is not None
        assert stationary_gemm.choose_shape(m, 2048, 4096, VARIANTS[0]) is None
    short = stationary_gemm.choose_shape(8, 11272, 1088, Variant(True, False, True, 2, True))
    assert short is not None and (short.warps, short.turns, short.uneven) == (8, 2, True)


def test_parts_of_k_are_for_many_inputs_in_whole_blocks() -> None:
    assert split_gemm.choose_shape(8, *LLAMA_8B["qkv"], VARIANTS[0]) is None
    assert split_gemm.choose_shape(8, 4096, 14336 + 8, Variant(True, False, True, 1, True)) is None
    assert split_gemm.choose_shape(8, 32768, 8192, VARIANTS[0]) is None
