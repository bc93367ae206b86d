"""Facts and copies in a long text: whether an FP8 cache keeps the answers that the model has without one.

    python benchmarks/needle.py [MODEL] [--text FILE] [--tokens 2000 8000] [--places 10 50 90] [--facts 1] [--caches auto fp8_e4m3 fp8_e5m2]

A prompt is a text of so many tokens with one fact ("The secret number of the lighthouse is 48175.") at one place of it,
in percent, and at the end the question; the answer, greedy, is right where it starts with the number. For each length the
model also copies: a made-up recipe near the beginning (at 5%), and at the end its first 12 tokens again; what counts is
how many of the next 32 tokens are the recipe's before the first that is not.

A cache is auto, a --kv-cache-dtype, or one with "+" or "-" behind it for --kv-cache-spread always or never; the first is what
the others are compared with. A line of JSON for each cache and length, then a summary. What prompts share at
their beginning is computed once for each cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.model.source import resolve_source
from octavo.plugins import discover
from octavo.request import Request, SamplingParams
from octavo.text.tokenizer import Tokenizer

FACTS = (
    ("lighthouse", "48175"), ("castle", "90316"), ("harbour", "27548"), ("library", "63820"), ("garden", "15497"),
    ("bakery", "72061"), ("station", "38954"), ("museum", "81243"),
)  # fmt: skip
FACT = "\n\nThe secret number of the {} is {}.\n\n"
QUESTION = "\n\nQuestion: What is the secret number of the {0}?\nAnswer: The secret number of the {0} is"
RECIPE = (
    "\n\nMix nine plums with salt, vinegar and wild mint, hang the copper pot over ash, wait until the moon is thin, add "
    "rain; boil it, then serve it cold with black bread to seven sailors who sing.\n\n"
)
SHOWN, COPIED = 12, 32
"""Tokens of the recipe that are said again, and that are to follow."""


@dataclass
class Found:
    """What one cache answered: facts by (tokens, place, fact), copied tokens by length of the text."""

    facts: dict[tuple[int, int, str], str] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)

    def right(self) -> set[tuple[int, int, str]]:
        numbers = dict(FACTS)
        return {key for key, answer in self.facts.items() if answer.strip().startswith(numbers[key[2]])}


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="needle", prompt=prompt, params=params))
    found: list[int] = []
    while engine.busy:
        for event in engine.step().events:
            if event.error:
                raise SystemExit(f"a prompt of {len(prompt)} tokens failed: {event.error}")
            found += event.tokens
    return found


def hidden(text: Sequence[int], what: list[int], place: int, end: list[int], tokens: int) -> list[int]:
    """So many tokens: the text with `what` at `place` percent of it, and `end`."""
    body = tokens - len(what) - len(end)
    if body > len(text):
        raise SystemExit(f"--tokens {tokens}: the text has only {len(text)}; give a longer one with --text")
    cut = body * place // 100
    return [*text[:cut], *what, *text[cut:body], *end]


def ask(engine: Engine, tokenizer: Tokenizer, text: Sequence[int], args: argparse.Namespace, name: str) -> Found:
    def encode(words: str) -> list[int]:
        return tokenizer.encode(words, add_special=False)

    found, recipe = Found(), encode(RECIPE)
    for tokens in args.tokens:
        began = time.perf_counter()
        for place in args.places:
            for what, number in FACTS[: args.facts]:
                prompt = hidden(text, encode(FACT.format(what, number)), place, encode(QUESTION.format(what)), tokens)
                answer = greedy(engine, prompt, len(encode(number)) + 1)
                found.facts[tokens, place, what] = tokenizer.decode(answer)
        start = 1  # the blank line before it
        shown, rest = recipe[start : start + SHOWN], recipe[start + SHOWN : start + SHOWN + COPIED]
        copy = greedy(engine, hidden(text, recipe, 5, shown, tokens), len(rest))
        found.copied[tokens] = next((i for i, (a, b) in enumerate(zip(copy, rest, strict=True)) if a != b), len(rest))
        answers = {f"{what} {place}%": answer for (n, place, what), answer in found.facts.items() if n == tokens}
        record = {"cache": name, "tokens": tokens, "answers": answers, "copied": found.copied[tokens]}
        print(json.dumps(record | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)
    return found


def cache_options(name: str) -> dict[str, Any]:
    """EngineConfig's of a cache as it is named on the command line."""
    spread = {"+": "always", "-": "never"}.get(name[-1])
    return {"kv_cache_dtype": name} if spread is None else {"kv_cache_dtype": name[:-1], "kv_cache_spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests" / "data" / "heldout.txt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--places", type=int, nargs="+", default=[10, 50, 90])
    parser.add_argument("--facts", type=int, default=1, choices=range(1, len(FACTS) + 1))
    parser.add_argument("--caches", nargs="+", default=["auto", "fp8_e4m3", "fp8_e5m2"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention-backend", default="auto", help="the same one for all caches: by name, since auto may differ")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_source(resolve_source(args.model), EngineConfig(model=args.model))
    text = tokenizer.encode(args.text.read_text(), add_special=False)
    found: dict[str, Found] = {}
    for name in args.caches:
        shape = {"max_model_len": max(args.tokens) + COPIED, "max_num_seqs": 1, "attention_backend": args.attention_backend}
        config = EngineConfig(model=args.model, dtype=args.dtype, **shape, **cache_options(name))
        found[name] = ask(build_engine(config, discover(config.plugins)), tokenizer, text, args, name)
    first = found[args.caches[0]]
    for name, other in found.items():
        kept, had = len(first.right() & other.right()), len(first.right())
        copies = ", ".join(f"{count} at {tokens}" for tokens, count in other.copied.items())
        print(
            f"{name}: {len(other.right())} of {len(other.facts)} facts, {kept} of the {had} that {args.caches[0]} has; copied {copies}"
        )


if __name__ == "__main__":
    main()
