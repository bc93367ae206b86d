"""`octavo bench memory`: the real allocator and scheduler under realistic lengths, in small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from octavo.bench import memory
from octavo.cli.main import main


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_fragmentation_stays_below_5_percent_with_64k_and_512_token_requests(block_size: int) -> None:
    """Every fiftieth prompt has 64K tokens, the others 256 or 512; each sequence is somewhere in its output."""
    world = memory._World(memory.MIXES["documents"], block_size, 655_360, 0, 300, 8192, 0)
    random = np.random.default_rng(1)
    outputs = memory.MIXES["documents"].draw(random, 300)[:, 1]
    for row, output in enumerate(outputs.tolist()):
        prompt = 65_536 if row % 50 == 0 else (256, 512)[row % 2]
        length = prompt + int(random.integers(1, output + 1))
        world._allocator.admit(row, np.arange(length, dtype=np.int32) + row, "a")
        assert world._allocator.reserve(np.array([row]), np.array([0]), np.array([length]))
        world._allocator.commit(np.array([row]), np.array([length]))
    world._sample()
    ((_, fragmentation, _),) = world._samples
    assert 0 < fragmentation < 0.05


def test_a_simulation_serves_everybody_and_loses_no_block() -> None:
    record = memory.run(requests=450, mix="documents", block_size=64, pool_tokens=262_144, max_num_seqs=32)
    assert record["steps"] > 100 and record["generated_tokens"] > 450 * 100
    assert record["preemptions"] == 0 or record["usage"]["max"] > 0.95, "nobody is preempted while there is room"


def test_weights_are_honoured_while_every_tenant_waits() -> None:
    record = memory.run(requests=500, mix="chat", block_size=16, pool_tokens=65_536, max_num_seqs=48)
    assert record["fairness"] > 0.7, "without weights the double one would get half as much for each"
    assert set(record["tokens_per_weight"]) == set(memory.TENANTS)


def test_what_is_preempted_goes_to_host_memory_where_there_is_some() -> None:
    record = memory.run(requests=400, mix="documents", block_size=64, pool_tokens=131_072, host_tokens=524_288, max_num_seqs=64)
    assert record["swapped_out"] == record["preemptions"] > 0
    assert 0 < record["swapped_in"] <= record["swapped_out"]


def test_fragmentation_is_what_the_lengths_say() -> None:
    """By hand: sequences of n tokens in blocks of 128 waste the rest of their last block."""
    world = memory._World(memory.MIXES["chat"], 128, 65_536, 0, 8, 8192, 0)
    lengths = [5, 128, 129, 300]
    for row, length in enumerate(lengths):
        world._allocator.admit(row, np.arange(length, dtype=np.int32), "a")
        assert world._allocator.reserve(np.array([row]), np.array([0]), np.array([length]))
        world._allocator.commit(np.array([row]), np.array([length]))
    world._sample()
    assert world._samples[-1][1] == pytest.approx(1 - sum(lengths) / ((1 + 1 + 2 + 3) * 128))


def test_the_command_prints_a_table_and_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    words = ["bench", "memory", "--mix", "chat", "--block-size", "16", "--requests", "400", "--max-num-seqs", "32"]
    assert main([*words, "--plot", str(plot)]) == 0
    assert "fragmentation" in capsys.readouterr().out
    assert plot.read_text().startswith("<?xml")
    assert main([*words, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["requests"] == 400 and len(run["curves"]["usage"]) > 1


def test_a_load_that_ends_before_it_is_steady_is_refused_with_a_number_that_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--mix", "chat", "--requests", "60", "--block-size", "16"]) == 2
    assert "--requests 60: all were sent before the first 20 steps" in capsys.readouterr().err
    assert main(["bench", "memory", "--mix", "chat", "--requests", "1000", "--block-size", "16"]) == 0
