"""What the Triton operators take and refuse: asked without a GPU, without triton, and answered with the need that is not met."""

from __future__ import annotations

from pathlib import Path
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
