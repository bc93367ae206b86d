"""ModelTable, Split and Supervisor without engines: names, turns, leases, restarts and their order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.engine.models import ModelTable, beside, successor
from octavo.engine.split import Split
from octavo.engine.supervisor import Backoff, Supervisor
from octavo.errors import AdmissionRefused, ConfigError, EngineDead, LoadError, UnknownModel
from octavo.request import EngineStats

CONFIG = EngineConfig(model="/m")


class Engine:
    """Stands for an AsyncLLM: it lives until it is killed or ended."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.alive, self.dead_reason = config, True, None
        self.died = asyncio.Event()
        self.ended = False
        self.explain: dict[str, Any] = {}
        self.pid = None
        self.stats = EngineStats(total_blocks=100)
        self.sizes: list[int | None] = []

    def kill(self) -> None:
        self.alive, self.dead_reason = False, "killed"  # type: ignore[assignment]
        self.died.set()

    async def end(self, *, grace: float = 0.0) -> None:
        self.alive, self.ended = False, True

    async def drain(self, timeout: float) -> None:
        self.drained = timeout

    async def resize_cache(self, blocks: int | None, *, rest: bool = False) -> int:
        self.sizes.append(blocks)
        return 30


class Engines:
    """The `start` of a table: keeps what it started, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.started: list[Engine] = []
        self.failures = 0

    async def __call__(self, config: EngineConfig, **_: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise LoadError("the file is broken")
        self.started.append(Engine(config))
        return self.started[-1]


def run(body: Callable[[ModelTable, Engines], Awaitable[None]]) -> None:
    async def go() -> None:
        engines = Engines()
        await asyncio.wait_for(body(ModelTable(engines), engines), 10)

    asyncio.run(go())


# ------------------------------------------------------------------ names


def test_the_first_model_is_the_default_until_another_is_set() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        with pytest.raises(UnknownModel):
            table.lease()
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        assert table.names == ["a", "b"] and table.lease().model.name == "a"
        table.set_default("b")
        assert table.lease().model.name == "b" and table.lease("a").model.name == "a"
        with pytest.raises(UnknownModel, match="did you mean 'a'"):
            table.lease("aa")
        with pytest.raises(UnknownModel):
            table.set_default("c")
        with pytest.raises(ConfigError, match="taken"):
            await table.add("a", CONFIG)

    run(body)


def test_a_model_that_does_not_load_leaves_no_trace() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        await table.add("a", CONFIG, warm=False)
        engines.failures = 2
        with pytest.raises(LoadError):
            await table.add("b", CONFIG)
        with pytest.raises(LoadError):
            await table.replace("a", CONFIG)
        assert table.names == ["a"] and table.lease("a").llm is engines.started[0] and len(engines.started) == 1  # type: ignore[comparison-overlap]

    run(body)


def test_while_a_model_loads_requests_for_it_are_told_to_wait_and_the_others_are_served() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        await table.add("a", CONFIG, warm=False)
        table.declare("b", CONFIG)
        with pytest.raises(AdmissionRefused) as refused:
            table.lease("b")
        assert refused.value.code == "loading" and refused.value.retry_after
        assert table.lease("a")

    run(body)


def test_a_replaced_engine_ends_when_its_last_request_has_and_not_before() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        await table.add("a", CONFIG, warm=False)
        lease = table.lease("a")
        new = await table.replace("a", CONFIG, warm=False, timeout=10)
        old = engines.started[0]
        assert table.lease("a").llm is engines.started[1] and new.generation > lease.model.generation  # type: ignore[comparison-overlap]
        await asyncio.sleep(0.05)
        assert not old.ended and table.leaving == [lease.model]
        lease.release()
        lease.release()  # idempotent
        await asyncio.sleep(0.05)
        assert old.ended and not table.leaving and not engines.started[1].ended

    run(body)


def test_a_replacement_that_makes_room_shrinks_the_old_cache_first_and_grows_its_own_when_the_old_one_is_gone() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        elastic = EngineConfig(model="/m", dynamic_memory=True)
        await table.add("a", elastic, warm=False)
        lease = table.lease("a")
        await table.replace("a", elastic, warm=False, make_room=True)
        old, new = engines.started
        await asyncio.sleep(0.05)
        assert old.sizes == [1] and new.sizes == []  # the old one still has a request
        lease.release()
        await asyncio.sleep(0.05)
        assert old.ended and new.sizes == [None]
        engines.failures = 1
        with pytest.raises(LoadError):
            await table.replace("a", elastic, warm=False, make_room=True)
        assert new.sizes == [None, 1, 100]  # it has its cache back
        with pytest.raises(ConfigError, match="dynamic-memory"):
            await table.replace("a", CONFIG, warm=False, make_room=True)

    run(body)


def test_what_outlasts_the_timeout_is_cut_before_the_engine_ends() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        lease = table.lease("b")
        removal = asyncio.create_task(table.remove("b", 0.05))
        await asyncio.sleep(0.2)
        assert engines.started[1].drained == 0.0 and not engines.started[1].ended  # told, and given a moment to say so
        lease.release()
        await removal
        assert engines.started[1].ended and table.names == ["a"]

    run(body)


def test_what_requests_are_sent_to_cannot_be_taken_away() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        table.set_alias("prod", {"b": 1})
        for name, why in (("a", "default"), ("b", "alias 'prod'")):
            for taking in (table.remove(name, 0), table.drain(name, 0)):
                with pytest.raises(ConfigError, match=why):
                    await taking
        table.set_default("prod")
        with pytest.raises(ConfigError, match="default"):
            table.drop_alias("prod")
        assert table.lease().model.name == "b"
        with pytest.raises(ConfigError, match="a model has this name"):
            table.set_alias("a", {"b": 1})

    run(body)


def test_an_alias_passes_over_a_target_that_is_down() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        table.set_alias("prod", {"a": 1, "b": 1})
        engines.started[1].kill()
        assert {table.lease("prod").model.name for _ in range(6)} == {"a"} and table.takes("prod")
        engines.started[0].kill()
        assert not table.takes("prod")
        with pytest.raises(EngineDead):
            table.lease("prod")

    run(body)


def test_an_engine_is_told_of_memory_that_others_were_promised_and_do_not_hold_yet() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        await table.add("a", CONFIG, warm=False)
        engines.started[0].explain = {"device": {"type": "cpu"}, "model": {"weight_bytes": 30}, "kv_cache": {"bytes": 12}}
        await table.add("b", CONFIG, warm=False)
        assert engines.started[1].config.reserved_memory_bytes == 42

    run(body)


# ------------------------------------------------------------------ configuration of further models


def test_a_further_model_takes_the_machine_and_the_scheduler_over_and_no_size_or_model_setting() -> None:
    base = EngineConfig(model="/a", num_threads=2, max_num_seqs=9, max_model_len=77, num_gpu_blocks=5, quantization="awq")
    config = beside(base, "/b", {"max_num_seqs": 3})
    assert (config.model, config.num_threads, config.max_num_seqs) == ("/b", 2, 3)
    assert config.max_model_len is config.num_gpu_blocks is config.quantization is None
    with pytest.raises(ConfigError, match="max_num_seqs"):
        beside(base, "/b", {"max_num_seqs": 0})


def test_a_model_that_takes_a_name_over_keeps_every_setting_that_is_not_given() -> None:
    base = EngineConfig(model="/a", max_model_len=77, num_gpu_blocks=5)
    config = successor(base, "/b", {"num_gpu_blocks": 6})
    assert (config.model, config.max_model_len, config.num_gpu_blocks) == ("/b", 77, 6)
    of_hub = EngineConfig(model="owner/name", revision="v1")
    assert (successor(of_hub, "owner/name", {}).revision, successor(of_hub, "/b", {}).revision) == ("v1", None)


# ------------------------------------------------------------------ turns


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1))
def test_turns_are_in_exact_proportion_in_every_round(weights: dict[str, int]) -> None:
    split = Split({name: float(weight) for name, weight in weights.items()})
    for _ in range(3):
        assert Counter(split.next(lambda _: True) for _ in range(sum(weights.values()))) == weights


def test_a_weight_of_nothing_gets_nothing() -> None:
    split = Split({"a": 0.9, "b": 0.1, "c": 0})
    assert Counter(split.next(lambda _: True) for _ in range(100)) == {"a": 90, "b": 10}
    assert split.next(lambda _: False) == "a"  # whose refusal is then the answer


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": float("nan")}, {"a": True}, {"a": "1"}])
def test_weights_that_are_no_proportion_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError):
        Split(weights)


# ------------------------------------------------------------------ restarts

FAST = Backoff(attempts=3, first=0.01, longest=0.02)


def test_a_crashed_engine_is_started_again_as_a_new_load() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, FAST)
        model = await table.add("a", CONFIG, warm=False)
        generation = model.generation
        engines.started[0].kill()
        with pytest.raises(EngineDead):
            table.lease("a")
        await asyncio.sleep(0.005)
        with pytest.raises(AdmissionRefused) as refused:
            table.lease("a")
        assert refused.value.code == "restarting"
        await asyncio.sleep(0.1)
        assert table.lease("a").llm is engines.started[1]  # type: ignore[comparison-overlap]
        assert model.restarts == 1 and model.generation > generation and engines.started[0].ended
        await supervisor.close()

    run(body)


def test_an_engine_that_keeps_crashing_is_given_up() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, FAST)
        model = await table.add("a", CONFIG, warm=False)
        for crash in range(4):
            engines.started[crash].kill()
            await asyncio.sleep(0.1)
        assert len(engines.started) == 4 and model.state == "dead" and model.restarts == 3
        with pytest.raises(EngineDead, match="killed"):
            table.lease("a")
        await supervisor.close()

    run(body)


def test_starts_that_fail_count_as_crashes_and_say_why() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, FAST)
        model = await table.add("a", CONFIG, warm=False)
        engines.failures = 9
        engines.started[0].kill()
        await asyncio.sleep(0.2)
        assert model.state == "dead" and model.restarts == 3 and "the file is broken" in str(model.error)
        await supervisor.close()

    run(body)


def test_an_engine_that_was_steady_has_earned_a_new_count() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, Backoff(attempts=1, first=0.01, steady=0.05))
        model = await table.add("a", CONFIG, warm=False)
        for crash in range(3):
            await asyncio.sleep(0.1)
            engines.started[crash].kill()
        await asyncio.sleep(0.1)
        assert model.state == "serving" and len(engines.started) == 4
        await supervisor.close()

    run(body)


def test_a_model_that_is_removed_while_it_waits_to_start_again_stays_away() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, Backoff(attempts=3, first=0.1))
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        engines.started[1].kill()
        await asyncio.sleep(0.02)
        await table.remove("b", 0)
        await asyncio.sleep(0.25)
        assert table.names == ["a"] and all(e.ended for e in engines.started[1:])
        await supervisor.close()

    run(body)


def test_an_engine_that_dies_while_it_is_drained_is_not_started_again_and_cannot_be_resumed() -> None:
    async def body(table: ModelTable, engines: Engines) -> None:
        supervisor = Supervisor(table, FAST)
        for name in "ab":
            await table.add(name, CONFIG, warm=False)
        assert await table.drain("b", 1)
        table.resume("b")
        await table.drain("b", 1)
        engines.started[1].kill()
        await asyncio.sleep(0.1)
        assert len(engines.started) == 2
        with pytest.raises(ConfigError, match="died"):
            table.resume("b")
        await table.remove("b", 0)
        await supervisor.close()

    run(body)


def test_the_wait_doubles_up_to_its_longest() -> None:
    backoff = Backoff(first=1, longest=5)
    assert [backoff.delay(n) for n in range(5)] == [1, 2, 4, 5, 5]
