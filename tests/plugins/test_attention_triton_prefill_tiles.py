"""Which program of the persistent prefill kernel takes which tile: every tile of every head once, and nobody much longer than the others."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PLUGINS = [str(Path(__file__).parents[2] / "plugins" / name / "src") for name in ("attention_triton", "ops_triton")]

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the tile list lies beside its kernels", allow_module_level=True)

SCRIPT = """
import json, sys
import numpy as np
from octavo.interfaces import StepHost
from octavo_attention_triton.prefill_tiles import share, tile_list

lengths, new, window, heads, programs = json.loads(sys.argv[1])
lengths, new = np.array(lengths), np.array(new)
step = StepHost(new, lengths, np.arange(len(new)), int(new.sum()), int(new.max()), int(lengths.max()))
tiles = tile_list(step, 32, window)
records, starts = share(tiles, heads, programs, window)
print(json.dumps([tiles.tolist(), records.tolist(), starts.tolist()]))
"""


def shared(
    lengths: list[int], new: list[int], window: int | None, heads: int, programs: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    arguments = [sys.executable, "-c", SCRIPT, json.dumps([lengths, new, window, heads, programs])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*PLUGINS, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    tiles, records, starts = json.loads(done.stdout)
    return tiles, records, starts


def keys_read(record: list[int], window: int | None) -> int:
    """KV tiles of 128 tokens that an item reads."""
    first = 0 if window is None else max(0, record[2] - window + 1) // 128
    return -(-(record[2] + record[1]) // 128) - first


@pytest.mark.parametrize(
    ("lengths", "new", "window", "heads", "programs"),
    [
        ([4096, 4096], [4096, 4096], None, 8, 132),  # two prompts in a step of 8192: nearly two tiles a program and head
        ([8192], [8192], None, 8, 132),
        ([32768, 900], [8191, 1], None, 8, 132),  # the end of a long prompt, and a decoding row that is nobody's tile
        ([4096, 300, 77], [4096, 300, 77], 1024, 8, 132),
        ([40], [40], None, 2, 132),  # fewer items than programs
    ],
)
def test_programs_share_every_tile_of_every_head_evenly(
    lengths: list[int], new: list[int], window: int | None, heads: int, programs: int
) -> None:
    tiles, records, starts = shared(lengths, new, window, heads, programs)

    wanted = sorted([*tile[:5], head, *tile[6:]] for tile in tiles for head in range(heads))
    assert sorted(records) == wanted
    assert starts[0] == 0 and starts[-1] == len(records) and len(starts) == min(programs, len(records)) + 1
    work = [sum(keys_read(r, window) for r in records[a:b]) for a, b in itertools.pairwise(starts)]
    assert min(work) > 0, "a program has nothing to do"
    longest = max(keys_read(r, window) for r in records)
    assert max(work) <= sum(work) / len(work) + max(longest, 0.03 * sum(work) / len(work))
    for a, b in itertools.pairwise(starts):
        heads_of = [r[5] for r in records[a:b]]
        assert heads_of == sorted(heads_of), "a program goes back to a head whose K and V have left the L2"
