"""AsyncLLM with more than one model: the script that adds one, makes it the default and takes the first away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from octavo import AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError, UnknownModel

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def engines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "octavo.engine.process" in " ".join(child.cmdline())]


async def text(llm: AsyncLLM, model: str | None = None) -> str:
    last = [output async for output in llm.generate("hello world", GREEDY, model=model)][-1]
    assert last.finished
    return last.outputs[0].text


def test_a_model_is_added_made_the_default_and_outlives_the_first(tiny: Path, tiny1: Path, tmp_path: Path) -> None:
    async def body() -> None:
        llm = await AsyncLLM.start(EngineConfig(model=str(tiny), dtype="float32", max_model_len=128, num_threads=1))
        try:
            old = await text(llm)
            with pytest.raises(ConfigError, match="add_model"):
                await text(llm, "second")
            with pytest.raises(LoadError):
                await llm.add_model("second", str(tmp_path / "nowhere"))
            await llm.add_model("second", str(tiny1), max_model_len=96)
            assert llm.models == [str(tiny), "second"] and len(engines()) == 2
            new = await text(llm, "second")
            assert new != old == await text(llm)

            running = aiter(llm.generate("hello world", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
            first = await anext(running)
            llm.set_default_model("second")
            assert await text(llm) == new and await text(llm, str(tiny)) == old
            removal = asyncio.create_task(llm.remove_model(str(tiny)))
            last = [output async for output in running][-1]  # it finishes on the model where it began
            assert last.finished and last.outputs[0].text.startswith(first.outputs[0].text)
            await removal
            assert len(engines()) == 1 and llm.models == ["second"] and await text(llm) == new
            with pytest.raises(UnknownModel):
                await text(llm, str(tiny))
        finally:
            await llm.close()
        assert not engines()

    asyncio.run(asyncio.wait_for(body(), 120))
