"""Huge pages are asked for once, change no value, and are never a reason not to start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from octavo.engine import hugepages
from octavo.engine.hugepages import HUGE, collapse, collapse_in_background, worth_moving


def test_memory_moves_and_values_stay() -> None:
    tensor = torch.arange(8 << 20, dtype=torch.int32)  # 32 MiB
    before = tensor.clone()
    moved = collapse(worth_moving(16 << 20))
    if moved == 0:
        pytest.skip("this kernel gives no huge pages on demand")
    assert torch.equal(tensor, before)
    assert _huge() > 0


def test_it_is_done_behind_the_back_of_who_goes_on() -> None:
    tensor = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
    before = tensor.clone()
    thread = collapse_in_background()
    if thread is None:
        pytest.skip("this system allows no huge pages")
    assert thread.daemon, "a process that ends does not wait for it"
    thread.join(60)
    assert not thread.is_alive() and torch.equal(tensor, before)


def _huge() -> int:
    """KiB of this process in huge pages."""
    return int(Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0])


def test_a_system_without_them_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(hugepages.Path, "read_text", missing)
    assert worth_moving() == [] and collapse_in_background() is None


def test_only_whole_huge_pages_of_private_anonymous_memory_are_taken() -> None:
    maps = "\n".join(
        [
            f"{HUGE - 4096:x}-{3 * HUGE + 4096:x} rw-p 00000000 00:00 0",
            f"{10 * HUGE:x}-{11 * HUGE:x} rw-p 00000000 00:00 0 [heap]",
            f"{20 * HUGE:x}-{30 * HUGE:x} rw-p 00000000 08:01 77 /usr/lib/libtorch.so",
            f"{40 * HUGE:x}-{50 * HUGE:x} r--p 00000000 00:00 0",
            f"{60 * HUGE:x}-{70 * HUGE:x} rw-s 00000000 00:00 0",
            f"{80 * HUGE + 1:x}-{81 * HUGE + 1:x} rw-p 00000000 00:00 0",
            f"{90 * HUGE:x}-{91 * HUGE:x} rw-p 00000000 00:00 0 [stack]",
        ]
    )
    assert hugepages._regions(maps) == [(HUGE, 3 * HUGE), (10 * HUGE, 11 * HUGE)]
