"""What the Triton operators take and refuse: asked without a GPU, without triton, and answered with the need that is not met."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.catalog import Accept, Device, Needs, Provider, Reject

PLUGIN = Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from octavo_ops_triton import register_operators

    (found,) = register_operators()
    return found


def answer(provider: Provider, device: Device, dtype: str) -> Any:
    return provider.accepts(Needs("operators", device, dtype), provider.options())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_cuda_from_capability_8_in_three_dtypes_is_taken(provider: Provider, capability: tuple[int, int], dtype: str) -> None:
    assert isinstance(answer(provider, Device("cuda", capability=capability), dtype), Accept)
    assert (provider.name, provider.kind, provider.priority) == ("triton", "operators", 20)


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        (Device("cpu"), "float32", "device is cpu"),
        (Device("cuda", name="T4", capability=(7, 5)), "float16", "capability 7.5 of 'T4' is below 8.0"),
        (Device("cuda", capability=(9, 0)), "float64", "dtype float64"),
    ],
)
def test_a_refusal_names_the_need(provider: Provider, device: Device, dtype: str, words: str) -> None:
    refusal = answer(provider, device, dtype)
    assert isinstance(refusal, Reject) and words in refusal.reason


def test_kernels_that_are_compiled_while_the_engine_runs_are_named_in_the_log(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo_ops_triton import engine_ready

    heard: list[str] = []
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=lambda *, src, **_: heard.append(src.name)))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    engine_ready(SimpleNamespace(explain={"device": {"type": "cpu"}}))
    engine_ready(SimpleNamespace(explain={"device": {"type": "cuda"}}))
    caplog.set_level(logging.DEBUG, "octavo_ops_triton")
    for name, hit in (("skinny_kernel", False), ("plan_kernel", True)):
        times = SimpleNamespace(total=250_000 if not hit else 3_000)
        knobs.compilation.listener(src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert caplog.messages == ["compiled the kernel skinny_kernel in 250 ms", "fetched the kernel plan_kernel in 3 ms"]
    assert heard == ["skinny_kernel", "plan_kernel"]  # whoever listened before still does
