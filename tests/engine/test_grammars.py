"""Rows with a grammar: what they may say, how they end, and that nobody else notices (CPU, fp32; choices of texts)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octavo.catalog import Options
from octavo.engine.admissions import Admissions
from octavo.engine.engine import Engine
from octavo.engine.grammars import KEPT, Grammars
from octavo.engine.messages import Refused
from octavo.errors import AdmissionRefused
from octavo.grammar import Grammar, GrammarError
from octavo.interfaces import GrammarParts
from octavo.testing.choices import Choices, Rest
from octavo.text.tokenizer import Tokenizer

from tests.engine.harness import Outcome, alone, assert_empty, make_engine, request, run, step

TEXTS = ["the world and all", "the model", "Paris!", "0123456789"]
EOS = 2
PROMPTS = [[9, 8, 7], list(range(40, 77)), [100] * 20, [11, 12]]
ASKS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "seed": 7, "repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {40: 100.0, 50: -100.0}, "logprobs": 3},
    {"ignore_eos": True, "min_tokens": 3},
]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_path(tiny)


@pytest.fixture(scope="module", params=[0, 1, 3, {"depth": 1, "padded": True}], ids=["0", "1", "3", "padded"])
def engine(tiny: Path, request: pytest.FixtureRequest) -> Engine:
    return make_engine(tiny, late=request.param, max_num_seqs=8)


def text_of(tokenizer: Tokenizer, outcome: Outcome) -> str:
    assert outcome.error is None and outcome.tokens[-1] == EOS and outcome.finish == "stop"
    return tokenizer.decode(outcome.tokens)


@pytest.mark.parametrize("asks", ASKS, ids=lambda asks: " ".join(asks) or "greedy")
def test_the_text_is_one_of_the_grammar_and_ends_there(engine: Engine, tokenizer: Tokenizer, asks: dict[str, Any]) -> None:
    sent = request(engine, "a", PROMPTS[0], max_tokens=40, grammar=Grammar.choice(TEXTS), n=2, **asks)
    for outcome in run(engine, [sent]).values():
        assert text_of(tokenizer, outcome) in TEXTS


def test_a_limit_of_tokens_leaves_a_beginning_and_says_length(engine: Engine, tokenizer: Tokenizer) -> None:
    (outcome,) = run(engine, [request(engine, "a", PROMPTS[0], max_tokens=3, grammar=Grammar.choice(TEXTS))]).values()
    assert outcome.finish == "length" and len(outcome.tokens) == 3
    assert any(text.startswith(tokenizer.decode(outcome.tokens)) for text in TEXTS)


def test_the_end_waits_for_min_tokens_while_anything_else_is_allowed(engine: Engine, tokenizer: Tokenizer) -> None:
    nested = ["one", "one" * 2, "one" * 12]
    for least in (0, 4, 40):
        sent = request(engine, "a", PROMPTS[0], max_tokens=60, min_tokens=least, grammar=Grammar.choice(nested))
        (outcome,) = run(engine, [sent]).values()
        text = text_of(tokenizer, outcome)
        assert text in nested
        # forty tokens are more than the longest text has: it is written to its end, and ends
        assert len(outcome.tokens) >= least or (least == 40 and text == nested[-1])


def test_the_model_s_end_is_ignored_as_long_as_the_grammar_can_go_on(engine: Engine, tokenizer: Tokenizer) -> None:
    nested = ["a", "ab", "abc", "abcdefgh"]
    sent = request(engine, "a", PROMPTS[0], max_tokens=60, ignore_eos=True, grammar=Grammar.choice(nested))
    (outcome,) = run(engine, [sent]).values()
    assert text_of(tokenizer, outcome) == "abcdefgh"


def test_a_stop_token_ends_the_text_inside_its_grammar(engine: Engine, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("!", add_special=False)[0]
    sent = request(engine, "a", PROMPTS[0], max_tokens=60, stop_token_ids=[stop], grammar=Grammar.choice(["Paris! Paris!"]))
    (outcome,) = run(engine, [sent]).values()
    assert tokenizer.decode(outcome.tokens) == "Paris!" and outcome.events[-1].stop_reason == stop


def test_two_rows_with_a_grammar_and_six_without_say_what_they_say_alone(engine: Engine) -> None:
    grammars = [Grammar.choice(TEXTS), Grammar.choice(["yes", "no"]), *[None] * 6]
    requests = [
        request(engine, str(i), PROMPTS[i % 4], max_tokens=16, ignore_eos=grammar is None, grammar=grammar, **ASKS[i % 5])
        for i, grammar in enumerate(grammars)
    ]
    together = run(engine, requests)
    for one in requests:
        assert alone(engine, one)[one.id, 0].tokens == together[one.id, 0].tokens


def test_an_abort_in_the_middle_leaves_nothing_behind(engine: Engine) -> None:
    outcomes: dict[Any, Outcome] = {}
    for i in range(4):
        engine.add(request(engine, str(i), PROMPTS[i], max_tokens=40, grammar=Grammar.choice(TEXTS)))
    for _ in range(3):
        step(engine, outcomes)
    for i in range(4):
        engine.abort(str(i))
    while engine.busy:
        step(engine, outcomes)
    assert_empty(engine)


class Breaking(Rest):
    """Takes two tokens, and then nothing more."""

    taken = 0
    fault: Exception

    def copy(self) -> Breaking:
        made = Breaking(self._tokens, self._ends, self.texts)
        made.taken = self.taken
        return made

    def accept(self, tokens: Any) -> None:
        super().accept(tokens)
        self.taken += len(tokens)
        if self.taken > 2:
            raise self.fault


class Fragile(Choices):
    def compile(self, grammar: Grammar) -> Rest:
        rest = super().compile(grammar)
        if b"fails" in rest.texts:
            return Breaking(rest._tokens, rest._ends, rest.texts)
        return rest

    def fill(self, states: Any, masks: np.ndarray) -> None:
        super().fill(states, masks)
        for state, mask in zip(states, masks, strict=True):
            if any(0 < len(text) < 5 and b"stuck".endswith(text) for text in state.texts):
                mask[:] = 0


@pytest.mark.parametrize(
    ("text", "fault", "says"),
    [
        ("fails", GrammarError("the third token is one too many"), "one too many"),
        ("fails", IndexError("a plugin's mistake"), "IndexError: a plugin's mistake"),
        ("stuck", None, "allows no token"),
    ],
)
def test_a_state_that_cannot_go_on_ends_its_row_with_the_reason_and_no_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, text: str, fault: Exception | None, says: str
) -> None:
    monkeypatch.setattr("octavo.testing.choices.Choices", Fragile)
    monkeypatch.setattr(Breaking, "fault", fault, raising=False)
    engine = make_engine(tiny)
    asked = [
        request(engine, "broken", PROMPTS[0], max_tokens=20, grammar=Grammar.choice([text])),
        request(engine, "whole", PROMPTS[1], max_tokens=20, grammar=Grammar.choice(["yes"])),
        request(engine, "free", PROMPTS[2], max_tokens=9, ignore_eos=True),
    ]
    found = run(engine, asked)
    assert found["broken", 0].finish == "error" and says in (found["broken", 0].error or "")
    assert found["whole", 0].finish == "stop" and len(found["free", 0].tokens) == 9


def test_a_grammar_that_means_nothing_is_refused_before_anything_is_queued(engine: Engine) -> None:
    for wrong in (Grammar.choice([]), Grammar.regex("x")):
        with pytest.raises(AdmissionRefused) as caught:
            engine.add(request(engine, "a", PROMPTS[0], max_tokens=4, grammar=wrong))
        assert caught.value.code == "invalid_grammar"
    assert_empty(engine)


def test_core_alone_refuses_grammars_and_says_what_is_missing(tiny: Path) -> None:
    engine = make_engine(tiny, grammar_backend="none")
    with pytest.raises(AdmissionRefused, match="octavo-grammar-llguidance"):
        engine.add(request(engine, "a", PROMPTS[0], max_tokens=4, grammar=Grammar.json_object()))


# ---------------------------------------------------------------- compiling


def grammars(compile: Any, **options: Any) -> Grammars:
    parts = GrammarParts(
        [b"", b"", b"", *(bytes([i]) for i in range(256))], {}, (EOS,), lambda text: [3 + b for b in text.encode()]
    )

    class Compiler(Choices):
        def compile(self, grammar: Grammar) -> Rest:
            compile(grammar)
            return super().compile(grammar)

    return Grammars(lambda: Compiler(Options(), parts), **options)


def test_a_grammar_is_compiled_once_and_those_used_last_are_kept() -> None:
    seen: list[str] = []
    made = grammars(lambda grammar: seen.append(grammar.text))
    for _ in range(3):
        made.require(Grammar.choice(["again"]))
    assert seen == ['["again"]']
    for i in range(KEPT + 5):
        made.require(Grammar.choice([str(i)]))
        made.require(Grammar.choice(["again"]))
    assert seen.count('["again"]') == 1 and len(made._known) == KEPT


def test_a_request_waits_for_its_grammar_and_the_engine_for_nobody(engine: Engine) -> None:
    gate, refused = threading.Event(), []
    slow = grammars(lambda grammar: gate.wait(20) if "slow" in grammar.text else None)
    own, engine.grammars = engine.grammars, slow
    try:
        doors = Admissions(engine, refused.append)
        waits = request(engine, "waits", PROMPTS[0], max_tokens=4, grammar=Grammar.choice(["slow"]))
        gone = request(engine, "gone", PROMPTS[0], max_tokens=4, grammar=Grammar.choice(["slow too"]))
        doors.add(waits)
        doors.add(gone)
        doors.add(request(engine, "free", PROMPTS[1], max_tokens=4, ignore_eos=True))
        doors.turn()
        assert doors.waiting and engine.stats().waiting == 1
        doors.abort("gone")
        gate.set()
        slow.require(waits.params.grammar)  # type: ignore[arg-type]
        doors.turn()
        assert not doors.waiting and not refused and engine.stats().waiting == 2
    finally:
        engine.grammars = own
        for id in ("waits", "free"):
            engine.abort(id)
    assert_empty(engine)


def test_a_provider_that_fails_costs_the_request_and_not_the_engine(engine: Engine) -> None:
    broken: list[Exception] = [RuntimeError("no such library"), RuntimeError("still none")]

    def fails(grammar: Grammar) -> None:
        if broken:
            raise broken.pop()

    refused: list[Refused] = []
    own, engine.grammars = engine.grammars, grammars(fails)
    try:
        doors = Admissions(engine, refused.append)
        for id in ("first", "second", "third"):
            doors.add(request(engine, id, PROMPTS[0], max_tokens=4, grammar=Grammar.choice(["yes"])))
            while doors.waiting:
                doors.turn()
    finally:
        engine.grammars = own
        engine.abort("third")
    assert [(one.request_id, one.code) for one in refused] == [("first", "grammar_failed"), ("second", "grammar_failed")]
    assert "RuntimeError" in refused[0].message
    assert_empty(engine)


def test_a_grammar_that_takes_too_long_is_refused_and_one_that_is_wrong_says_why(engine: Engine) -> None:
    gate = threading.Event()
    refused: list[Refused] = []
    slow = grammars(lambda grammar: gate.wait(20) if "slow" in grammar.text else None, patience=0.05)
    own, engine.grammars = engine.grammars, slow
    try:
        doors = Admissions(engine, refused.append)
        doors.add(request(engine, "late", PROMPTS[0], max_tokens=4, grammar=Grammar.choice(["slow"])))
        doors.add(request(engine, "wrong", PROMPTS[0], max_tokens=4, grammar=Grammar.regex("x")))
        while doors.waiting:
            doors.turn()
        with pytest.raises(AdmissionRefused, match=r"not compiled within 0\.05 s"):
            slow.require(Grammar.choice(["slow"]))
    finally:
        engine.grammars = own
        gate.set()
    told = {one.request_id: one for one in refused}
    assert {one.code for one in refused} == {"invalid_grammar"} and set(told) == {"late", "wrong"}
    assert "0.05 s" in told["late"].message and "knows choices" in told["wrong"].message
    assert_empty(engine)


def test_a_grammar_that_is_gone_when_its_row_begins_costs_that_row_alone(tiny: Path) -> None:
    """Forgotten meanwhile, and the provider fails when it is asked again."""
    engine = make_engine(tiny)
    broken: list[str] = []

    def fails(grammar: Grammar) -> None:
        if broken:
            raise RuntimeError(broken[0])

    asked = [
        request(engine, "formed", PROMPTS[0], max_tokens=8, grammar=Grammar.choice(["yes"])),
        request(engine, "free", PROMPTS[1], max_tokens=8, ignore_eos=True),
    ]
    rows = engine._executor._runner._sampler._constrained  # type: ignore[attr-defined]
    engine.grammars = other = grammars(fails)
    rows._start, rows._fill = other.require, other.fill
    for one in asked:
        engine.add(one)
    other._known.clear()
    broken.append("gone")
    found = run(engine, [])
    assert found["formed", 0].finish == "error" and "gone" in (found["formed", 0].error or "")
    assert len(found["free", 0].tokens) == 8
