"""What FP8 costs in quality, on real weights: a short form of what benchmarks/RESULTS.md reports for a whole text.

SmolLM2-135M-Instruct in bfloat16 against the same engine with FP8, on held-out text, and a fact that lies before it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from octavo.bench.perplexity import perplexity, score, windows
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.model.source import resolve_source
from octavo.plugins import discover
from octavo.text.tokenizer import Tokenizer

from tests.engine.harness import request, run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "plugins" / "quant_fp8" / "src"))

pytestmark = pytest.mark.slow

TEXT = (ROOT / "tests" / "data" / "heldout.txt").read_text()
NEEDLE = "\n\nThe secret number of the lighthouse is 48175.\n\n"
QUESTION = "\n\nQuestion: What is the secret number of the lighthouse?\nAnswer: The secret number of the lighthouse is"
START, WINDOW, COUNT = 16_000, 512, 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_source(resolve_source("demo"), EngineConfig(model="demo"))


def measured(tokenizer: Tokenizer, **options: Any) -> tuple[float, str]:
    """(perplexity of the first windows, what follows the question)."""
    settings = {"device": "cpu", "num_threads": 1, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 2}
    engine: Engine = build_engine(EngineConfig(model="demo", **settings | options), discover(extra_modules=["octavo_quant_fp8"]))
    ids = tokenizer.encode(TEXT, add_special=False)
    found = perplexity(score(engine, windows(ids[START:], WINDOW)[:COUNT]))
    prompt = [
        *ids[:60],
        *tokenizer.encode(NEEDLE, add_special=False),
        *ids[60:500],
        *tokenizer.encode(QUESTION, add_special=False),
    ]
    answer = run(engine, [request(engine, "needle", prompt, max_tokens=6)])["needle", 0].tokens
    return found, tokenizer.decode(answer)


def test_fp8_predicts_a_text_nearly_as_well_and_finds_the_fact(tokenizer: Tokenizer) -> None:
    """Weights, activations and an e4m3 cache at once: the bars of the whole text are 3.5% and 1.5%."""
    (plain, right), (found, answer) = measured(tokenizer), measured(tokenizer, quantization="fp8", kv_cache_dtype="fp8_e4m3")
    assert "48175" in right and "48175" in answer
    assert 0.001 < found / plain - 1 < 0.05, f"perplexity {found:.3f} against {plain:.3f}"
