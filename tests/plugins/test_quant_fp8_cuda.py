"""rows.cu and quantise.cu without a GPU: they compile for every shape that is ever chosen, without spilling, and fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

from octavo_quant_fp8.kernels import few_rows, rows

MATRICES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (1024, 1024),
    (57344, 8192),
    (8192, 28672),
    (512, 576),
    (2048, 512),
]
"""(outputs, inputs): Llama-3.1-8B's, and small and large ones."""
SHAPES = sorted({s for n, k in MATRICES for m in range(2, 300) if (s := rows.choose_shape(m, n, k)) is not None}, key=str)
SHARED = 228 << 10
"""Bytes of shared memory of a Hopper multiprocessor; each block takes 1 KiB of it, and its barriers another."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chosen_shape_fits_as_often_as_it_says(shape: rows.Shape) -> None:
    assert (shape.shared + 2048) * shape.min_blocks <= SHARED
    assert shape.rows % ((16 if shape.split > 1 else 4) * shape.split) == 0, "each block of a cluster finishes whole warps' rows"
    assert shape.stages >= 2 and shape.x_stages >= 2, "a tile is given back while the next is multiplied"
    assert shape.rows % shape.box == 0 and shape.box % 8 == 0, "a copy takes whole groups of eight rows, as the swizzle has them"


@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_every_block_of_a_cluster_has_some_of_the_inputs(n: int, k: int) -> None:
    for m in range(2, 300):
        shape = rows.choose_shape(m, n, k)
        assert shape is None or shape.split <= -(-k // (128 * shape.chunks)), f"{m} rows of {n} x {k}: {shape}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_compiles_without_spilling(shape: rows.Shape, tmp_path: Path) -> None:
    compiled = assemble(rows.source(shape.tokens), rows.macros(shape, torch.bfloat16, bias=True), tmp_path)
    assert "wgmma" not in compiled, f"the assembler has something to say about the products: {compiled}"


@pytest.mark.parametrize("kind", [few_rows.PLAIN, few_rows.NORM, few_rows.SWIGLU])
@pytest.mark.parametrize("size", [64, 4096, 14336, 65536])
@pytest.mark.parametrize("count", [2, few_rows.MAX_ROWS])
def test_quantising_compiles_without_spilling(kind: int, size: int, count: int, tmp_path: Path) -> None:
    assemble(few_rows.source(), few_rows.macros(kind, torch.float16, torch.float16, few_rows.blocks(size, count)), tmp_path)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_reads_as_constant_only_what_no_step_writes(shape: rows.Shape, tmp_path: Path) -> None:
    """A kernel begins before the one in front has ended, and loads of constants may move before the wait for it: those of four scales of
    the weight, and no others."""
    source = rows.source(shape.tokens)
    assert constant_loads(source, rows.macros(shape, torch.bfloat16, bias=False), tmp_path) == ["v4.f32"]


@pytest.mark.parametrize("kind", [few_rows.PLAIN, few_rows.NORM, few_rows.SWIGLU])
def test_quantising_reads_as_constant_only_what_no_step_writes(kind: int, tmp_path: Path) -> None:
    found = constant_loads(
        few_rows.source(), few_rows.macros(kind, torch.bfloat16, torch.float32, few_rows.blocks(4096, 8)), tmp_path
    )
    assert found == (["v4.f32"] * 2 if kind == few_rows.NORM else []), "eight values of a norm's weight"


@pytest.mark.parametrize("size", [8, 64, 576, 4096, 4104, 5000, 14336, 28672, 65536])
@pytest.mark.parametrize("count", [1, 32, 33, few_rows.MAX_ROWS])
def test_the_threads_of_a_row_cover_it_once(size: int, count: int) -> None:
    cluster, threads, items = few_rows.blocks(size, count)
    assert cluster in (1, 2, 4, 8) and threads % 32 == 0 and threads <= 1024
    covered = cluster * threads * items * few_rows.VECTOR
    assert size <= covered and covered - size < cluster * 32 * items * few_rows.VECTOR


def assemble(source: str, macros: dict[str, int], folder: Path) -> str:
    """What nvcc says while it compiles; the test is skipped without it, and fails for an error, a warning or a spill."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed: the CUDA files cannot be compiled here")
    (folder / "k.cu").write_text(source)
    command = ["nvcc", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    done = subprocess.run([*command, "-o", str(folder / "k.cubin"), str(folder / "k.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr
    return done.stderr


def constant_loads(source: str, macros: dict[str, int], folder: Path) -> list[str]:
    """The types of the loads that promise that nothing writes to what they read; the test is skipped without nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed: the CUDA files cannot be compiled here")
    (folder / "k.cu").write_text(source)
    command = ["nvcc", "-ptx", "-arch=compute_90a", *[f"-D{name}={value}" for name, value in macros.items()]]
    done = subprocess.run([*command, "-o", str(folder / "k.ptx"), str(folder / "k.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.findall(r"ld\.global\.nc(?:\.L\S+)?\.(v4\.f32|\S+)", (folder / "k.ptx").read_text())
