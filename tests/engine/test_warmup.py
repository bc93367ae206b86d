"""The warm-up of an engine: it runs what clients would be the first to run, and leaves no trace in what they see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from octavo import AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import warmup
from octavo.engine.models import ModelTable
from octavo.engine.totals import TOTALS
from octavo.engine.warmup import WARM_ROWS, _ids, warm_up
from octavo.errors import EngineDead

Body = Callable[[AsyncLLM], Coroutine[Any, Any, Any]]


def served(path: Path, body: Body, *, warm: bool = True, **settings: Any) -> Any:
    """`body` of an engine that a table has loaded, with a warm-up or without."""

    async def run() -> Any:
        table = ModelTable()
        try:
            config = EngineConfig(model=str(path), dtype="float32", num_threads=1, block_size=16, **settings)
            model = await table.add("m", config, warm=warm)
            return await body(model.llm)
        finally:
            await table.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


async def answer(llm: AsyncLLM, prompt: Any, **params: Any) -> Any:
    return [output async for output in llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True, **params))][-1]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a warm-up does on a GPU, on whatever device there is."""
    monkeypatch.setattr(warmup, "_on_gpu", lambda llm: True)


def test_what_a_warm_up_did_counts_nowhere_and_no_request_finds_its_prompts(tiny1: Path, as_on_a_gpu: None) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert {name: getattr(llm.stats, name) for name in TOTALS} == dict.fromkeys(TOTALS, 0)
        prompt = _ids(llm, 100)
        output = await answer(llm, prompt)
        assert output.num_cached_tokens == 0
        stats, cache = llm.stats, await llm.prefix_cache()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.prefix_queries) == (100, 8, 100)
        assert (cache["prefix_queries"], cache["prefix_hits"], cache["hit_rate"]) == (100, 0, 0.0)
        assert (await answer(llm, prompt)).num_cached_tokens > 0  # its own
        assert llm.stats.prefix_hits == (await llm.prefix_cache())["prefix_hits"] > 0

    served(tiny1, body, num_gpu_blocks_override=400)


def test_unseeded_requests_draw_what_they_would_have_drawn_without_it(tiny1: Path, as_on_a_gpu: None) -> None:
    async def body(llm: AsyncLLM) -> list[list[int]]:
        return [(await answer(llm, "hello world", temperature=1.0)).outputs[0].token_ids for _ in range(3)]

    warmed, cold = (served(tiny1, body, warm=warm, seed=5, num_gpu_blocks_override=400) for warm in (True, False))
    assert warmed == cold


def test_on_a_gpu_it_decodes_in_every_size_and_computes_prompts_beside_rows(tiny1: Path, as_on_a_gpu: None) -> None:
    async def body(llm: AsyncLLM) -> None:
        rows: set[int] = set()
        prompts: list[tuple[int, int]] = []
        llm.on_events(lambda events, stats: rows.add(stats.running))
        llm.on_events(lambda events, stats: prompts.append((stats.step_tokens, stats.running)))
        told: list[tuple[int, int]] = []
        await warm_up(llm, on_progress=lambda progress: told.append((progress.done, progress.total)))
        assert {*WARM_ROWS} <= rows
        assert any(tokens > running > 8 for tokens, running in prompts)  # eight rows decode beside a prompt
        assert max(running for tokens, running in prompts if tokens > 256) > 10  # and beside several prompts at once
        assert told == [(i, len(told)) for i in range(len(told))]

    served(tiny1, body, warm=False, max_num_seqs=64, num_gpu_blocks_override=800)


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"max_model_len": 16}, {"num_gpu_blocks": 2}, {"num_gpu_blocks_override": 2}]
)
def test_an_engine_that_is_small_in_some_way_is_warmed_as_far_as_it_goes(
    tiny1: Path, as_on_a_gpu: None, settings: dict[str, int]
) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert (await answer(llm, "hi")).finished

    served(tiny1, body, **{"max_model_len": 32, **settings})


def test_an_engine_whose_warm_up_fails_gets_no_name_and_is_ended(tiny1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(llm: AsyncLLM) -> Any:
        raise EngineDead("in the warm-up")

    monkeypatch.setattr(warmup, "_work", fail)

    async def run() -> None:
        table = ModelTable()
        config = EngineConfig(model=str(tiny1), dtype="float32", num_threads=1, max_model_len=64)
        with pytest.raises(EngineDead, match="in the warm-up"):
            await table.add("m", config)
        assert not table.models

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not [child for child in psutil.Process().children() if "octavo.engine.process" in " ".join(child.cmdline())]
