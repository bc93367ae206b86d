"""AsyncLLM over an engine in its own process: streams, aborts, death, and starts that fail. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.client import EngineProcess
from octavo.errors import Aborted, AdmissionRefused, ConfigError, EngineDead, LoadError, PluginError, RequestError
from octavo.request import SamplingParams
from octavo.text.output import RequestOutput

LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), **{"dtype": "float32", "num_threads": 1, "max_model_len": 256, **options})


def with_llm(path: Path, body: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    """Run `body` on a started AsyncLLM, close it, and demand that no engine process is left."""

    async def main() -> None:
        llm = await AsyncLLM.start(config(path, **options))
        pid = llm._engine.pid
        try:
            await asyncio.wait_for(body(llm), 60)
        finally:
            await llm.close()
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [item async for item in stream]


async def until_idle(llm: AsyncLLM) -> None:
    """At most a second until nothing runs or waits and every block is back."""
    for _ in range(100):
        if llm.stats.running == 0 and llm.stats.waiting == 0 and llm.stats.free_blocks == llm.info.num_blocks:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not idle after a second: {llm.stats}")


def test_streamed_deltas_join_to_what_a_whole_answer_holds(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        whole = (await collect(llm.generate("hello world", params)))[-1]
        parts = await collect(llm.generate("hello world", params, delta=True))
        assert "".join(p.outputs[0].text for p in parts) == whole.outputs[0].text
        assert [t for p in parts for t in p.outputs[0].token_ids] == list(whole.outputs[0].token_ids)
        assert parts[-1].finished and parts[-1].outputs[0].finish_reason == "length"

    with_llm(tiny, body)


def test_many_streams_at_once_each_get_their_own_text_and_id(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        prompts = [f"page {i} of the model" for i in range(20)]
        together = await asyncio.gather(*(collect(llm.generate(p, params, f"id-{i}", 0)) for i, p in enumerate(prompts)))
        for i, prompt in enumerate(prompts):
            alone = await collect(llm.generate(prompt, params))
            assert together[i][-1].outputs[0].text == alone[-1].outputs[0].text
            assert together[i][-1].request_id == f"id-{i}"
        await until_idle(llm)

    with_llm(tiny, body)


def test_closing_a_stream_in_any_state_frees_its_blocks(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        async def leave_after(items: int) -> None:
            stream = llm.generate([9, 10, 11] * 10, LONG)
            for _ in range(items):
                await anext(stream)
            await stream.aclose()

        async def leave_before_the_first() -> None:
            stream = llm.generate([9, 10, 11] * 10, LONG)
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()

        undisturbed = asyncio.create_task(collect(llm.generate("hello", LONG)))
        for _ in range(10):
            await asyncio.gather(*(leave_after(i % 4 + 1) for i in range(8)), *(leave_before_the_first() for _ in range(4)))
        assert len((await undisturbed)[-1].outputs[0].token_ids) == 200
        await until_idle(llm)

    with_llm(tiny, body, max_num_seqs=4)


def test_an_abort_ends_the_requests_of_that_id_and_no_others(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        named = [llm.generate("hello", LONG, "twice"), llm.generate("hello", LONG, "twice")]
        own = llm.generate("hello", LONG)
        firsts = [await anext(stream) for stream in (*named, own)]
        others = asyncio.create_task(collect(llm.generate("hello", LONG, "another")))
        await llm.abort("nobody's")
        await llm.abort("twice")
        await llm.abort(firsts[-1].request_id)
        for stream in (*named, own):
            with pytest.raises(Aborted, match="was aborted"):
                await collect(stream)
        assert len((await others)[-1].outputs[0].token_ids) == 200
        await until_idle(llm)

    with_llm(tiny, body)


def test_a_killed_engine_ends_every_request_with_an_error_and_nothing_hangs(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        streams = [asyncio.create_task(collect(llm.generate("hello", LONG))) for _ in range(6)]
        first = llm.generate("hello", LONG)
        await anext(first)
        assert llm._engine.pid is not None
        os.kill(llm._engine.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 5)
        assert all(isinstance(r, EngineDead) for r in results)
        with pytest.raises(EngineDead):
            while True:
                await anext(first)
        assert not llm.alive and llm.dead_reason
        with pytest.raises(EngineDead):
            await collect(llm.generate("hello", LONG))

    with_llm(tiny, body)


def test_a_listener_that_fails_ends_every_request_instead_of_leaving_it_waiting(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(llm: AsyncLLM) -> None:
        def broken(events: object) -> None:
            raise ValueError("broken on purpose")

        monkeypatch.setattr(llm._processor, "process", broken)
        with pytest.raises(EngineDead, match="broken on purpose"):
            await asyncio.wait_for(collect(llm.generate("hello", LONG)), 10)
        assert not llm.alive

    with_llm(tiny, body)


def test_what_the_engine_refuses_reaches_the_caller_as_the_same_error(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(AdmissionRefused) as refused:
            await collect(llm.generate([9] * 100, SamplingParams(max_tokens=100)))
        assert refused.value.code == "too_large"
        with pytest.raises(RequestError) as bad:
            await collect(llm.generate([9, 5000], SamplingParams()))
        assert bad.value.param == "prompt"
        with pytest.raises(RequestError) as long:
            await collect(llm.generate([9] * 300, SamplingParams()))
        assert long.value.code == "context_length_exceeded"
        assert (await collect(llm.generate([9] * 10, SamplingParams(max_tokens=5))))[-1].finished
        await until_idle(llm)

    with_llm(tiny, body, num_gpu_blocks_override=8, block_size=16)


def test_draining_lets_running_requests_finish_and_refuses_new_ones(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate("hello", LONG)))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(llm.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(AdmissionRefused) as refused:
            await collect(llm.generate("hello", LONG))
        assert refused.value.code == "draining"
        assert len((await running)[-1].outputs[0].token_ids) == 200
        await draining

    with_llm(tiny, body)


def test_a_drain_that_runs_out_of_time_ends_the_rest_with_an_error(tiny: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate("hello", LONG)))
        await asyncio.sleep(0.05)
        await llm.drain(0)
        with pytest.raises(AdmissionRefused):
            await running

    with_llm(tiny, body, max_model_len=256)


def test_a_start_that_fails_says_why_in_the_engines_own_words(tiny: Path) -> None:
    async def main() -> None:
        with pytest.raises(PluginError, match="attention 'nope'"):
            await AsyncLLM.start(config(tiny, attention_backend="nope"))
        with pytest.raises(ConfigError, match="max-model-len"):
            await AsyncLLM.start(config(tiny, max_model_len=1 << 20))

    asyncio.run(main())


def test_a_tokenizer_that_is_another_models_is_told_before_the_weights_are_read(tiny: Path, tmp_path: Path) -> None:
    """These weights would be refused, too: they are of the vocabulary that the config no longer has."""
    shutil.copytree(tiny, tmp_path / "model")
    facts = json.loads((tiny / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts))

    async def main() -> None:
        with pytest.raises(ConfigError, match="the model's vocabulary 300, so it is another model's"):
            await AsyncLLM.start(config(tmp_path / "model"))

    asyncio.run(main())


def test_a_signal_to_the_whole_group_leaves_a_child_that_still_imports_to_its_parent(tiny: Path) -> None:
    """As Ctrl-C does, the moment the child is there."""

    async def main() -> None:
        process = EngineProcess(lambda kind, body: None, lambda reason: None)
        starting = asyncio.create_task(process.start(config(tiny)))
        while process.pid is None:
            await asyncio.sleep(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
        try:
            assert (await asyncio.wait_for(starting, 60)).info.vocab_size == 512
        finally:
            await process.close()

    asyncio.run(main())


def test_an_engine_whose_tokenizer_is_wrong_ends_without_a_word(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")

    async def main() -> None:
        with pytest.raises(LoadError, match=r"broken/tokenizer\.json: not a tokenizer"):
            await AsyncLLM.start(config(broken))

    asyncio.run(main())
    assert capfd.readouterr().err == ""


def test_an_engine_that_dies_before_it_says_a_word_does_not_hang_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")

    async def main() -> None:
        with pytest.raises(EngineDead, match="exit status 1"):
            await asyncio.wait_for(AsyncLLM.start(config(tiny)), 30)

    asyncio.run(main())


def test_the_serving_side_never_imports_torch(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import asyncio, sys\n"
        "from octavo.config import EngineConfig\n"
        "from octavo import AsyncLLM, SamplingParams\n"
        "async def main():\n"
        f"    llm = await AsyncLLM.start(EngineConfig(model={str(tiny)!r}, dtype='float32', max_model_len=128))\n"
        "    async for out in llm.generate('hello', SamplingParams(max_tokens=4)): pass\n"
        "    await llm.close()\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
