"""The Triton kernels without a GPU: arithmetic, masks and addresses under Triton's interpreter.

Small shapes only: the interpreter runs every program in numpy. It multiplies no bfloat16 and rounds some FP8 casts
wrongly, so queries are float32 or float16 here and FP8 values are drawn so that they need no rounding.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

# (shape, lengths, [(row, first new token, new tokens)]): a row with one new token decodes, others prefill
RAGGED = [1, 15, 16, 17, 33]
MIXED = [[0, 0, 1], [1, 0, 15], [2, 15, 1], [3, 12, 5], [4, 13, 20]]
CASES: list[tuple[dict[str, Any], list[int], list[list[int]]]] = [
    ({}, RAGGED, [[i, n - 1, 1] for i, n in enumerate(RAGGED)]),
    ({"sinks": True, "softcap": 3.0}, RAGGED, MIXED),
    ({"window": 9, "sinks": True, "block_size": 8}, [70, 5, 40], [[0, 69, 1], [1, 0, 5], [2, 20, 20]]),
    ({"window": 33, "block_size": 8}, [65, 9], [[0, 64, 1], [1, 8, 1]]),
    ({"heads": [7, 1], "k_dim": 80, "block_size": 24}, [70, 3], [[0, 69, 1], [1, 0, 3]]),
    ({"heads": [24, 1], "k_dim": 32, "block_size": 128}, [33, 20], [[0, 32, 1], [1, 0, 20]]),
    ({"heads": [4, 4], "k_dim": 48, "v_dim": 32}, [33, 18], [[0, 32, 1], [1, 0, 18]]),
    ({"dtype": "float16", "block_size": 32, "k_dim": 96}, [40, 17], [[0, 39, 1], [1, 0, 17]]),
    (
        {"dtype": "float16", "kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 2.0, "block_size": 64},
        [50, 33],
        [[0, 40, 10], [1, 32, 1]],
    ),
    ({"kv_dtype": "float8_e5m2", "k_dim": 32}, [50, 33], [[0, 49, 1], [1, 13, 20]]),
    # chunks whose transposed values a kernel of their own stores
    (
        {"kv_dtype": "float8_e4m3fn", "v_scale": 2.0, "block_size": 64, "k_dim": 32, "v_dim": 48},
        [150, 40, 9],
        [[0, 20, 130], [1, 37, 3], [2, 8, 1]],
    ),
    # so many rows for the device that begin and end of programs count: smaller tiles, all of them masked
    (
        {"dtype": "float16", "k_dim": 96, "block_size": 64, "sms": 1},
        [70, 1, 33, 64, 130],
        [[i, n - 1, 1] for i, n in enumerate([70, 1, 33, 64, 130])],
    ),
    (
        {"dtype": "float16", "k_dim": 96, "block_size": 16, "window": 50, "sms": 1},
        [170, 31, 90, 64],
        [[i, n - 1, 1] for i, n in enumerate([170, 31, 90, 64])],
    ),
    # tokens of one sequence as rows of their own: the end of a prompt in a captured step
    ({"k_dim": 32}, [37, 20, 9], [[0, 36, 1], [1, 19, 1], [0, 31, 1], [0, 33, 1], [0, 32, 1], [0, 35, 1], [0, 34, 1]]),
]

SHARES: list[tuple[dict[str, Any], list[int], list[tuple[list[int], int]]]] = [
    ({"k_dim": 32}, [130, 70, 129, 80, 300, 70], [([0, 1, 2, 3, 5], 64)]),
    ({"k_dim": 32, "heads": [6, 2], "sinks": True, "softcap": 3.0}, [600, 513, 5, 520, 70, 90], [([0, 1, 3], 512), ([4, 5], 64)]),
    ({"k_dim": 48, "v_dim": 32, "block_size": 64}, [140, 150, 160], [([0, 1, 2], 128)]),
    ({"k_dim": 32}, [1153, 1160, 1170, 20], [([0, 1, 2], 1152)]),  # read in nine parts
]
"""(shape, lengths, [(rows, tokens that they share)])"""

SCRIPT = (
    PRELUDE
    + """
import json, sys
from dataclasses import replace
import numpy as np
import torch
from octavo.catalog import Device
from octavo.interfaces import AttentionParts, SharedPrefix
from octavo.testing.attention import check, check_prologue
from octavo.testing.paged import Scene, Shape, stored
from octavo_attention_triton.backend import TritonAttention
from octavo_attention_triton.provider import TritonOptions

class Masking(TritonAttention):
    mask_all = False

    def _choice(self, choice):
        return replace(super()._choice(choice), mask_all=self.mask_all or choice.mask_all)

def run(facts, lengths, work, merge, mask_all):
    sms = facts.get("sms", 5)
    facts = {k: v for k, v in facts.items() if k != "sms"}
    shape = Shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()})
    Masking.mask_all = mask_all
    backend = Masking(TritonOptions(merge=merge), AttentionParts(Device("cpu"), shape.dtype))
    backend.sms = sms  # as if the CPU had five multiprocessors: rows are split
    scene = Scene(backend, shape, Device("cpu"), lengths)
    if shape.kv_dtype:
        for row in scene.rows:  # values that need no rounding
            row.k = [stored(x, shape.kv_dtype, shape.k_scale).to(x.dtype) for x in row.k]
            row.v = [stored(x, shape.kv_dtype, shape.v_scale).to(x.dtype) for x in row.v]
    scene.fill([min((start for row, start, _ in work if row == i), default=n) for i, n in enumerate(lengths)])
    check(scene, [tuple(item) for item in work], lse=True)
    for row in scene.rows:
        keys, values = backend.gather(0, row.slot, row.length)
        assert torch.equal(keys, row.k[0]) and torch.equal(values, row.v[0]), "gather gives back other values than were written"
    if shape.v_dim in (None, shape.k_dim) and not shape.kv_dtype:
        for norm in (False, True):
            rotary = shape.k_dim // 2 if norm else shape.k_dim
            check_prologue(scene, [tuple(item) for item in work], rotary=rotary, norm=norm, spreads=merge == "fused")

def shares(facts, lengths, sets):
    # sets: (rows, tokens that they share)
    shape = Shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()})
    backend = TritonAttention(TritonOptions(shared_prefix_bytes=0), AttentionParts(Device("cpu"), shape.dtype))
    backend.sms = 24
    scene = Scene(backend, shape, Device("cpu"), lengths)
    for rows, tokens in sets:
        scene.share(rows, tokens)
    scene.fill([n - 1 for n in lengths])
    prefixes = tuple(SharedPrefix(np.array(rows), tokens, 0) for rows, tokens in sets)
    step = scene.step([(i, n - 1, 1) for i, n in enumerate(lengths)], prefixes)
    assert backend.variant(step.host) == "shared"
    check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)], lse=True, shared=prefixes)

complaints = []
for case in json.loads(sys.argv[2]):
    complaints.append("")
    try:
        shares(*case)
    except Exception as error:
        complaints[-1] = f"{type(error).__name__}: {error}"
for case in json.loads(sys.argv[1]):
    complaints.append("")
    for merge, mask_all in (("fused", True), ("kernel", False)):
        try:
            run(*case, merge, mask_all)
        except Exception as error:
            complaints[-1] += f"{merge}: {type(error).__name__}: {error}; "
print(json.dumps(complaints))
"""
)


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    """Of every case, what was wrong: all in one process, which has the interpreter on from its first import of triton."""
    arguments = json.dumps(CASES), json.dumps(SHARES)
    found: list[str] = json.loads(interpreted(SCRIPT, *arguments, plugins=("attention_triton", "ops_triton")))
    return found


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: " ".join(f"{k}={v}" for k, v in CASES[i][0].items()) or "plain"
)
def test_the_kernels_compute_attention_in_hostile_memory(index: int, complaints: list[str]) -> None:
    assert not complaints[len(SHARES) + index], complaints[len(SHARES) + index]


@pytest.mark.parametrize("index", range(len(SHARES)))
def test_a_shared_prefix_is_attended_like_any_other(index: int, complaints: list[str]) -> None:
    assert not complaints[index], complaints[index]
