"""`octavo bench allocator` measures whole lives of blocks. The bars are not asserted here, where other
tests share the machine; a tenfold of them is, so that a step that loops over rows is noticed."""

from __future__ import annotations

import json

import pytest
from octavo.bench import allocator as bench
from octavo.cache.allocator import BlockAllocator
from octavo.cli.main import main
from octavo.interfaces import Allocator, AllocatorParts


def test_a_run_reports_both_costs_their_split_and_the_workload() -> None:
    found = bench.run(sequences=32, repetitions=2)
    assert found["sequences"] == 32 and found["block_size"] == 16 and found["blocks"] > 32 * 11
    for name, bar in found["bars"].items():
        assert 0 < found[name] < 10 * bar
        assert found[name] <= found[f"median_{name}"] * 1.01
        assert sum(found[f"split_{name}"].values()) >= found[name] - 0.01
    assert {"admit again", "commit", "release"} <= found["split_us_per_block_hashed"].keys()


def test_every_block_of_the_workload_is_taken_and_every_prompt_is_found_again() -> None:
    built: list[BlockAllocator] = []

    def make(parts: AllocatorParts) -> Allocator:
        built.append(BlockAllocator(None, parts))
        return built[-1]

    work = bench.Workload(8, 16, seed=1)
    work.life(make, prefix_caching=True)
    (allocator,) = built
    allocator.check()
    assert allocator.usage().used == 0 and allocator.usage().total == work.blocks
    assert allocator.prefix_hits == sum((len(prompt) - 1) // 16 * 16 for prompt in work.prompts)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_command_prints_lines_or_json(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = bench.run(sequences=4, repetitions=1)
    monkeypatch.setattr(bench, "run", lambda: small)
    assert main(["bench", "allocator", *flags]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed).items() >= small.items() if flags else "us a block" in printed
