"""Swapping on a GPU: copies between pool and host memory beside a busy device, and a pool whose tail comes and goes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from octavo.bench.kernel import cuda_device  # noqa: E402
from octavo.cache import elastic  # noqa: E402
from octavo.cache.pool import Pool  # noqa: E402
from octavo.cache.swap import CudaSwapSpace, make_swap_space  # noqa: E402
from octavo.interfaces import CacheLayout, KVGroup, KVSpec  # noqa: E402
from octavo.request import FROM_HOST, MOVE, TO_HOST  # noqa: E402
from octavo.testing.attention import AttentionTarget  # noqa: E402
from octavo.testing.paged import Shape  # noqa: E402

from tests.engine.harness import Outcomes, make_engine, request, run, step  # noqa: E402
from tests.gpu.greedy import check_tokens  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE = 64 * 1024


def small_pool(blocks: int, tensors: int = 4, **options: Any) -> Pool:
    spec = KVSpec("full", 2, 64, 64, "float32")
    group = KVGroup(0, spec, tuple(range(tensors)), 64, PAGE)
    return Pool((group,), (CacheLayout("float32", (PAGE // 4,), PAGE, "flat"),), blocks, "cuda", **options)


def busy() -> None:
    """Some hundred microseconds of work on the current stream."""
    a = torch.ones((2048, 2048), device="cuda")
    for _ in range(3):
        a = a @ a * 1e-4


def test_copies_stay_in_order_with_a_busy_stream_of_another_number() -> None:
    """200 rounds: write, swap out, overwrite, swap in, read; under a stream that is not the default one."""
    pool = small_pool(160)
    space = make_swap_space(pool, 100)
    assert isinstance(space, CudaSwapSpace)
    rng = np.random.default_rng(0)
    stream = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.stream(stream):
        pages = pool.words()
        for turn in range(200):
            blocks = rng.permutation(160)[:64]
            back = rng.permutation(160)[:64]
            slots = rng.permutation(100)[:64]
            ids, home = torch.from_numpy(blocks).cuda(), torch.from_numpy(back).cuda()
            if turn % 3 == 0:
                busy()
            pattern = torch.arange(64, device="cuda").unsqueeze(1) + 1000 * turn
            for i, memory in enumerate(pages):
                memory[ids] = pattern + 7 * i
            space.copy(TO_HOST, blocks, slots)
            for memory in pages:
                memory[ids] = -1  # the block is somebody else's at once
            space.copy(FROM_HOST, slots, back)
            for i, memory in enumerate(pages):
                wrong += (memory[home] != pattern + 7 * i).sum()
    stream.synchronize()
    assert int(wrong) == 0


def test_a_slot_is_read_before_it_is_written_again() -> None:
    pool = small_pool(8)
    space = make_swap_space(pool, 1)
    pages, slot = pool.words(), np.array([0])
    for turn in range(50):
        for memory in pages:
            memory[0], memory[1] = turn, -turn - 1
        busy()
        space.copy(TO_HOST, np.array([0]), slot)
        space.copy(FROM_HOST, slot, np.array([2]))
        space.copy(TO_HOST, np.array([1]), slot)
        space.copy(FROM_HOST, slot, np.array([3]))
        for memory in pages:
            assert int(memory[2, 0]) == turn and int(memory[3, -1]) == -turn - 1


def test_the_cupy_stream_is_torchs() -> None:
    """What a CuPy kernel reads after a swap in is what came in (cupy runs on torch's current stream, per launch)."""
    cupy = pytest.importorskip("cupy")
    pool = small_pool(16)
    space = make_swap_space(pool, 8)
    double = cupy.ElementwiseKernel("int64 x", "int64 y", "y = 2 * x", "octavo_double")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(1, 60):
            pages = pool.words()[0]
            pages[3] = turn
            space.copy(TO_HOST, np.array([3]), np.array([5]))
            pages[3] = -1
            busy()
            space.copy(FROM_HOST, np.array([5]), np.array([9]))
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                doubled = double(cupy.from_dlpack(pages[9]))
                out = torch.from_dlpack(doubled)
            assert bool((out == 2 * turn).all())


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_what_a_kernel_reads_after_a_swap_is_what_it_had_written(backend: str, kv_dtype: str | None) -> None:
    """200 rounds under a stream that is not the default one, behind a busy kernel: the backend writes 64 blocks, they are swapped
    out, overwritten at once, swapped in elsewhere, and attended there."""
    rows, size, rounds = 16, 64, 200
    length, blocks = 4 * size, 4 * rows
    provider = import_module(f"octavo_attention_{backend}.provider").provider
    shape = Shape((8, 2), 128, block_size=size, dtype="bfloat16", kv_dtype=kv_dtype)
    scene = AttentionTarget(provider, cuda_device(), ("bfloat16",)).scene(shape, [length] * rows, spare_blocks=2 * blocks)
    pages = scene.caches[0].view(len(scene.caches[0]), -1).view(torch.uint8).view(torch.int64)
    pool: Any = SimpleNamespace(device=pages.device, words=lambda: (pages,))
    space = CudaSwapSpace(pool, 100, staging_bytes=64 << 20)
    fill, read = scene.step([(i, 0, length) for i in range(rows)]), scene.step([(i, length - 1, 1) for i in range(rows)])
    slots = torch.tensor([row.slot for row in scene.rows], device="cuda")
    rng = np.random.default_rng(0)
    homes = [(rng.permutation(2 * blocks)[:blocks], rng.permutation(2 * blocks)[:blocks]) for _ in range(rounds)]
    host = [rng.permutation(100)[:blocks] for _ in range(rounds)]
    # On the device before the first round: a copy from pageable memory would wait for the stream.
    tables = torch.tensor(np.array(homes), device="cuda").view(rounds, 2, rows, 4)
    k = torch.randn(rows * length, 2, 128, device="cuda").to(torch.bfloat16)
    q = torch.randn(rows, 8, 128, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(q)
    numbers = torch.arange(rows, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def write(values: torch.Tensor) -> None:
        v = values.to(torch.bfloat16).repeat_interleave(length).view(-1, 1, 1).expand(-1, 2, 128).contiguous()
        scene.backend.write(0, fill, k, v)

    with torch.cuda.stream(stream):
        for turn in range(rounds):
            before, after = tables[turn]
            fill.slot_mapping[0].copy_((before.view(rows, 4, 1) * size + torch.arange(size, device="cuda")).view(-1))
            values = (numbers + turn) % 16 + 1  # exact in every dtype of a cache
            busy()
            write(values)
            space.copy(TO_HOST, homes[turn][0], host[turn])
            write(torch.full_like(values, -100))  # the blocks are somebody else's at once
            space.copy(FROM_HOST, host[turn], homes[turn][1])
            scene.table[slots, :4] = after.int()
            scene.backend.prepare(read)
            scene.backend.plan(read)
            scene.backend.run(0, read, q, out)
            wrong += ((out.float() - values.view(-1, 1, 1)).abs() > 0.2).sum()
    stream.synchronize()
    assert int(wrong) == 0


BACKENDS = {"torch": "float32", "triton": "float32", "cupy": "float16"}
"""And the dtype in which an engine is tried on each."""


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("slots", [4, 200])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_swapped_sequence_continues_where_it_was(tiny: Path, backend: str, slots: int, eager: bool) -> None:
    dtype = BACKENDS[backend]
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "num_threads": None,
        "block_size": 16,
        "enforce_eager": eager,
        "attention_backend": backend,
    }
    block = 2 * 16 * 2 * 32 * (4 if dtype == "float32" else 2)  # bytes: two layers of TINY
    squeezed = make_engine(
        tiny,
        num_gpu_blocks_override=17,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        swap_space=slots * block / 2**30,
        preemption_mode="swap",
        **options,
    )
    roomy = make_engine(tiny, num_gpu_blocks_override=128, **options)
    asks = [{"prompt": [*range(40, 70), 70 + i], "max_tokens": 100, "ignore_eos": True} for i in range(6)]
    outcomes = run(squeezed, [request(squeezed, str(i), **ask) for i, ask in enumerate(asks)])
    stats = squeezed.stats()
    assert stats.swapped_out > 0 and (slots < 100 or stats.swapped_out == stats.preemptions)
    for i, ask in enumerate(asks):
        check_tokens(roomy, ask, outcomes[str(i), 0].tokens, dtype)


# ---------------------------------------------------------------- a pool that changes its size


class Ledger:
    """CUDA's driver, and what this process has of it: bytes of physical memory made and not yet given back. Other processes come
    and go on the same device, so its free memory alone proves nothing. left: bytes that may still be made before the device
    itself is asked for more than it has."""

    def __init__(self) -> None:
        self.driver: Any = import_module("cuda.bindings.driver")
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> bytes, handle
        self.sizes: dict[int, int] = {}
        self.released: set[int] = set()
        self.left = 1 << 60

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    @property
    def held(self) -> int:
        return sum(self.sizes.values())

    def cuMemCreate(self, size: int, *rest: Any) -> Any:
        answer = self.driver.cuMemCreate(size if size <= self.left else 1 << 42, *rest)
        if int(answer[0]) == 0:
            self.left -= size
            self.sizes[int(answer[1])] = size
        return answer

    def cuMemMap(self, address: int, size: int, offset: int, handle: Any, flags: int) -> Any:
        self.mapped[address] = size, int(handle)
        return self.driver.cuMemMap(address, size, offset, handle, flags)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        mapped, handle = self.mapped.pop(address)
        assert mapped == size
        self._reap(handle)
        return self.driver.cuMemUnmap(address, size)

    def cuMemRelease(self, handle: Any) -> Any:
        self.released.add(int(handle))
        self._reap(int(handle))
        return self.driver.cuMemRelease(handle)

    def _reap(self, handle: int) -> None:
        if handle in self.released and all(h != handle for _, h in self.mapped.values()):
            self.released.discard(handle)
            del self.sizes[handle]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    ledger = Ledger()
    monkeypatch.setattr(elastic, "_driver", lambda: ledger)
    return ledger


def test_the_memory_of_the_device_follows_the_pool(ledger: Ledger) -> None:
    pool = small_pool(2048, tensors=8, max_blocks=8192)
    pages = pool.words()
    addresses = [memory.data_ptr() for memory in pages]
    pages[0][5] = 77
    grain = 8 * (2 << 20)  # a piece in every tensor, and the scratch page
    for blocks in (2048, 8000, 4000, 100):
        pool.resize(blocks)
        for memory in pages:
            memory[blocks - 1] = blocks  # its last page is there
            assert int(memory[blocks - 1, -1]) == blocks
            memory[pool.scratch] = 1
        assert int(pages[0][5, 0]) == 77
        assert 0 <= ledger.held - 8 * PAGE * blocks <= 8 * PAGE * 8192 // elastic.PIECES + grain
    assert addresses == [memory.data_ptr() for memory in pool.words()]
    del pages, memory, pool
    assert ledger.held == 0


def test_the_driver_counts_what_the_pool_gives_back() -> None:
    """Most of 16 GiB must come and go in the device's own count, whatever else happens on it meanwhile."""
    pool = small_pool(64, tensors=8, max_blocks=32768)
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("other processes hold most of this device")
    moved = []
    for blocks in (32768, 64) * 3:
        before = torch.cuda.mem_get_info()[0]
        pool.resize(blocks)
        moved.append(before - torch.cuda.mem_get_info()[0])
    gain = (32768 - 64) * 8 * PAGE
    grown, shrunk = np.median(moved[::2]), np.median(moved[1::2])
    assert grown > 0.7 * gain and shrunk < -0.7 * gain, moved


def test_a_growth_without_memory_changes_nothing(ledger: Ledger) -> None:
    """The device is asked for more than it has half way through a growth: what came before is given back."""
    pool = small_pool(64, tensors=8, max_blocks=65536)
    held = ledger.held
    for left in (0, 3 << 20, 200 << 20, 1 << 30):
        ledger.left = left
        with pytest.raises(MemoryError):
            pool.resize(pool.capacity)
        assert pool.num_blocks == 64 and ledger.held == held
        pool.words()[0][63] = 5
    ledger.left = 1 << 60
    pool.resize(4096)
    pool.words()[7][4095] = 6
    torch.cuda.synchronize()


def test_blocks_move_within_the_pool() -> None:
    """And the tail may be given back at once, though the copies have only been submitted."""
    pool = small_pool(600, max_blocks=600)
    space = make_swap_space(pool, 0)
    for turn in range(20):
        pool.resize(600)
        for i, memory in enumerate(pool.words()):
            memory[:600] = torch.arange(600, device="cuda").unsqueeze(1) + i + turn
        busy()
        space.copy(MOVE, np.arange(400, 600), np.arange(0, 200))
        pool.resize(400)
        for i, memory in enumerate(pool.words()):
            assert memory[:200, 0].tolist() == [400 + n + i + turn for n in range(200)]


def test_a_pool_may_go_while_the_device_still_reads_it() -> None:
    out = torch.zeros(64, dtype=torch.int64, device="cuda")
    for turn in range(1, 20):
        pool = small_pool(600, max_blocks=600)
        pages = pool.words()[0]
        pages[:64] = turn
        busy()
        out += pages[:64, 0]
        del pages, pool
    assert out.tolist() == [sum(range(1, 20))] * 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_stay_the_same_while_the_pool_moves_under_captured_graphs(tiny: Path, backend: str) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": BACKENDS[backend],
        "num_threads": None,
        "block_size": 16,
        "max_num_seqs": 6,
        "attention_backend": backend,
    }
    moving = make_engine(tiny, num_gpu_blocks_override=40, dynamic_memory=True, dynamic_memory_interval=1e9, **options)
    still = make_engine(tiny, num_gpu_blocks_override=128, **options)
    asks = [{"prompt": [*range(40, 70), 70 + i], "max_tokens": 70, "ignore_eos": True} for i in range(6)]
    governor = moving._watch._governor
    outcomes: Outcomes = {}
    for i, ask in enumerate(asks):
        moving.add(request(moving, str(i), **ask))
    turn = 0
    while moving.busy:
        step(moving, outcomes)
        turn += 1
        if turn % 5 == 0:
            governor.move(0.95 if turn % 10 else 0.4)
    assert governor.growths > 2 and governor.shrinks > 2
    for i, ask in enumerate(asks):
        check_tokens(still, ask, outcomes[str(i), 0].tokens, BACKENDS[backend])
