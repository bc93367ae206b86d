"""The scheduler with a real allocator and made-up results: priorities, preemption, admission, chunks, deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from octavo.cache.allocator import BlockAllocator
from octavo.catalog import Options
from octavo.errors import AdmissionRefused
from octavo.interfaces import AllocatorParts, KVGroup, KVSpec, Limits, SchedulerParts
from octavo.request import Batch, Event, Request, Result, SamplingParams
from octavo.scheduling.scheduler import ContinuousScheduler, SchedulerOptions

SPEC = KVSpec(kind="full", heads=1, k_dim=8, v_dim=8, dtype="float32")


class Bench:
    """A scheduler whose device always samples token 9, with a clock that the test moves."""

    def __init__(
        self, *, seqs: int = 2, budget: int = 64, blocks: int = 64, block_size: int = 4, options: Any = None, **parts: Any
    ):
        self.now = 0.0
        self.allocator = BlockAllocator(
            Options(),
            AllocatorParts((KVGroup(0, SPEC, (0,), block_size, 64),), blocks, seqs, 1024, parts.pop("prefix_caching", True)),
        )
        defaults: dict[str, Any] = {"policy": "fcfs", "max_queued": 0, "chunked_prefill": True, "hard_blocks": False}
        self.scheduler = ContinuousScheduler(
            options or SchedulerOptions(),
            SchedulerParts(
                allocator=self.allocator,
                limits=Limits(seqs, budget, 1024),
                clock=lambda: self.now,
                seeds=itertools.count().__next__,
                salt=lambda bound: "",
                **{**defaults, **parts},
            ),
        )

    def add(self, id: str, prompt: int = 8, max_tokens: int = 50, **fields: Any) -> None:
        self.now += 0.001
        own = {k: fields.pop(k) for k in ("priority", "deadline", "domain", "tenant", "weight") if k in fields}
        first = sum(map(ord, id)) % 97  # prompts of different requests share nothing
        ids = [first + 100] + [first + i for i in range(prompt - 1)]
        self.scheduler.add(Request(id=id, prompt=ids, params=SamplingParams(max_tokens=max_tokens, **fields), **own))

    def schedule(self) -> Batch | None:
        batch = self.scheduler.schedule()
        self.allocator.check()
        return batch

    def commit(self, batch: Batch, token: int = 9, failed: Callable[[int], bool] = lambda row: False) -> list[Event]:
        rows = len(batch.slots)
        result = Result(
            np.full((rows, 1), token, np.int32), batch.sample.astype(np.int32), np.array([failed(i) for i in range(rows)], bool)
        )
        events = self.scheduler.commit(batch, result)
        self.allocator.check()
        return events

    def step(self) -> list[Event]:
        batch = self.schedule()
        return self.commit(batch) if batch else []

    def names(self, events: list[Event]) -> list[str]:
        return sorted(e.request_id for e in events)


def test_a_strictly_better_request_takes_the_place_of_the_worst_running_one() -> None:
    bench = Bench(policy="priority")
    bench.add("a", priority=10)
    bench.add("b", priority=10)
    assert bench.names(bench.step()) == ["a", "b"]
    bench.add("vip", priority=0)
    assert bench.names(bench.step()) == ["a", "vip"]  # b came last among the worst
    assert bench.scheduler.stats().preemptions == 1


def test_equal_priorities_never_swap_places() -> None:
    bench = Bench(policy="priority")
    for name in "abcd":
        bench.add(name, priority=5, max_tokens=20)
    for _ in range(10):
        assert bench.names(bench.step()) == ["a", "b"]
    assert bench.scheduler.stats().preemptions == 0


def test_first_come_first_served_ignores_priorities() -> None:
    bench = Bench(policy="fcfs")
    for name, priority in (("a", 9), ("b", 8), ("c", 0)):
        bench.add(name, priority=priority)
    assert bench.names(bench.step()) == ["a", "b"]


def test_what_a_victim_was_scheduled_for_in_this_step_is_undone() -> None:
    """The victim's tokens leave the batch, its blocks and its budget come back, and nothing counts twice."""
    bench = Bench(policy="priority", seqs=2, budget=10, blocks=64)
    bench.add("a", priority=10, prompt=30)
    bench.add("b", priority=20, prompt=30)
    batch = bench.schedule()
    assert batch is not None and batch.num_tokens == 10
    bench.commit(batch)
    bench.add("vip", priority=0, prompt=6)
    batch = bench.schedule()
    assert batch is not None and batch.num_tokens <= 10
    held = {int(slot) for slot in batch.slots}
    assert len(held) == len(batch.slots), "one row per slot"
    bench.commit(batch)
    while bench.scheduler.unfinished:
        bench.step()
    assert bench.allocator.usage().used == 0


def test_a_victim_is_readmitted_from_its_own_cached_blocks_and_computes_only_the_rest() -> None:
    bench = Bench(policy="priority", seqs=1)
    bench.add("slow", priority=5, prompt=16)
    for _ in range(5):
        bench.step()
    bench.add("vip", priority=0, prompt=4, max_tokens=1)
    assert bench.names(bench.step()) == ["vip"]
    batch = bench.schedule()
    assert batch is not None
    # 16 prompt + 5 sampled tokens are known, 20 of them computed: five whole blocks of four come from the cache.
    assert (int(batch.start[0]), int(batch.num_new[0])) == (20, 1)
    assert len(batch.admissions[0].tokens) == 21


def test_a_preempted_row_is_readmitted_only_after_its_token_has_arrived() -> None:
    bench = Bench(policy="priority", seqs=1)
    bench.add("slow", priority=5)
    bench.step()
    late = bench.schedule()
    bench.add("vip", priority=0, prompt=4, max_tokens=2)
    assert late is not None
    vip = bench.schedule()
    assert vip is not None and len(vip.admissions) == 1
    last = bench.schedule()
    assert last is not None and last.num_tokens == 1
    assert bench.schedule() is None  # vip's last token is in flight, and so is slow's
    events = bench.commit(late)
    assert [e.tokens for e in events] == [[9]], "a token sampled before the preemption is kept"
    bench.commit(vip)
    bench.commit(last)
    batch = bench.schedule()
    assert batch is not None and len(batch.admissions[0].tokens) == 8 + 2


def test_waiting_long_enough_outweighs_a_better_priority() -> None:
    bench = Bench(policy="priority", seqs=1, options=SchedulerOptions(ageing=10.0))
    bench.add("running", priority=0, max_tokens=2)
    bench.step()
    bench.add("old", priority=3, max_tokens=1)
    bench.now += 31.0
    bench.add("new", priority=0, max_tokens=1)
    bench.step()  # running ends
    assert bench.names(bench.step()) == ["old"]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows_and_fills_every_step() -> None:
    bench = Bench(seqs=4, budget=16)
    bench.add("short", prompt=4)
    bench.step()
    bench.add("long", prompt=40)
    sizes = []
    for _ in range(3):
        batch = bench.schedule()
        assert batch is not None
        sizes.append(batch.num_tokens)
        bench.commit(batch)
    assert sizes == [16, 16, 11]  # 15 + 15 + 10 of the prompt, and one decoding token in each step


def test_without_chunks_a_prompt_is_computed_whole_or_not_at_all() -> None:
    bench = Bench(seqs=4, budget=64, chunked_prefill=False)
    bench.add("a", prompt=40, max_tokens=10)
    bench.add("b", prompt=40, max_tokens=10)
    first = bench.schedule()
    assert first is not None and first.num_new.tolist() == [40]
    bench.commit(first)
    second = bench.schedule()
    assert second is not None and sorted(second.num_new.tolist()) == [1, 40]


def test_a_request_that_the_pool_can_never_hold_is_refused_at_once() -> None:
    bench = Bench(blocks=8, block_size=4)
    with pytest.raises(AdmissionRefused, match="more than the KV cache of 8 blocks can ever hold") as refused:
        bench.add("big", prompt=20, max_tokens=20)
    assert refused.value.code == "too_large"
    assert not bench.scheduler.unfinished
    bench.add("fits", prompt=20, max_tokens=12)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(seqs=1, max_queued=2)
    bench.add("a")
    bench.step()
    bench.add("b")
    bench.add("c")
    with pytest.raises(AdmissionRefused) as refused:
        bench.add("d")
    assert refused.value.code == "queue_full" and refused.value.retry_after


def test_a_hard_block_limit_refuses_what_does_not_fit_now() -> None:
    bench = Bench(blocks=10, block_size=4, hard_blocks=True)
    bench.add("a", prompt=8, max_tokens=12)  # five blocks promised
    bench.add("b", prompt=8, max_tokens=8)  # four
    with pytest.raises(AdmissionRefused) as refused:
        bench.add("c", prompt=4, max_tokens=4)
    assert refused.value.code == "no_capacity"
    bench.scheduler.abort("b")
    bench.add("c", prompt=4, max_tokens=4)
    while bench.scheduler.unfinished:
        bench.step()
    assert bench.scheduler.stats().preemptions == 0
    bench.add("d", prompt=8, max_tokens=32)  # everything was given back


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "in flight", "forked"])
def test_an_abort_gives_everything_back_in_every_state(when: str) -> None:
    bench = Bench(seqs=3, budget=8)
    bench.add("a", prompt=20, n=2)
    batch = None
    if when in ("decoding", "forked"):
        for _ in range(5):
            bench.step()
    elif when == "prefilling":
        bench.step()
    elif when == "in flight":
        for _ in range(4):
            bench.step()
        batch = bench.schedule()
    bench.scheduler.abort("a", 0 if when == "forked" else None)
    bench.scheduler.abort("a")
    bench.scheduler.abort("a")
    bench.scheduler.abort("never seen")
    if batch is not None:
        assert bench.commit(batch) == []
    assert bench.schedule() is None and not bench.scheduler.unfinished
    assert bench.allocator.usage().used == 0


def test_a_deadline_that_passes_ends_the_request_and_says_so() -> None:
    bench = Bench(seqs=1)
    bench.add("a", deadline=10.0)
    bench.add("b", deadline=10.0)
    bench.step()
    bench.now += 11
    assert bench.schedule() is None
    events = bench.scheduler.events()
    assert bench.names(events) == ["a", "b"]
    assert all(e.finish == "abort" and "deadline of 10.0 s passed" in (e.error or "") for e in events)
    assert bench.allocator.usage().used == 0


def test_siblings_without_a_slot_wait_and_still_come() -> None:
    bench = Bench(seqs=2)
    bench.add("a", n=5, max_tokens=3)
    seen: dict[int, int] = {}
    while bench.scheduler.unfinished:
        for event in bench.step():
            seen[event.sample] = seen.get(event.sample, 0) + len(event.tokens)
    assert seen == dict.fromkeys(range(5), 3)


def test_logits_that_are_not_finite_end_their_own_row_only() -> None:
    """The neighbour continues."""
    bench = Bench(seqs=2)
    bench.add("bad")
    bench.add("good")
    batch = bench.schedule()
    assert batch is not None
    events = {e.request_id: e for e in bench.commit(batch, failed=lambda row: row == 0)}
    assert events["bad"].finish == "error" and events["good"].tokens == [9]
    assert bench.names(bench.step()) == ["good"]


def test_results_out_of_order_are_an_error() -> None:
    bench = Bench()
    bench.add("a")
    first, second = bench.schedule(), bench.schedule()
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="order of submission"):
        bench.commit(second)


def test_two_equal_prompts_in_one_step_do_not_read_what_is_not_written_yet() -> None:
    """The second computes for itself; a third, one step later, hits."""
    bench = Bench(seqs=3)
    params = SamplingParams(max_tokens=5)
    for id in ("a", "b"):
        bench.scheduler.add(Request(id=id, prompt=list(range(9)), params=params))
    batch = bench.schedule()
    assert batch is not None and batch.start.tolist() == [0, 0]
    bench.scheduler.add(Request(id="c", prompt=list(range(9)), params=params))
    later = bench.schedule()
    assert later is not None and 8 in later.start.tolist()
