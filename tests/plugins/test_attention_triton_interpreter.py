"""The Triton kernels without a GPU: arithmetic, masks and addresses under Triton's interpreter (S10, S21 of the bug families).

Small shapes only: the interpreter runs every program in numpy. It multiplies no bfloat16 and rounds some FP8 casts
wrongly, so queries are float32 or float16 here and FP8 values are drawn so that they need no rounding.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

RAGGED = (1, 15, 16, 17, 33)
CASES: list[dict[str, Any]] = [
    {"lens": RAGGED, "new": (1, 1, 1, 1, 1)},
    {"lens": RAGGED, "new": (1, 15, 1, 5, 20), "sinks": True, "softcap": 3.0},
    {"lens": (70, 5, 40), "new": (1, 5, 20), "window": 9, "sinks": True, "page": 8},
    {"lens": (65, 9), "new": (1, 1), "window": 33, "page": 8},
    {"lens": (70, 3), "new": (1, 3), "heads": 7, "kv_heads": 1, "k_dim": 80, "page": 24},
    {"lens": (33, 20), "new": (1, 20), "heads": 24, "kv_heads": 1, "k_dim": 32, "page": 128},
    {"lens": (33, 18), "new": (1, 18), "heads": 4, "kv_heads": 4, "k_dim": 48, "v_dim": 32},
    {"lens": (40, 17), "new": (1, 17), "dtype": "float16", "page": 32, "k_dim": 96},
    {
        "lens": (50, 33),
        "new": (10, 1),
        "dtype": "float16",
        "kv_dtype": "float8_e4m3fn",
        "k_scale": 0.5,
        "v_scale": 2.0,
        "exact": True,
        "page": 64,
    },
    {"lens": (50, 33), "new": (1, 20), "dtype": "float32", "kv_dtype": "float8_e5m2", "exact": True, "k_dim": 32},
]
BARS = {"float32": 1e-5, "float16": 4e-3}

SCRIPT = """
import json, sys
import torch
import triton.runtime.interpreter as interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # numpy 2.4 converts only 0-dimensional arrays to int; Triton 3.6 keeps scalars as [1]
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched
torch.set_num_threads(1)
from octavo.catalog import Device
from octavo_attention_triton.backend import TritonAttention
from octavo_attention_triton.provider import TritonOptions
from tests.attention_case import Case, build
def backend(merge, parts):
    made = TritonAttention(TritonOptions(merge=merge), parts)
    made.sms = 5  # as if the CPU had five multiprocessors: rows are split
    return made
results = []
for facts in json.loads(sys.argv[1]):
    case = Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()})
    worst = {}
    for merge in ("fused", "kernel"):
        built = build(case, lambda parts: backend(merge, parts), Device("cpu"))
        out, lse = built.run()
        want, want_lse = built.oracle()
        worst[merge] = [float((out - want).abs().max()), float((lse - want_lse).abs().max()), built.guards_intact()]
        k, v = built.backend.gather(0, int(built.step.host.rows[0]), case.lens[0])
        worst[merge].append(float((k.double() - built.keys[0].double()).abs().max()) if not case.kv_dtype or case.exact else 0.0)
    results.append(worst)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[Any]]]:
    """Every case, in one process that has the interpreter on from its first import of triton."""
    import json

    root = Path(__file__).parents[2]
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(root), str(PLUGIN), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)], capture_output=True, text=True, env=env, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, list[Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: " ".join(f"{k}={v}" for k, v in CASES[i].items()))
def test_the_kernels_compute_attention_in_hostile_memory(index: int, results: list[dict[str, list[Any]]]) -> None:
    bar = BARS[CASES[index].get("dtype", "float32")]
    for merge, (error, lse_error, guards, stored) in results[index].items():
        assert error < bar, f"out is off by {error} where splits are merged by {merge}"
        assert lse_error < bar, f"lse is off by {lse_error} where splits are merged by {merge}"
        assert guards, "a block outside the pool was written"
        assert stored == 0.0, f"gather gives back other keys than were written: {stored}"
