"""The demo model on the CPU kernels: chosen by themselves, and as near to float32 as core's own bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from octavo import LLM, SamplingParams
from octavo.catalog import Device
from octavo.engine.device import cpu_features

pytest.importorskip("llvmlite")
pytest.importorskip("octavo_ops_cpu")

from octavo_ops_cpu.provider import unfit

REASON = unfit(Device(features=cpu_features()), "bfloat16")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

TEXT = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()[:800]
ANSWERED = 16
"""Tokens that are generated after the text."""


def logprobs(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Of every token but the first, computed as one prompt."""
    (output,) = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return np.array([entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True) if entry])


def generated(llm: LLM) -> tuple[list[int], np.ndarray]:
    """The text and a greedy continuation, as tokens; and the log-probabilities of the continuation, token by token."""
    (output,) = llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=ANSWERED, ignore_eos=True, logprobs=0))
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    assert answer.logprobs is not None
    return [*output.prompt_token_ids, *tokens], np.array(
        [entry[token].logprob for token, entry in zip(tokens, answer.logprobs, strict=True)]
    )


@pytest.fixture(scope="module")
def errors() -> dict[str, tuple[float, float]]:
    """Mean absolute differences from float32: of a prompt, and of tokens that were decoded."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        right = LLM("demo", dtype="float32")
        for name in ("plugin", "core"):
            if name == "core":
                from octavo import plugins

                patch.setattr(plugins, "FIRST_PARTY", plugins.FIRST_PARTY - {"octavo-ops-cpu"})
            llm = LLM("demo", dtype="bfloat16")
            chosen = {kind: decision["chosen"] for kind, decision in llm.engine.explain["decisions"].items()}
            assert (chosen["attention"], chosen["operators"]) == {
                "plugin": ("cpu", ["cpu", "torch"]),
                "core": ("torch", ["torch"]),
            }[name]
            tokens, decoded = generated(llm)
            wanted = logprobs(right, tokens)
            prompt = len(tokens) - ANSWERED - 1
            found[name] = (
                float(np.abs(logprobs(llm, tokens)[:prompt] - wanted[:prompt]).mean()),
                float(np.abs(decoded - wanted[prompt:]).mean()),
            )
    return found


@pytest.mark.parametrize("part", [0, 1], ids=["a prompt", "decoded tokens"])
def test_the_demo_model_is_as_near_to_float32_as_core_s_bfloat16(errors: dict[str, tuple[float, float]], part: int) -> None:
    assert 0 < errors["plugin"][part] <= 1.5 * errors["core"][part] + 0.005
