"""Rows with a grammar beside rows without, on a GPU under captured graphs: who may say what, and that nobody else notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from octavo.grammar import Grammar  # noqa: E402
from octavo.text.tokenizer import Tokenizer  # noqa: E402

from tests.engine.harness import alone, request, run  # noqa: E402
from tests.gpu.test_engine import PROMPTS, gpu_engine  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TEXTS = ["the world and all", "the model", "Paris!", "0123456789" * 3]
ASKS: list[dict[str, Any]] = [
    {"grammar": Grammar.choice(TEXTS)},
    {"grammar": Grammar.choice(["yes", "no", "one and all"]), "temperature": 1.0, "seed": 4, "n": 2},
    {"grammar": Grammar.choice(TEXTS), "temperature": 0.8, "seed": 5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
    {"grammar": Grammar.choice(["a", "ab", "abcdefgh"]), "min_tokens": 3, "ignore_eos": True},
    *({"temperature": i % 2, "seed": i, "ignore_eos": True} for i in range(6)),
]  # fmt: skip


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_rows_with_a_grammar_and_rows_without_say_what_they_say_alone(tiny: Path, eager: bool) -> None:
    gpu = gpu_engine(tiny, block_size=16, max_num_seqs=16, enforce_eager=eager)
    tokenizer = Tokenizer.from_path(tiny)
    asks = [{"prompt": PROMPTS[i % 4], "max_tokens": 40, **ask} for i, ask in enumerate(ASKS)]
    together = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
    assert eager or gpu._executor._runner._graphs._buckets, "no step was replayed"
    for i, ask in enumerate(asks):
        solo = alone(gpu, request(gpu, "solo", **ask))
        for sample in range(ask.get("n", 1)):
            one = together[str(i), sample]
            assert one.tokens == solo["solo", sample].tokens and one.error is None
            if "grammar" in ask:
                assert one.finish == "stop" and tokenizer.decode(one.tokens) in json.loads(ask["grammar"].text)


def test_preempted_rows_go_on_where_their_grammar_was(tiny: Path) -> None:
    gpu = gpu_engine(tiny, block_size=8, num_gpu_blocks_override=20, max_num_seqs=6, max_num_batched_tokens=32)
    roomy = gpu_engine(tiny, block_size=8)
    text = Grammar.choice(["0123456789" * 6, "abcdefghij" * 6])
    asks = [{"prompt": [*range(40, 60), 70 + i], "max_tokens": 70, "seed": i, "temperature": 1.0} for i in range(6)]
    for ask in asks[::2]:
        ask["grammar"] = text
    outcomes = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
    assert gpu.stats().preemptions > 0
    for i, ask in enumerate(asks):
        assert outcomes[str(i), 0].tokens == alone(roomy, request(roomy, "a", **ask))["a", 0].tokens


def test_json_of_a_schema_under_graphs(tiny: Path) -> None:
    pytest.importorskip("llguidance")
    gpu = gpu_engine(tiny, block_size=16, max_num_seqs=16, grammar_backend="llguidance")
    tokenizer = Tokenizer.from_path(tiny)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["Zürich", "日本"]}},
        "required": ["n", "of"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " "},
    }
    asks = [{"prompt": PROMPTS[i % 4], "max_tokens": 60, "temperature": 1.0, "seed": i} for i in range(12)]
    for ask in asks[::2]:
        ask["grammar"] = Grammar.json(schema)
    found = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
    for i in range(0, 12, 2):
        value = json.loads(tokenizer.decode(found[str(i), 0].tokens))
        assert value["of"] in ("Zürich", "日本") and value["n"] in range(100)
