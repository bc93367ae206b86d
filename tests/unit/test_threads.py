"""The thread governor: gives cores up at once when others need them, and takes them back when it stays quiet."""

from __future__ import annotations

import subprocess
import sys
import time

from octavo.engine.threads import INTERVAL, QUIET_LOOKS, CpuMeter, ThreadGovernor


class Machine:
    """A clock and neighbours that the test moves."""

    def __init__(self, cores: int, count: int) -> None:
        self.now, self.busy, self.since = 0.0, 0.0, INTERVAL
        self.set: list[int] = []
        self.governor = ThreadGovernor(
            cores, count, self.set.append, read=lambda: (self.busy, self.since), clock=lambda: self.now
        )

    def tick(self, looks: int = 1) -> list[int]:
        for _ in range(looks):
            self.now += INTERVAL
            self.governor.tick()
        return self.set


def test_a_busy_neighbour_costs_a_thread_at_once() -> None:
    machine = Machine(cores=2, count=2)
    assert machine.tick(3) == []
    machine.busy = 0.8
    assert machine.tick() == [1]
    assert machine.tick(5) == [1]


def test_a_thread_comes_back_only_after_it_stayed_quiet() -> None:
    machine = Machine(cores=4, count=4)
    machine.busy = 2.9
    assert machine.tick() == [1]
    machine.busy = 0.1
    assert machine.tick(QUIET_LOOKS - 1) == [1]
    machine.busy = 3.2
    machine.tick()
    machine.busy = 0.1
    assert machine.tick(QUIET_LOOKS - 1) == [1]
    assert machine.tick() == [1, 4]


def test_one_thread_always_stays() -> None:
    machine = Machine(cores=2, count=2)
    machine.busy = 40.0
    assert machine.tick() == [1]


def test_an_average_over_idle_time_decides_nothing() -> None:
    machine = Machine(cores=2, count=2)
    machine.busy, machine.since = 2.0, 60.0
    assert machine.tick() == []


def test_between_looks_nothing_is_read() -> None:
    machine = Machine(cores=2, count=2)
    machine.busy = 2.0
    for _ in range(100):
        machine.governor.tick()
    assert machine.set == []


def test_the_meter_sees_another_process_and_not_this_one() -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        meter = CpuMeter()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass  # this process is busy as well, and does not count itself
        busy, seconds = meter.read()
        assert seconds >= 0.6
        assert busy > 0.3
    finally:
        other.kill()
        other.wait()
