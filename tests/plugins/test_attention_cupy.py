"""attention_cupy without a GPU: what it refuses and why, its integer arithmetic against numpy, and that its kernels compile.

The arithmetic is the kernels' own: the headers of pure integers are built by the host's C++ compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_cupy" / "src"))

from octavo.catalog import Accept, Device, Needs, Reject
from octavo.interfaces import AttentionLayer, KVSpec
from octavo_attention_cupy.geometry import PageGeometry
from octavo_attention_cupy.provider import CupyOptions, accepts
from octavo_attention_cupy.tuning import decode_choice, hopper_choice, portable_choice

PLUGIN = Path(__file__).parents[2] / "plugins" / "attention_cupy" / "src"
CUDA = PLUGIN / "octavo_attention_cupy" / "cuda"
DIMS = (64, 80, 96, 112, 128, 192, 256)
H200 = Device("cuda", 0, "NVIDIA H200", (9, 0), 0, 0)


def needs(device: Device = H200, dtype: str = "bfloat16", layer: dict[str, int] | None = None, **facts: object) -> Needs:
    numbers = {"index": 0, "num_heads": 8, "num_kv_heads": 2, "k_dim": 128, "v_dim": 128, "scale": 1} | (layer or {})
    return Needs(
        "attention", device, dtype, {"layers": (AttentionLayer(**numbers),), "kv_dtype": dtype, "block_size": 64} | facts
    )


# ---------------------------------------------------------------- the provider


@pytest.fixture
def cupy_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("octavo_attention_cupy.provider"), "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (needs(Device("cpu", 0, "a CPU", (0, 0), 0, 0)), "device is cpu"),
        (needs(Device("cuda", 0, "Tesla T4", (7, 5), 0, 0)), "capability 7.5 of 'Tesla T4' is below 8.0"),
        (needs(Device("cuda", 0, "A100", (8, 0), 0, 0), kv_dtype="float8_e4m3fn"), "float8_e4m3fn needs CUDA capability 8.9"),
        (needs(dtype="float32"), "dtype float32"),
        (needs(kv_dtype="float16"), "kv_dtype float16 with bfloat16 queries"),
        (needs(block_size=12), "block_size 12"),
        (needs(layer={"k_dim": 72}), "layer 0: k_dim 72 is not a multiple of 16"),
        (needs(layer={"v_dim": 272}), "layer 0: v_dim 272"),
        (needs(layer={"num_heads": 130, "num_kv_heads": 2}), "65 query heads a KV head, at most 64"),
        (needs(layer={"window": 0}), "window 0 is not positive"),
        (needs(kv_specs=(KVSpec("latent", 1, 192, 128, "bfloat16"),)), "KV cache of kind latent"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.usefixtures("cupy_installed")
def test_what_no_kernel_does_is_rejected_by_name_and_value(asked: Needs, reason: str) -> None:
    answer = accepts(asked, CupyOptions())
    assert isinstance(answer, Reject)
    assert reason in answer.reason


def test_a_missing_cupy_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("octavo_attention_cupy.provider"), "find_spec", lambda name: None)
    answer = accepts(needs(), CupyOptions())
    assert isinstance(answer, Reject)
    assert "cupy is not installed" in answer.reason


def test_the_inventory_says_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo_attention_cupy as package

    module = import_module("octavo_attention_cupy.provider")
    monkeypatch.setattr(module, "DRIVER", "libno-such-driver.so.1")
    for spec, reason in ((None, "cupy is not installed"), (object(), "there is no CUDA driver (libno-such-driver.so.1)")):
        monkeypatch.setattr(module, "find_spec", lambda name, spec=spec: spec)
        (provider,) = package.register_attention_backends()
        assert provider.summary.endswith(f"; cannot run here: {reason}")
        assert provider.name == "cupy"
    monkeypatch.setattr(module, "DRIVER", None)  # the process itself, which can be opened anywhere
    (provider,) = package.register_attention_backends()
    assert provider is module.provider


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_shapes_of_the_conformance_suite_are_accepted(kv_dtype: str) -> None:
    for dim in DIMS:
        for heads, kv_heads in ((9, 3), (14, 2), (40, 8), (24, 1), (32, 32), (7, 7)):
            layer = {"num_heads": heads, "num_kv_heads": kv_heads, "k_dim": dim, "v_dim": dim}
            assert isinstance(accepts(needs(layer=layer, kv_dtype=kv_dtype), CupyOptions()), Accept)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, octavo_attention_cupy as p; p.register_attention_backends(); import octavo_attention_cupy.provider;"
        "print([m for m in ('torch', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": f"{PLUGIN}:{':'.join(sys.path)}"}, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_eight_rows_of_a_column_lie_in_different_banks(dim: int, element: int) -> None:
    """ldmatrix reads 16 bytes of eight rows at once; 128 bytes of shared memory are all banks."""
    spec = KVSpec("full", 2, dim, dim, "bfloat16" if element == 2 else "float8_e4m3fn")
    places = PageGeometry.of(spec, 32).places(dim)
    per_chunk = 16 // element
    for first in range(0, 32, 8):
        for chunk in range(dim // per_chunk):
            banks = {places[slot, chunk * per_chunk] * element % 128 for slot in range(first, first + 8)}
            assert len(banks) == 8, f"slots from {first}, chunk {chunk}"
    assert sorted(places.reshape(-1)) == list(range(32 * dim))


def test_a_geometry_that_no_kernel_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="kind latent"):
        PageGeometry.of(KVSpec("latent", 1, 576, 512, "bfloat16"), 64)
    with pytest.raises(ValueError, match="kv_dtype int8"):
        PageGeometry.of(KVSpec("full", 1, 64, 64, "int8"), 64)
    with pytest.raises(ValueError, match="block_size 20"):
        PageGeometry.of(KVSpec("full", 1, 64, 64, "bfloat16"), 20)


# ---------------------------------------------------------------- the kernels' integers, on the host

SHIM = """
#include "layout.cuh"
#include "work.cuh"
extern "C" {
int tiles_of(int first, int last, int unit) { return row_tiles(first, last, unit); }
int share_of(int units, int blocks, int least) { return block_share(units, blocks, least); }
void segment_of(int at, int end, int before, int tiles, int share, Segment* s) { *s = segment_at(at, end, before, tiles, share); }
int place_of(int part, int first_block, int middle) { return part_place(part, first_block, middle); }
long long k_place(int page, int head, int slot, int chunk) { return k_offset(page, head, 0) + KRows::at(page, slot, chunk); }
long long v_place(int page, int head, int slot, int chunk) { return v_offset(page, head, 0) + VRows::at(page, slot, chunk); }
long long wide_k_place(int page, int head, int slot, int chunk) { return 2 * k_offset(page, head, 0) + Rows<K_DIM, 2>::at(page, slot, chunk); }
long long wide_v_place(int page, int head, int slot, int chunk) { return 2 * v_offset(page, head, 0) + Rows<V_DIM, 2>::at(page, slot, chunk); }
int sizes(int which) { return which == 0 ? sizeof(RowWork) : sizeof(BlockWork); }
}
"""


class Segment(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ["head", "tile", "tiles", "first_block", "parts", "starts_in_middle"])


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], ctypes.CDLL]:
    """The headers built for (element bytes, K dim, V dim)."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernels' integer arithmetic cannot be built here")
    folder, built = tmp_path_factory.mktemp("integers"), {}
    (folder / "shim.cc").write_text(SHIM)
    for element, k_dim, v_dim in ((2, 128, 128), (1, 80, 80), (2, 192, 128), (1, 64, 64)):
        library = folder / f"shim{element}-{k_dim}-{v_dim}.so"
        macros = (f"-DKV_BYTES={element}", f"-DK_DIM={k_dim}", f"-DV_DIM={v_dim}")
        command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{CUDA}", *macros, "-o", str(library), str(folder / "shim.cc")]
        subprocess.run(command, check=True, capture_output=True)
        built[element, k_dim, v_dim] = ctypes.CDLL(str(library))
        for name in ("k_place", "v_place", "wide_k_place", "wide_v_place"):
            getattr(built[element, k_dim, v_dim], name).restype = ctypes.c_longlong
    return built


def test_host_and_device_agree_on_where_a_token_lies(integers: dict[tuple[int, int, int], ctypes.CDLL]) -> None:
    for (element, k_dim, v_dim), library in integers.items():
        dtype, page, heads = "bfloat16" if element == 2 else "float8_e4m3fn", 24, 3
        g = PageGeometry.of(KVSpec("full", heads, k_dim, v_dim, dtype), page)
        k_places, v_places = g.places(k_dim), g.places(v_dim)
        for head in range(heads):
            start = head * page * (k_dim + v_dim)
            for slot in range(page):
                for chunk in range(k_dim * element // 16):
                    want = (start + k_places[slot, chunk * 16 // element]) * element
                    assert library.k_place(page, head, slot, chunk) == want
                for chunk in range(v_dim * element // 16):
                    want = (start + page * k_dim + v_places[slot, chunk * 16 // element]) * element
                    assert library.v_place(page, head, slot, chunk) == want


def test_a_widened_page_has_the_layout_of_a_16_bit_cache(integers: dict[tuple[int, int, int], ctypes.CDLL]) -> None:
    """Where widen.cu puts the chunks of a page, from its narrow offsets, is where PageGeometry has them."""
    dim, page, heads = 64, 24, 3
    library, g = integers[1, dim, dim], PageGeometry.of(KVSpec("full", heads, dim, dim, "bfloat16"), page)
    places = g.places(dim)
    for head in range(heads):
        start = head * page * 2 * dim
        for slot in range(page):
            for chunk in range(dim // 8):
                assert library.wide_k_place(page, head, slot, chunk) == (start + places[slot, chunk * 8]) * 2
                assert library.wide_v_place(page, head, slot, chunk) == (start + page * dim + places[slot, chunk * 8]) * 2


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([0, 1, 300])), min_size=1, max_size=40),
    heads=st.integers(1, 12),
    unit=st.sampled_from([64, 128, 256]),
    blocks=st.sampled_from([1, 7, 132, 264]),
    least=st.sampled_from([1, 2, 5]),
)
def test_every_visible_token_belongs_to_one_part_of_its_segment(
    integers: dict[tuple[int, int, int], ctypes.CDLL], rows: list[tuple[int, int]], heads: int, unit: int, blocks: int, least: int
) -> None:
    """Walk every block's share as the decode kernel does: tokens are covered once, parts of a segment are numbered without gaps,
    each has a place of its own, and shares are even."""
    library = integers[2, 128, 128]
    spans = [(max(length - window, 0) if window else 0, length) for length, window in rows]
    tiles = [library.tiles_of(first, last, unit) for first, last in spans]
    before = np.concatenate([[0], np.cumsum(np.array(tiles) * heads)]).astype(int)
    units = int(before[-1])
    share = library.share_of(units, blocks, least)
    assert share * blocks >= units
    assert share == max(least, -(-units // blocks))

    seen = {(r, h): np.zeros(last, int) for r, (_, last) in enumerate(spans) for h in range(heads)}
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    places: dict[int, tuple[int, int]] = {}
    for block in range(blocks):
        at, end = block * share, min((block + 1) * share, units)
        while at < end:
            r = int(np.searchsorted(before, at, side="right")) - 1
            s = Segment()
            library.segment_of(at, end, int(before[r]), tiles[r], share, ctypes.byref(s))
            first, last = spans[r]
            begin = (first // unit + s.tile) * unit
            stop = min(begin + s.tiles * unit, last)
            seen[r, s.head][max(begin, first) : stop] += 1
            part = block - s.first_block
            parts.setdefault((r, s.head), []).append((part, s.parts, s.tiles))
            if s.parts > 1:
                place = library.place_of(part, s.first_block, s.starts_in_middle)
                assert place not in places, f"place {place} of {(r, s.head)} is also that of {places[place]}"
                assert 0 <= place < 2 * blocks
                assert place // 2 == block
                places[place] = (r, s.head)
            at += s.tiles
    for (r, head), count in seen.items():
        first, last = spans[r]
        assert (count[:first] == 0).all()
        assert (count[first:last] == 1).all()
        found = parts[r, head]
        assert [part for part, _, _ in found] == list(range(found[0][1])), (
            "parts are numbered in order, and a reader knows how many"
        )
        assert sum(n for _, _, n in found) == tiles[r]


def test_records_of_the_work_map_have_the_size_that_the_host_allocates(integers: dict[tuple[int, int, int], ctypes.CDLL]) -> None:
    pytest.importorskip("torch")
    from octavo_attention_cupy import bound

    library = integers[2, 128, 128]
    assert (library.sizes(0), library.sizes(1)) == (4 * bound.ROW_WORK, 4 * bound.BLOCK_WORK)


# ---------------------------------------------------------------- compiling and launching


def test_a_kernel_is_compiled_once_and_again_when_anything_that_went_in_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from octavo_attention_cupy import compiler

    nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
    cuda = ModuleType("cupy.cuda")
    cuda.nvrtc = nvrtc  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    compiled: list[tuple[str, str, dict[str, int]]] = []

    def compile_cubin(name: str, arch: str, macros: dict[str, int]) -> bytes:
        compiled.append((name, arch, macros))
        return f"{name} {arch} {macros}".encode()

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    first = compiler.cached_cubin("plan", "sm_90a", {}, tmp_path)
    assert compiler.cached_cubin("plan", "sm_90a", {}, tmp_path) == first
    assert len(compiled) == 1
    compiler.cached_cubin("plan", "sm_80", {}, tmp_path)
    compiler.cached_cubin("plan", "sm_90a", {"X": 1}, tmp_path)
    nvrtc.getVersion = lambda: (13, 1)
    compiler.cached_cubin("plan", "sm_90a", {}, tmp_path)
    assert len(compiled) == 4
    assert len(list(tmp_path.iterdir())) == 4, "nothing but whole files is left in the cache"


def test_an_error_of_the_driver_names_the_kernel_and_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from octavo_attention_cupy import launch

    def name(status: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"

    driver = SimpleNamespace(cuLaunchKernelEx=lambda *args: 1, cuGetErrorName=name, cuGetErrorString=lambda *args: None)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    kernel = launch.Kernel(SimpleNamespace(ptr=1), "decode of dims 128 and 128", 256, 1 << 20)
    with pytest.raises(
        RuntimeError, match=r"decode of dims 128 and 128: .* 132 x 1 blocks of 256 threads .* CUDA_ERROR_INVALID_VALUE"
    ):
        kernel((132, 1), launch.DecodeArgs(), torch.device("cpu"))


def test_an_error_of_loading_names_the_kernel_and_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from octavo_attention_cupy import compiler

    class CUDADriverError(RuntimeError):
        pass

    def refuse(*args: object) -> None:
        raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    class Device:
        def __init__(self, index: int) -> None:
            self.compute_capability = "90"

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *error: object) -> None: ...

    module = SimpleNamespace(load=lambda cubin: None, get_function=lambda name: SimpleNamespace(ptr=1))
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.Device = Device  # type: ignore[attr-defined]
    cuda.function = SimpleNamespace(Module=lambda: module)  # type: ignore[attr-defined]
    cuda.driver = SimpleNamespace(  # type: ignore[attr-defined]
        CUDADriverError=CUDADriverError, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=refuse
    )
    cupy.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(compiler, "cached_cubin", lambda *args: b"")
    with pytest.raises(RuntimeError, match=r"^decode of dims 128 and 128: .* sm_90a with 999 bytes .* CUDA_ERROR_INVALID_VALUE"):
        compiler.load_function("decode", {}, what="decode of dims 128 and 128", device=0, shared=999, directory=tmp_path)


def test_the_stream_is_read_at_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was current when the module was imported, or at the launch before, is not used."""
    torch = pytest.importorskip("torch")
    from octavo_attention_cupy import launch

    seen: list[int] = []

    def launched(config: Any, *rest: Any) -> int:
        seen.append(config._obj.stream)
        return 0

    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    kernel = launch.Kernel(SimpleNamespace(ptr=1), "plan", 1024)
    for stream in (7, 8, 7):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: SimpleNamespace(cuda_stream=stream))
        kernel((1, 1), launch.PlanArgs(), torch.device("cpu"))
    assert seen == [7, 8, 7]


@pytest.mark.parametrize(
    "memory", [(227 << 10, 228 << 10), (163 << 10, 164 << 10), (99 << 10, 100 << 10)], ids=["sm_90", "sm_80", "sm_86"]
)
def test_every_shape_has_a_kernel_that_fits_in_shared_memory(memory: tuple[int, int]) -> None:
    for dim in DIMS:
        for element in (1, 2):
            for group, crowded in product((1, 4, 8, 24, 64), (False, True)):
                choice = decode_choice(
                    group=group,
                    k_dim=dim,
                    v_dim=dim,
                    element=element,
                    shared_block=memory[0],
                    shared_sm=memory[1],
                    crowded=crowded,
                )
                assert choice.stages >= 2
                assert choice.shared <= memory[0]
                assert (choice.shared + 1024) * choice.blocks <= memory[1]
            assert portable_choice(k_dim=dim, v_dim=dim, element=element, shared_block=memory[0]).shared <= memory[0]
        hopper = hopper_choice(group=4, k_dim=dim, v_dim=dim)
        assert (hopper is None) == (dim not in (64, 128))
        assert hopper is None or hopper.shared <= 227 << 10


@pytest.mark.parametrize(
    ("arch", "kernel", "dims", "element"),
    [
        ("sm_90", "decode", (128, 128), 2),
        ("sm_90", "decode", (128, 128), 1),
        ("sm_90", "decode", (256, 256), 2),
        ("sm_80", "decode", (80, 80), 2),
        ("sm_90a", "prefill_hopper", (128, 128), 2),
        ("sm_90a", "prefill_hopper", (64, 64), 2),
        ("sm_90", "prefill", (256, 256), 2),
        ("sm_90", "prefill", (192, 128), 1),
        ("sm_80", "prefill", (64, 64), 2),
        ("sm_80", "write", (128, 128), 2),
        ("sm_90", "prologue", (128, 128), 2),
        ("sm_89", "prologue", (80, 80), 1),
        ("sm_90", "spreading prologue", (128, 128), 1),
        ("sm_89", "spreading prologue", (192, 192), 1),
        ("sm_80", "spreading prologue", (256, 256), 2),
        ("sm_89", "write", (80, 80), 1),
        ("sm_90", "widen", (128, 128), 1),
        ("sm_80", "plan", (0, 0), 0),
    ],
)
def test_kernels_compile_without_spilling(arch: str, kernel: str, dims: tuple[int, int], element: int, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed: the CUDA files cannot be compiled here")
    pytest.importorskip("torch")
    from octavo_attention_cupy.compiler import with_arguments

    macros: dict[str, int] = {}
    kernel, spread = kernel.removeprefix("spreading "), kernel.startswith("spreading ")
    if kernel != "plan":
        macros = {"BF16": 1, "KV_BYTES": element, "E5M2": 0, "K_DIM": dims[0], "V_DIM": dims[1], "SOFTCAP": 0}
        memory = (
            {"shared_block": 227 << 10, "shared_sm": 228 << 10}
            if arch.startswith("sm_90")
            else {"shared_block": 163 << 10, "shared_sm": 164 << 10}
        )
        if kernel == "decode":
            macros |= decode_choice(group=4, k_dim=dims[0], v_dim=dims[1], element=element, crowded=False, **memory).macros()
        elif kernel == "prefill":
            macros |= portable_choice(k_dim=dims[0], v_dim=dims[1], element=element, shared_block=memory["shared_block"]).macros
        elif kernel == "prologue":
            macros |= {"SPREAD": spread}
        elif kernel == "prefill_hopper":
            hopper = hopper_choice(group=4, k_dim=dims[0], v_dim=dims[1])
            assert hopper is not None
            macros |= hopper.macros
    target = f"-gencode=arch=compute_{arch[3:]},code={arch}"
    command = ["nvcc", "-cubin", target, "-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-D{name}={int(value)}" for name, value in with_arguments(kernel, macros).items()]
    done = subprocess.run([*command, "-o", str(tmp_path / "k.cubin"), str(CUDA / f"{kernel}.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr
