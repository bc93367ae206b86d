"""Warm prefixes without a server: LLM(warm_prefixes=FILE), and AsyncLLM, which says how far it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError

TEXT = "one page of the model, and all the tokens that were not out of this world. " * 3
OPTIONS = {"dtype": "float32", "num_threads": 1, "max_model_len": 512, "block_size": 16, "num_gpu_blocks_override": 64}


def file(folder: Path, entries: object) -> str:
    path = folder / "prefixes.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_the_first_request_finds_what_the_file_names(tiny: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    cold = LLM(str(tiny), **OPTIONS).generate(TEXT + "hello", params)[0]
    llm = LLM(str(tiny), warm_prefixes=file(tmp_path, [{"prompt": TEXT, "pin": True}]), **OPTIONS)
    warm = llm.generate(TEXT + "hello", params)[0]
    length = len(llm.tokenizer.encode(TEXT))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // 16 * 16)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    state = llm.engine.prefixes.state()
    assert state["pinned_blocks"] == length // 16 and len(state["pins"]) == 1 and 0 < state["hit_rate"] < 1


def test_a_prefix_that_is_too_long_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="maximum context length"):
        LLM(str(tiny), warm_prefixes=file(tmp_path, ["token " * 2000]), **OPTIONS)


def test_a_file_that_is_wrong_is_named_before_the_model_is_built(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="entry 1: unknown key 'text'"):
        LLM(str(tiny), warm_prefixes=file(tmp_path, [{"text": "x"}]), **OPTIONS)


def test_the_start_says_how_many_prefixes_are_done(tiny: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    async def main() -> int | None:
        config = EngineConfig(model=str(tiny), warm_prefixes=file(tmp_path, [TEXT, "two", {"prompt": "three"}]), **OPTIONS)
        llm = await AsyncLLM.start(config, on_progress=lambda p: told.append((p.stage, p.done, p.total)))
        try:
            outputs = [output async for output in llm.generate(TEXT + "hello", SamplingParams(max_tokens=1))]
            return outputs[-1].num_cached_tokens
        finally:
            await llm.close()

    assert (asyncio.run(main()) or 0) > 0
    assert [(done, total) for stage, done, total in told if stage == "prefixes"] == [(0, 3), (1, 3), (2, 3)]
