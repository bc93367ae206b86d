"""ContinuousScheduler: one token budget, computed tokens catch up with known tokens.

Owns every live Sequence, the running set and the waiting queue. There is no prefill
or decode phase: a row has tokens that are known (prompt, sampled, or sampled by a step whose
result is still in flight) and tokens that are computed, and each step computes the difference as
far as the budget goes. Never sees a tensor, never calls a hook, never waits.

The counters of running rows are columns of `running.RunningSet`. A row has work while
computed < min(known, limit - 1).
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import cast

import numpy as np

from octavo.catalog import Options
from octavo.errors import AdmissionRefused
from octavo.interfaces import SchedulerParts
from octavo.request import Batch, EngineStats, Event, FinishReason, Request, Result, TokenLogprobs
from octavo.scheduling.draft import Draft
from octavo.scheduling.gate import Gate
from octavo.scheduling.policies import Order, Queue
from octavo.scheduling.running import RunningSet
from octavo.scheduling.sequence import Sequence, State


class SchedulerOptions(Options):
    """ageing: seconds of waiting that count as one priority level; 0 lets a stream of better
    requests starve a worse one."""

    ageing: float = 60.0


class ContinuousScheduler:
    """interfaces.Scheduler. See the module docstring for the one rule it follows."""

    def __init__(self, options: SchedulerOptions, parts: SchedulerParts) -> None:
        self._options, self._parts = options, parts
        self._allocator, self._limits = parts.allocator, parts.limits
        self._running = RunningSet(parts.limits.max_num_seqs)
        self._order = Order(parts.policy, options.ageing, parts.clock)
        self._queue = Queue(self._order)
        self._gate = Gate(parts, self._queue)
        self._live: dict[str, list[Sequence]] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._submitted: deque[tuple[int, list[Sequence]]] = deque()
        self._notices: list[Event] = []
        self._serial = 0
        self._step = 0
        self._blocked: tuple[Sequence, int] | None = None  # queue head that did not fit, and the blocks there were
        self._stats = EngineStats()

    # ------------------------------------------------------------ requests in

    def add(self, request: Request) -> None:
        limit = len(request.prompt) + cast(int, request.params.max_tokens)
        samples = request.params.samples
        if request.id in self._live:
            raise AdmissionRefused(f"request id {request.id!r} is already running", code="duplicate_id")
        tenant = self._order.shares.of(request.tenant, request.weight)
        self._gate.check(request, tenant, limit, samples)
        now = self._parts.clock()
        self._serial += 1
        prompt = request.tokens()
        base = request.params.seed if request.params.seed is not None else self._parts.seeds()
        sequences = []
        for sample in range(samples):
            key = self._order.key(request.priority, now, self._serial, sample)
            seed = (base + sample) & 0xFFFF_FFFF_FFFF_FFFF
            deadline = None if request.deadline is None else now + request.deadline
            sequences.append(Sequence(request, sample, seed, key, tenant, prompt, limit, deadline, now))
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, id(sequences[-1]), sequences[-1]))
        self._live[request.id] = sequences
        sequences[0].siblings = sequences[1:]
        self._queue.push(sequences[0])
        self._gate.admit(limit, samples)

    def abort(self, request_id: str, sample: int | None = None) -> None:
        for sequence in list(self._live.get(request_id, ())):
            if sample is None or sequence.sample == sample:
                self._finish(sequence)

    # ------------------------------------------------------------ one step out

    def schedule(self) -> Batch | None:
        self._expire()
        draft = Draft(self._limits.max_num_batched_tokens)
        self._schedule_running(draft)
        self._schedule_waiting(draft)
        return self._seal(draft) if draft.rows else None

    def _schedule_running(self, draft: Draft) -> None:
        """Rows with work, decoding rows before prefill chunks, as far as the budget goes."""
        running, sequences = self._running, self._running.sequences
        while sequences:
            slots, work = running.slots, running.work()
            order = self._order.rows(work > 1, running.rank[slots], running.tenant[slots])
            order = order[work[order] > 0]
            work = work[order]
            take = np.clip(draft.budget - (np.cumsum(work) - work), 0, work)
            if not self._parts.chunked_prefill:
                take = np.where(take == work, take, 0)
            order, take = order[take > 0], take[take > 0]
            if not len(order):
                return
            rows = slots[order]
            start = running.computed[rows]
            self._allocator.trim(rows, start)
            if self._allocator.reserve(rows, start, start + take):
                sample = (start + take == running.known[rows]).tolist()
                for at, first, count, sampled in zip(order.tolist(), start.tolist(), take.tolist(), sample, strict=True):
                    draft.add(sequences[at], first, count, sampled)
                return
            self._preempt(sequences[-1], draft)

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admit from the head of the queue; a strictly better priority may take the worst row's place."""
        while (sequence := self._queue.peek()) is not None:
            if sequence.in_flight:
                break  # preempted a moment ago: the token it sampled last is still on its way
            if draft.budget <= 0 and not draft.displace(sequence, self._order):
                break
            if self._admit(sequence, draft):
                continue
            victim = self._running.last
            if victim is None or not self._outranks(sequence, victim):
                break
            self._preempt(victim, draft)
        draft.resume(whole=not self._parts.chunked_prefill)

    def _outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether to preempt: only for a strictly better priority, so that equals never swap places, and only
        if the victim then queues on a worse level, so that it cannot come straight back."""
        better = waiting.request.priority < running.request.priority
        return better and self._order.level(waiting.key[0]) < self._order.level(running.key[0])

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        """Move the queue's head into a slot if slot, blocks and budget allow; else change nothing."""
        slot = self._running.free_slot
        if slot is None:
            return False
        usage = self._allocator.usage()
        available = usage.free + usage.cached
        if self._blocked is not None and self._blocked[0] is sequence and available <= self._blocked[1]:
            return False  # nothing came back since it last did not fit
        tokens = sequence.tokens
        known = len(tokens)
        reuse = sequence.request.params.prompt_logprobs is None or sequence.announced
        salt = self._parts.salt(sequence.limit)
        cached = self._allocator.admit(
            slot, tokens, sequence.request.domain, salt, reuse=reuse, parcel=sequence.parcel, rank=self._worth(sequence)
        )
        take = min(known - cached, draft.budget)
        whole = take == known - cached
        row, start = np.array([slot], np.int32), np.array([cached], np.int64)
        enough = whole or self._parts.chunked_prefill
        if self._running and sequence.parcel is not None and cached < sequence.parcel.computed and not sequence.parcel.lost:
            self._allocator.release(row)  # it waits for room for all of its parcel: others run, and will give some back
            self._blocked = (sequence, available)
            return False
        if not enough or not self._allocator.reserve(row, start, start + take):
            self._allocator.release(row)
            self._blocked = (sequence, available) if enough else None
            return False
        self._blocked = None
        self._queue.pop(sequence)
        self._order.shares.refund(sequence.tenant, max(sequence.charged - cached, 0))
        self._running.enter(sequence, known, cached)
        if sequence.parcel is not None:
            self._stats.swapped_in += cached == sequence.parcel.computed
            self._discard(sequence)
        if sequence.cached < 0:  # the first time: a re-admission after preemption is no new query
            sequence.cached = cached
            sequence.queued = self._parts.clock() - sequence.arrived
            self._stats.prefix_queries += known
            self._stats.prefix_hits += cached
        draft.admitted[slot] = sequence
        draft.add(sequence, cached, take, whole)
        return True

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Give up a running sequence's slot and blocks. It will continue from host memory, where that is worth the
        copies and has room; else it is recomputed (or hits its own blocks)."""
        draft.undo(victim.slot)
        self._leave(victim, swap=True)
        self._queue.push(victim)
        self._stats.preemptions += 1

    def _seal(self, draft: Draft) -> Batch:
        """Turn the draft into an immutable order and move every counter on."""
        sequences, start, take, sample, source = draft.columns()
        for i, parent in enumerate(list(sequences)):
            if sample[i] and parent.siblings:
                for child in self._fork(parent, draft):
                    sequences.append(child)
                    start.append(len(parent.prompt))
                    take.append(0)
                    sample.append(True)
                    source.append(i)
        slots, sampled = np.array([s.slot for s in sequences], np.int32), np.array(sample, bool)
        first, count = np.array(start, np.int64), np.array(take, np.int64)
        self._running.computed[slots] = first + count
        self._running.known[slots] += sampled
        self._order.shares.charge(self._running.tenant[slots], count)
        for sequence, one in zip(sequences, sample, strict=True):
            sequence.in_flight += one
        before = dict(zip(slots.tolist(), start, strict=True)) if draft.admitted else {}  # rows that decode need none
        tables, copies = self._allocator.drain()
        # Published only now: a prompt admitted in this very step must not read what it has yet to write.
        self._allocator.commit(slots, first + count)
        self._step += 1
        self._submitted.append((self._step, sequences))
        batch = Batch(
            step=self._step,
            slots=slots,
            start=first.astype(np.int32),
            num_new=count.astype(np.int32),
            sample=sampled,
            source=np.array(source, np.int32),
            admissions=tuple(s.admission(before[slot]) for slot, s in draft.admitted.items()),
            tables=tables,
            copies=copies,
        )
        self._stats.steps += 1
        self._stats.step_tokens = batch.num_tokens
        return batch

    def _fork(self, parent: Sequence, draft: Draft) -> list[Sequence]:
        """The parent's prompt is complete after this step: its siblings sample their first token from the
        same hidden state and share its blocks. Those that find no slot queue like anybody else."""
        forked = []
        for child in parent.siblings:
            if self._running.free_slot is None:
                self._queue.push(child)
                continue
            slot = self._running.enter(child, len(parent.prompt), len(parent.prompt))
            self._allocator.fork(parent.slot, slot)
            child.cached = parent.cached
            draft.admitted[slot] = child
            forked.append(child)
        parent.siblings = []
        return forked

    # ------------------------------------------------------------ results in

    def commit(self, batch: Batch, result: Result) -> list[Event]:
        events: list[Event] = []
        columns = (batch.sample.tolist(), result.tokens.tolist(), result.counts.tolist(), result.failed.tolist())
        for i, (sequence, sampled, tokens, count, failed) in enumerate(zip(self._take(batch), *columns, strict=True)):
            sequence.in_flight -= sampled
            if sequence.state is State.FINISHED:
                continue
            if i in result.prompt_logprobs:
                sequence.keep_prompt_logprobs(int(batch.start[i]) + 1, result.prompt_logprobs[i])
            if failed:
                reason = result.reasons.get(i, "the model produced logits that are not finite")
                events.append(self._end(sequence, "error", reason))
            elif count:
                events.append(self._append(sequence, tokens[:count], result.logprobs.get(i)))
        return events

    def _take(self, batch: Batch) -> list[Sequence]:
        step, sequences = self._submitted.popleft()
        if step != batch.step:
            raise RuntimeError(f"results must come in the order of submission: expected step {step}, got {batch.step}")
        return sequences

    def _append(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> Event:
        """Append sampled tokens up to the one that ends the sequence."""
        if not sequence.announced:
            self._began(sequence)
        event = sequence.append(tokens, logprobs)
        self._stats.generation_tokens += len(event.tokens)
        if event.finish is not None:
            self._finish(sequence)
        elif sequence.state is State.RUNNING and sequence.known - sequence.extended >= 8:
            self._extend(sequence)
        return event

    def _extend(self, sequence: Sequence) -> None:
        """Tell the allocator of new tokens: in bunches, since only whole blocks are ever published."""
        if sequence.extended < sequence.known:
            new = sequence.output[sequence.extended - len(sequence.prompt) :]
            self._allocator.extend(sequence.slot, np.asarray(new, np.int32))
            sequence.extended = sequence.known

    def _began(self, sequence: Sequence) -> None:
        """Its first event is about to be made: its prompt counts, once for all samples."""
        if sequence.sample == 0:
            self._stats.prompt_tokens += len(sequence.prompt)

    def _end(self, sequence: Sequence, finish: FinishReason, error: str) -> Event:
        if not sequence.announced:
            self._began(sequence)
        event = sequence.event()
        event.finish, event.error = finish, error
        self._finish(sequence)
        return event

    def fail(self, batch: Batch, message: str) -> list[Event]:
        events = []
        sampled = batch.sample.tolist()
        for i, sequence in enumerate(self._take(batch)):
            sequence.in_flight -= sampled[i]
            if sequence.state is State.RUNNING:
                self._allocator.withdraw(np.array([sequence.slot], np.int32), batch.start[i : i + 1].astype(np.int64))
                computed = self._running.computed
                computed[sequence.slot] = min(computed[sequence.slot], int(batch.start[i]))
            if sequence.state is not State.FINISHED:
                events.append(self._end(sequence, "error", message))
        # Rows that left their slot while the step was in flight have published blocks that it never wrote.
        self._allocator.reset()
        return events

    def events(self) -> list[Event]:
        notices, self._notices = self._notices, []
        return notices

    # ------------------------------------------------------------ leaving

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._parts.clock():
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is not State.FINISHED:
                self._notices.append(self._end(sequence, "abort", f"the deadline of {sequence.request.deadline} s passed"))

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence in any state. Its slot and blocks come back at once: a step in flight may still
        touch them, and whoever gets them next is computed after it on the same stream."""
        if sequence.state is State.FINISHED:
            return
        state, sequence.state = sequence.state, State.FINISHED
        live = self._live[sequence.request.id]
        live.remove(sequence)
        if state is State.RUNNING:
            self._leave(sequence)
        elif state is State.WAITING:
            self._queue.discard(sequence)
            self._discard(sequence)
        else:
            for other in live:
                if sequence in other.siblings:
                    other.siblings.remove(sequence)
        for sibling in sequence.siblings:  # it will not compute their prompt: they do it themselves
            self._queue.push(sibling)
        sequence.siblings = []
        self._gate.release(sequence.limit)
        if not live:
            del self._live[sequence.request.id]

    def _leave(self, sequence: Sequence, *, swap: bool = False) -> None:
        """Take a sequence out of its slot. What it computed stays in the prefix cache, and with `swap` in host
        memory if that pays."""
        slot = sequence.slot
        row = np.array([slot], np.int32)
        computed = int(self._running.computed[slot])
        sequence.charged = max(sequence.charged, computed)
        self._extend(sequence)
        self._allocator.commit(row, self._running.computed[row])
        if swap and computed and self._parts.swap_pays(computed, self._allocator.blocks(computed)):
            sequence.parcel = self._allocator.swap_out(slot)
            self._stats.swapped_out += sequence.parcel is not None
        if sequence.parcel is None:
            self._allocator.release(row)
        self._running.leave(sequence)

    def _discard(self, sequence: Sequence) -> None:
        if sequence.parcel is not None:
            self._allocator.discard(sequence.parcel)
            sequence.parcel = None

    def _worth(self, sequence: Sequence) -> int:
        """The rank of its prefixes when blocks are evicted: what is urgent stays longer than what is not."""
        priority = sequence.request.priority if self._parts.policy == "priority" else 0
        return 0 if priority == 0 else 1 if priority < 0 else 2

    # ------------------------------------------------------------ what others may ask

    @property
    def unfinished(self) -> bool:
        return bool(self._live)

    def stats(self) -> EngineStats:
        usage, stats = self._allocator.usage(), self._stats
        stats.total_blocks, stats.cached_blocks, stats.pinned_blocks = usage.total, usage.cached, usage.pinned
        stats.running, stats.waiting = len(self._running), len(self._queue)
        stats.free_blocks = usage.free + usage.cached
        stats.kv_usage = usage.used / usage.total if usage.total else 0.0
        return stats
