"""Warm prefixes without a server: LLM(warm_prefixes=FILE)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from octavo import LLM, SamplingParams
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
