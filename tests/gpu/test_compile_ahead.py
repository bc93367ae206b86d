"""ops_triton's `compile_ahead` on a GPU: nothing is launched, everything is ready afterwards, and an engine that was built with it
says what one says that compiles as it goes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.interfaces import OperatorParts
from octavo_ops_triton.kernels import activation
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

from tests.engine.harness import make_engine, request, run
from tests.tiny import tiny_llama

pytestmark = pytest.mark.gpu


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """An empty cache of kernels on the disk, and what is compiled (False) or fetched from it (True) from here on."""
    from triton import knobs

    heard: list[tuple[str, bool]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, cache_hit, **_: heard.append((src.name, cache_hit)))
    return heard


def operators() -> Any:
    return TritonOperators(TritonOptions(), OperatorParts(cuda_device(), "bfloat16")).ops


@pytest.fixture
def ops() -> Any:
    return operators()


def test_kernels_are_compiled_and_not_launched(ops: Any, fresh: list[tuple[str, bool]]) -> None:
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((3, 7168), (7168,)))
    with ops["compile_ahead", "plain"]() as ahead:
        for _ in range(3):
            first = ops["rms_norm", "plain"](x, weight, 1e-5, torch.bfloat16)
            second = ops["silu_mul", "plain"](x)
    assert not first.any() and not second.any()
    assert len(ahead.started) == ahead.compiled + ahead.fetched == len(fresh) == 2 and not ahead.all_fetched()
    got = ops["rms_norm", "plain"](x, weight, 1e-5, torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.float(), (7168,), weight.float(), 1e-5)
    assert len(fresh) == 2, "compiled once, and ready"
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.02)
    with ops["compile_ahead", "plain"]() as ahead:
        ops["rms_norm", "plain"](x, weight, 1e-5, torch.bfloat16)
    assert torch.equal(got, ops["rms_norm", "plain"](x, weight, 1e-5, torch.bfloat16))


def test_what_lies_in_the_cache_on_disk_is_told_from_what_is_compiled(ops: Any, fresh: list[tuple[str, bool]]) -> None:
    x = torch.randn(5, 6464, device="cuda", dtype=torch.bfloat16)
    want = ops["silu_mul", "plain"](x)
    activation.gated_kernel.device_caches.clear()  # as in another process
    ops = operators()
    with ops["compile_ahead", "plain"]() as ahead:
        ops["silu_mul", "plain"](x)
        assert ahead.all_fetched()
    assert fresh == [("gated_kernel", False), ("gated_kernel", True)]
    assert torch.equal(ops["silu_mul", "plain"](x), want)


def test_another_threads_kernels_are_launched_meanwhile(ops: Any) -> None:
    x = torch.randn(5, 6432, device="cuda", dtype=torch.bfloat16)
    want = torch.nn.functional.silu(x[:, :3216].float()) * x[:, 3216:].float()
    with ops["compile_ahead", "plain"](), ThreadPoolExecutor(1) as pool:
        mine = ops["silu_mul", "plain"](x)
        other = pool.submit(lambda: ops["silu_mul", "plain"](x)).result()
        torch.cuda.synchronize()
    assert not mine.any()
    torch.testing.assert_close(other.float(), want, atol=0.05, rtol=0.02)


def test_a_failing_compilation_is_raised_and_leaves_launches_as_they_were(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler")

    x, other = (torch.randn(5, width, device="cuda", dtype=torch.bfloat16) for width in (6400, 6416))
    want = ops["silu_mul", "plain"](x)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no compiler"):
        patch.setattr(activation.gated_kernel, "compile", broken)
        with ops["compile_ahead", "plain"]():
            ops["silu_mul", "plain"](other)
    assert torch.equal(ops["silu_mul", "plain"](x), want)
    assert ops["silu_mul", "plain"](other).any(), "compiled when it is needed"


@pytest.mark.parametrize("shape", [{}, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}], ids=["llama", "qwen3"])
def test_an_engine_says_what_it_says_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    from octavo.engine import build

    folder = tiny_llama(tmp_path / "m", **shape)
    rehearsals = []
    rehearse = build.rehearse
    monkeypatch.setattr(build, "rehearse", lambda *parts: (rehearsals.append(parts), rehearse(*parts)))
    asks = {"short": range(9, 14), "long": range(20, 200), "other": range(30, 70)}

    def outcome() -> dict[str, list[int]]:
        engine = make_engine(folder, device="cuda", max_num_seqs=24, num_gpu_blocks_override=64)
        found = run(engine, [request(engine, id, prompt, max_tokens=20) for id, prompt in asks.items()])
        engine.close()
        return {key[0]: value.tokens for key, value in found.items()}

    rehearsed = outcome()
    assert rehearsals
    monkeypatch.setattr(build, "rehearse", lambda *_: None)
    assert rehearsed == outcome()
