"""Answers over 8,000 tokens with float8 caches as they are by default, on real weights: what `benchmarks/needle.py` tells of more
facts, texts and caches.

SmolLM2-135M-Instruct in bfloat16. With a bfloat16 cache it has both facts and copies 23 tokens; where keys are not spread, e4m3 has
the museum's number wrong and e5m2 the castle's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.model.source import resolve_source
from octavo.plugins import discover
from octavo.text.tokenizer import Tokenizer

from tests.engine.harness import request, run

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()
FACTS = {"museum": "81243", "castle": "90316"}
FACT = "\n\nThe secret number of the {} is {}.\n\n"
QUESTION = "\n\nQuestion: What is the secret number of the {0}?\nAnswer: The secret number of the {0} is"
RECIPE = (
    "\n\nMix nine plums with salt, vinegar and wild mint, hang the copper pot over ash, wait until the moon is thin, add "
    "rain; boil it, then serve it cold with black bread to seven sailors who sing.\n\n"
)
TOKENS = 8000
SHOWN, COPIED = 12, 10
"""Tokens of the recipe that are said again, and that must follow: later ones have near equals ("the moon was thin")."""


@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2"])
def test_facts_and_a_copy_from_4000_tokens_before_are_kept(cache: str) -> None:
    """A fact at 70% of the text, the other in its place, and a recipe at 50%."""
    config = EngineConfig(model="demo", device="cpu", dtype="bfloat16", max_model_len=8192, max_num_seqs=1, kv_cache_dtype=cache)
    tokenizer = Tokenizer.from_source(resolve_source("demo"), config)
    engine = build_engine(config, discover({}))
    ids, recipe = encoded(tokenizer, TEXT), encoded(tokenizer, RECIPE)
    for name, number in FACTS.items():
        fact, question = encoded(tokenizer, FACT.format(name, number)), encoded(tokenizer, QUESTION.format(name))
        body = TOKENS - len(recipe) - len(fact) - 40  # 40: for the question
        text = [*ids[: body // 2], *recipe, *ids[body // 2 : body * 7 // 10], *fact, *ids[body * 7 // 10 : body]]
        answer = tokenizer.decode(following(engine, [*text, *question], 6))
        assert answer.strip().startswith(number), f"the {name}: {answer!r}"
    shown, rest = recipe[1 : 1 + SHOWN], recipe[1 + SHOWN : 1 + SHOWN + COPIED]
    copy = following(engine, [*text, *shown], COPIED)
    assert copy == rest, f"{tokenizer.decode(copy)!r} instead of {tokenizer.decode(rest)!r}"


def encoded(tokenizer: Tokenizer, words: str) -> list[int]:
    return tokenizer.encode(words, add_special=False)


def following(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Greedily the next `count` tokens. What prompts share at their beginning is computed once."""
    return run(engine, [request(engine, "a", prompt, max_tokens=count)])["a", 0].tokens
