"""Latent attention in Triton without a GPU: what its provider takes and refuses, and its portable kernel under Triton's
interpreter, which runs every program in numpy."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from octavo.catalog import Accept, Device, Needs, Provider, Reject
from octavo.engine.plan import attention_facts
from octavo.interfaces import AttentionLayer, KVSpec, ModelFacts

from tests.plugins.interpreter import PRELUDE, interpreted

PLUGIN = Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"
H200 = Device("cuda", name="H200", capability=(9, 0))


def answer(monkeypatch: pytest.MonkeyPatch, device: Device = H200, dtype: str = "bfloat16", **over: Any) -> Accept | Reject:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from octavo_attention_triton.latent_provider import provider

    shape = {"heads": 128, "k": 576, "v": 512, "kind": "latent", "block": None, "kv": dtype, "every": 1} | over
    window = 8 if shape["kind"] == "window" else None
    layer = AttentionLayer(0, shape["heads"], 1, shape["k"], shape["v"], 1.0, window)
    spec = KVSpec(shape["kind"], 1, shape["k"], shape["v"], shape["kv"], window, shape["every"])
    model = ModelFacts("Test", 512, 64, 4096, (layer,), (spec,))
    return provider.accepts(
        Needs("attention", device, dtype, attention_facts(model, shape["kv"], shape["block"])), provider.options()
    )


@pytest.mark.parametrize(
    ("device", "over", "kernel"),
    [
        (H200, {}, "Hopper"),
        (H200, {"heads": 16, "block": 16}, "Hopper"),
        (H200, {"dtype": "float32"}, "portable"),
        (H200, {"k": 320, "v": 256}, "portable"),
        (Device("cuda", capability=(8, 0)), {}, "portable"),
        (Device("cuda", capability=(12, 0)), {"dtype": "float16"}, "portable"),
        (H200, {"kv": "float8_e4m3fn"}, "portable"),
        (H200, {"k": 512}, "portable"),
        (H200, {"every": 4}, "portable"),
    ],
)
def test_what_is_taken_and_by_which_kernel(
    monkeypatch: pytest.MonkeyPatch, device: Device, over: dict[str, Any], kernel: str
) -> None:
    found = answer(monkeypatch, device, **over)
    assert isinstance(found, Accept) and f"by the {kernel} kernel" in found.reason


@pytest.mark.parametrize(
    ("device", "over", "words"),
    [
        (Device("cpu"), {}, "device is cpu"),
        (Device("cuda", name="T4", capability=(7, 5)), {"dtype": "float16"}, "capability 7.5 of 'T4' is below 8.0"),
        (
            Device("cuda", name="A100", capability=(8, 0)),
            {"kv": "float8_e4m3fn"},
            "kv_dtype float8_e4m3fn needs CUDA capability 8.9",
        ),
        (H200, {"kv": "float16"}, "kv_dtype float16 with bfloat16 queries"),
        (H200, {"kind": "full"}, "KV caches are full"),
        (H200, {"kind": "window"}, "KV caches are window"),
        (H200, {"block": 20}, "block_size 20"),
        (H200, {"v": 520}, "v_dim 520"),
        (H200, {"k": 520}, "k_dim - v_dim is 8"),
    ],
)
def test_a_refusal_names_the_need(monkeypatch: pytest.MonkeyPatch, device: Device, over: dict[str, Any], words: str) -> None:
    refused = answer(monkeypatch, device, **over)
    assert isinstance(refused, Reject) and words in refused.reason


@pytest.mark.parametrize("name", ["attention_triton", "models_deepseek"])
def test_what_a_hook_returns_does_not_change_once_its_modules_are_loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Python binds a loaded submodule to its name in the package, over whatever the package had under that name."""
    monkeypatch.syspath_prepend(str(PLUGIN.parents[1] / name / "src"))
    package = import_module(f"octavo_{name}")
    hook = package.register_attention_backends if name == "attention_triton" else package.register_model_adapters
    before = hook()
    assert all(isinstance(provider, Provider) for provider in before)
    for module in iter_modules(package.__path__):
        if f"{package.__name__}.{module.name}" not in sys.modules:
            monkeypatch.setattr(package, module.name, object(), raising=False)
    assert hook() == before


SCRIPT = (
    PRELUDE
    + """
import json, sys
import torch
from octavo.catalog import Device
from octavo.interfaces import AttentionParts
from octavo.testing.attention import check
from octavo.testing.latent import latent
from octavo.testing.paged import Scene
from octavo_attention_triton.latent import TritonLatent
from octavo_attention_triton.latent_provider import LatentOptions

complaints = []
for heads, dim, rope, dtype, size in json.loads(sys.argv[1]):
    backend = TritonLatent(LatentOptions(), AttentionParts(Device("cpu"), dtype))
    backend.sms = 5  # as if the CPU had five multiprocessors: rows are split
    lengths = [1, 15, 16, 17, 33, 70, 20, 40]
    scene = Scene(backend, latent(heads, dim, rope, dtype, size), Device("cpu"), lengths)
    scene.fill([*(n - 1 for n in lengths[:6]), 0, 30])
    try:
        check(scene, [*((i, n - 1, 1) for i, n in enumerate(lengths[:6])), (6, 0, 20), (7, 30, 10)], lse=True)
        for row in scene.rows:
            keys, values = backend.gather(0, row.slot, row.length)
            assert torch.equal(keys, row.k[0]) and torch.equal(values, row.v[0]), "gather gives other values than were written"
        complaints.append("")
    except Exception as error:
        complaints.append(f"{type(error).__name__}: {error}")
print(json.dumps(complaints))
"""
)
CASES = [[4, 32, 16, "float32", 16], [3, 64, 32, "float16", 8], [20, 48, 16, "float32", 64]]


def printed(script: str, cases: Any) -> str:
    """What a script prints of these cases."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: the kernel cannot be interpreted")
    return interpreted(script, json.dumps(cases), plugins=("attention_triton",))


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    """Of every case, what was wrong."""
    found: list[str] = json.loads(printed(SCRIPT, CASES))
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "{}q-{}+{}-{}-block{}".format(*CASES[i]))
def test_the_portable_kernel_computes_latent_attention_in_hostile_memory(index: int, complaints: list[str]) -> None:
    assert not complaints[index], complaints[index]


SPARSE = (
    PRELUDE
    + """
import json, sys
from dataclasses import replace
from octavo.catalog import Accept, Device
from octavo.testing.attention import AttentionTarget
from octavo.testing.sparse import SparseSuite
from octavo_attention_triton.latent_provider import provider

import octavo_attention_triton.latent_index as latent_index

class Target(AttentionTarget):
    def build(self, dtype):
        backend = super().build(dtype)
        backend.sms = multiprocessors
        return backend

suite = SparseSuite()
suite.target = Target(replace(provider, accepts=lambda needs, options: Accept({}, "")), Device("cpu"), ("float32",))
complaints = {}
usual = latent_index.BLOCKS
for name, multiprocessors, given in json.loads(sys.argv[1]):
    latent_index.BLOCKS = (64, 64) if name.endswith("several blocks") else usual
    try:
        getattr(suite, name.partition(",")[0])(**given, dtype="float32")
        complaints[name] = ""
    except Exception as error:
        complaints[name] = f"{type(error).__name__}: {error}"
print(json.dumps(complaints))
"""
)
CHOICE = {"heads": 3, "dim": 16, "size": 8, "count": 20}
SPARSE_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "test_an_index_chooses_the_keys_with_the_highest_scores": (1, CHOICE),
    "test_an_index_chooses_the_keys_with_the_highest_scores, in several blocks": (1, CHOICE),
    "test_equal_scores_are_chosen_from_without_repetition": (1, {}),
    "test_equal_scores_are_chosen_from_without_repetition, in several blocks": (1, {}),
    "test_chosen_keys_alone_are_attended_to": (400, {"each": (4, 32, 16), "sinks": True}),
    "test_a_window_with_sinks_over_keys_that_are_values": (5, {"heads": 3}),
    "test_entries_are_made_of_the_windows_that_close": (5, {"rate": 4, "dim": 32, "overlapping": True}),
}
"""Test of the suite: multiprocessors that the device is said to have, arguments."""


@pytest.fixture(scope="module")
def sparse_complaints() -> dict[str, str]:
    found: dict[str, str] = json.loads(printed(SPARSE, [[name, *case] for name, case in SPARSE_CASES.items()]))
    return found


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_the_kernels_of_sparse_attention_pass_its_suite(name: str, sparse_complaints: dict[str, str]) -> None:
    assert not sparse_complaints[name], sparse_complaints[name]
