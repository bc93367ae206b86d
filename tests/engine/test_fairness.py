"""Tenants beside each other and beside priorities: the scheduler with a real allocator and made-up results.

What is owed to whom is counted here, from the batches, and never read from the scheduler's own counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.errors import AdmissionRefused
from octavo.request import Batch
from octavo.scheduling.scheduler import SchedulerOptions

from tests.engine.test_scheduler import Bench


class Shared(Bench):
    """A bench that also counts, per tenant, the tokens of every batch. Request names are `tenant:anything`."""

    def __init__(self, **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]
        self.served: Counter[str] = Counter()
        self.first_step: dict[str, int] = {}  # request -> step of its first token
        self.steps = 0

    def ask(self, name: str, **fields: object) -> None:
        self.add(name, tenant=name.partition(":")[0], **fields)  # type: ignore[arg-type]

    def turn(self) -> Batch | None:
        batch = self.schedule()
        self.steps += 1
        if batch is None:
            return None
        for slot, count in zip(batch.slots.tolist(), batch.num_new.tolist(), strict=True):
            self.served[self.tenant_of(slot)] += count
        for event in self.commit(batch):
            self.first_step.setdefault(event.request_id, self.steps)
        return batch

    def tenant_of(self, slot: int) -> str:
        running = {s.slot: s for s in self.scheduler._running}
        return running[slot].request.tenant

    def finish(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.unfinished:
                return
            self.turn()
        raise AssertionError(f"still running after {most} steps")


def test_one_tenant_alone_is_served_in_the_order_of_arrival() -> None:
    bench = Shared(seqs=1)
    for name in ("a:1", "a:2", "a:3"):
        bench.ask(name, max_tokens=3)
    bench.finish()
    assert sorted(bench.first_step, key=bench.first_step.__getitem__) == ["a:1", "a:2", "a:3"]


def test_a_tenant_with_one_request_does_not_wait_for_anothers_hundred() -> None:
    bench = Shared(seqs=1)
    for i in range(100):
        bench.ask(f"flood:{i}", max_tokens=2)
    bench.turn()
    bench.ask("small:1", max_tokens=2)
    bench.finish()
    before = sum(step < bench.first_step["small:1"] for name, step in bench.first_step.items() if name.startswith("flood"))
    assert before <= 2  # the one that ran, and at most one more while the counters were level


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
def test_tenants_with_endless_work_share_by_weight(weight: float) -> None:
    bench = Shared(seqs=4, blocks=256)
    for i in range(150):
        bench.ask(f"light:{i}", max_tokens=4, weight=1.0)
        bench.ask(f"heavy:{i}", max_tokens=4, weight=weight)
    while min(sum(s.request.tenant == t for s in bench.scheduler._queue) for t in ("light", "heavy")) > 0:
        bench.turn()
    assert bench.served["heavy"] / bench.served["light"] == pytest.approx(weight, rel=0.15)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    bench = Shared(seqs=1, blocks=256)
    bench.ask("late:0", max_tokens=1)
    for i in range(100):
        bench.ask(f"busy:{i}", max_tokens=4)
    for _ in range(200):
        bench.turn()
    for i in range(20):
        bench.ask(f"late:{i + 1}", max_tokens=4)
    bench.served.clear()
    for _ in range(60):
        bench.turn()
    assert bench.served["late"] == pytest.approx(bench.served["busy"], rel=0.3)


def test_a_tenant_whose_requests_all_run_has_saved_nothing_up_either() -> None:
    """`busy` is served alone, with nothing waiting; a newcomer stands where busy stands now."""
    bench = Shared(seqs=2, blocks=256)
    bench.ask("late:0", max_tokens=1)
    bench.ask("busy:0", max_tokens=200)
    for _ in range(150):
        bench.turn()
    for i in range(30):
        bench.ask(f"late:{i + 1}", max_tokens=4)
        bench.ask(f"busy:{i + 1}", max_tokens=4)
    starts = []
    while bench.scheduler.unfinished:
        bench.turn()
        starts = [n.partition(":")[0] for n, _ in sorted(bench.first_step.items(), key=lambda item: item[1])]
    first = Counter(starts[2:22])
    assert min(first["late"], first["busy"]) >= 5


def test_a_long_prompt_holds_up_no_other_tenant() -> None:
    """Chunks of one tenant's prompt and another's request take turns, token by token, not prompt by prompt."""
    bench = Shared(seqs=4, budget=16, blocks=512, block_size=4)
    bench.ask("long:1", prompt=320, max_tokens=1)  # twenty steps of its own
    for _ in range(3):
        bench.turn()
    bench.ask("short:1", prompt=8, max_tokens=1)
    asked = bench.steps
    bench.finish()
    assert bench.first_step["short:1"] - asked <= 2
    assert bench.first_step["long:1"] <= 22, "the chunk that made room took what was left of the step"


def test_two_long_prompts_of_two_tenants_are_read_side_by_side() -> None:
    bench = Shared(seqs=4, budget=16, blocks=512)
    bench.ask("a:1", prompt=160, max_tokens=1)
    bench.ask("b:1", prompt=160, max_tokens=1)
    for _ in range(10):
        bench.turn()
    assert bench.served["a"] == pytest.approx(bench.served["b"], abs=16)


def test_within_one_tenant_prompts_are_read_one_after_the_other() -> None:
    bench = Shared(seqs=4, budget=16, blocks=512)
    bench.ask("b:0", max_tokens=1)  # a second tenant exists
    for name in ("a:1", "a:2"):
        bench.ask(name, prompt=64, max_tokens=1)
    bench.finish()
    assert bench.first_step["a:2"] - bench.first_step["a:1"] >= 3


def test_a_better_priority_does_not_wait_for_the_rest_of_a_worse_prompt() -> None:
    bench = Shared(seqs=4, budget=16, blocks=512, policy="priority")
    bench.ask("t:slow", prompt=320, max_tokens=1, priority=5)
    for _ in range(3):
        bench.turn()
    bench.ask("t:vip", prompt=8, max_tokens=1, priority=0)
    asked = bench.steps
    bench.turn()
    assert bench.first_step.get("t:vip") == asked + 1
    assert bench.scheduler.stats().preemptions == 0, "the prompt gave up a step's budget, not its blocks"
    bench.finish()


def test_priority_stands_above_fair_share() -> None:
    """The tenant that had much less still waits while another has better requests."""
    bench = Shared(seqs=1, policy="priority", options=SchedulerOptions(ageing=0))
    for i in range(10):
        bench.ask(f"first:{i}", max_tokens=2, priority=0)
    bench.ask("second:0", max_tokens=2, priority=1)
    bench.finish()
    assert bench.first_step["second:0"] == max(bench.first_step.values())


def test_a_level_of_priority_is_shared_by_weight() -> None:
    bench = Shared(seqs=2, blocks=256, policy="priority")
    for i in range(60):
        bench.ask(f"a:{i}", max_tokens=4, priority=3)
        bench.ask(f"b:{i}", max_tokens=4, priority=3, weight=2.0)
    for _ in range(100):
        bench.turn()
    assert bench.served["b"] / bench.served["a"] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(("priority", "ageing"), [(1, 10.0), (4, 5.0)])
def test_waiting_makes_up_for_a_worse_priority(priority: int, ageing: float) -> None:
    """A stream of better requests that alone fills the engine holds a worse one up for `priority * ageing` seconds,
    and one request of each tenant more."""
    bench = Shared(seqs=1, policy="priority", options=SchedulerOptions(ageing=ageing))
    bench.ask("poor:1", max_tokens=1, priority=priority)
    began, length = bench.now, 4
    while "poor:1" not in bench.first_step:
        while len(bench.scheduler._queue) < 3:
            bench.ask(f"rich:{bench.steps}-{len(bench.scheduler._queue)}", max_tokens=length, priority=0)
        bench.now += 0.5
        bench.turn()
        assert bench.now - began < priority * ageing + 3 * length, "starved"
    assert bench.now - began > (priority - 1) * ageing, "and it did not jump the queue either"


def test_recomputing_after_a_preemption_is_not_charged_twice() -> None:
    bench = Shared(seqs=1, policy="priority", prefix_caching=False, options=SchedulerOptions(ageing=0))
    bench.ask("other:0", max_tokens=1, priority=9)
    bench.ask("victim:1", prompt=40, max_tokens=20, priority=9)
    for _ in range(10):
        bench.turn()
    bench.ask("other:vip", prompt=4, max_tokens=1, priority=0)
    bench.finish()
    assert bench.scheduler.stats().preemptions == 1
    shares = bench.scheduler._order.shares
    known = 40 + 20 - 1  # the last token is never computed
    assert shares.served[shares.of("victim", 1.0)] == known < bench.served["victim"]


def test_a_full_queue_still_takes_a_tenant_that_holds_less_than_its_share() -> None:
    bench = Shared(seqs=1, max_queued=10)
    taken: Counter[str] = Counter()

    def offer(tenant: str, count: int) -> None:
        for i in range(count):
            try:
                bench.ask(f"{tenant}:{i}")
                taken[tenant] += 1
            except AdmissionRefused as refusal:
                assert refusal.code == "queue_full"

    offer("flood", 50)
    offer("second", 50)
    offer("third", 50)
    assert taken["flood"] == 10
    assert taken["second"] == 5, "half of the queue, beside one other tenant"
    assert taken["third"] == 3
    assert len(bench.scheduler._queue) <= 20


def test_a_tenants_place_in_the_queue_follows_its_weight() -> None:
    bench = Shared(seqs=1, max_queued=12)
    for i in range(12):
        bench.ask(f"flood:{i}")
    with pytest.raises(AdmissionRefused):
        for i in range(12):
            bench.ask(f"heavy:{i}", weight=3.0)
    assert sum(s.request.tenant == "heavy" for s in bench.scheduler._queue) == 9


# ------------------------------------------------------------------ whatever comes

requests = st.tuples(
    st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3), st.booleans()
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=40),
    st.sampled_from(["fcfs", "priority"]),
    st.integers(1, 5),
    st.integers(8, 40),
    st.integers(16, 64),
)
def test_whatever_comes_everybody_ends_and_everything_comes_back(
    asked: list[tuple[str, int, int, int, int, bool]], policy: str, seqs: int, budget: int, blocks: int
) -> None:
    """Random tenants, lengths, priorities, gaps and aborts under memory pressure: the allocator's invariants hold after
    every step (the bench checks them), every request ends, and every block is free again."""
    bench = Shared(seqs=seqs, budget=budget, blocks=blocks, policy=policy)
    expected: dict[str, int] = {}
    got: Counter[str] = Counter()
    for i, (tenant, prompt, most, priority, gap, drop) in enumerate(asked):
        name = f"{tenant}:{i}"
        bench.ask(name, prompt=prompt, max_tokens=most, priority=priority, weight=1.0 + ord(tenant) - ord("a"))
        expected[name] = most
        for _ in range(gap):
            for event in bench.step():
                got[event.request_id] += len(event.tokens)
        if drop:
            bench.scheduler.abort(name)
            del expected[name]
    for _ in range(5000):
        if not bench.scheduler.unfinished:
            break
        for event in bench.step():
            got[event.request_id] += len(event.tokens)
    assert not bench.scheduler.unfinished
    assert {name: got[name] for name in expected} == expected
    assert bench.allocator.usage().used == 0 and len(bench.scheduler._queue) == 0


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.floats(0.5, 8.0), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 16)), min_size=8, max_size=8),
    st.integers(1, 6),
    st.integers(8, 64),
)
def test_two_tenants_that_both_wait_never_drift_apart(
    weights: list[float], shapes: list[tuple[int, int]], seqs: int, budget: int
) -> None:
    """The bound of virtual token counters: while both have requests waiting, what two tenants have had, over their weights,
    differs by no more than what can be in flight at once."""
    bench = Shared(seqs=seqs, budget=budget, blocks=1024)
    names = [f"t{i}" for i in range(len(weights))]
    for i in range(25):
        for j, name in enumerate(names):
            prompt, most = shapes[(i + j) % len(shapes)]
            bench.ask(f"{name}:{i}", prompt=prompt, max_tokens=most, weight=weights[j])
    longest = max(prompt + most for prompt, most in shapes)
    bound = 2 * (budget + seqs * longest) / min(weights)
    waiting: dict[str, int] = defaultdict(int)
    while True:
        bench.turn()
        waiting.clear()
        for sequence in bench.scheduler._queue:
            waiting[sequence.request.tenant] += 1
        if len(waiting) < len(names):
            break
        shares = [bench.served[name] / weight for name, weight in zip(names, weights, strict=True)]
        assert max(shares) - min(shares) <= bound
