"""What a grammar provider promises, as a suite of tests: subclass `GrammarSuite` with a `target`.

    class TestMine(GrammarSuite):
        target = GrammarTarget(PROVIDER)

A vocabulary of single bytes, a few longer pieces, control tokens and an id without text stands for a model's. Kinds of grammar that the
provider refuses by GrammarError are skipped, but for choices, which everybody knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import pytest

from octavo.catalog import Options, Provider
from octavo.grammar import Call, Calls, Grammar, GrammarError
from octavo.interfaces import Constraint, GrammarCompiler, GrammarParts

CONTROL = ("<|pad|>", "<|end|>", "<|call|>")
END = 1
LONGER = (b"ab", b"abc", b'{"', b'":', b" the", b"\xe6\x97", b"\xa5", "é".encode(), b"yes", b"no", b"  ")
TOKENS = (*(text.encode() for text in CONTROL), *(bytes([byte]) for byte in range(256)), *LONGER, b"")
NOTHING = len(TOKENS) - 1
"""The id that has no text."""


@dataclass(frozen=True)
class GrammarTarget:
    """options: values for the provider's own options."""

    provider: Provider
    options: dict[str, Any] = field(default_factory=dict)

    def compiler(self) -> GrammarCompiler:
        parts = GrammarParts(TOKENS, dict(enumerate(CONTROL)), (END,), encode)
        module, name = self.provider.load.split(":")
        options: Options = self.provider.options(**self.options)
        made: GrammarCompiler = getattr(import_module(module), name)(options, parts)
        return made


def encode(text: str) -> list[int]:
    """Longest pieces first."""
    data, ids = text.encode(), []
    while data:
        token = max((t for t in range(len(CONTROL), NOTHING) if data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]))
        ids.append(token)
        data = data[len(TOKENS[token]) :]
    return ids


def allowed(compiler: GrammarCompiler, *states: Constraint) -> list[set[int]]:
    masks = np.full((len(states), -(-len(TOKENS) // 32)), -1, np.int32)
    compiler.fill(states, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


CALL = Calls([Call("<|call|>f(", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, ")")])
CASES: tuple[tuple[Grammar, tuple[str, ...], tuple[str, ...]], ...] = (
    (Grammar.choice(["yes", "no", "yes and no", "日é"]), ("yes", "no", "yes and no", "日é"), ("y", "yesno", "ja", "")),
    (Grammar.regex("[a-c]{2,4}!"), ("ab!", "abca!"), ("a!", "abd!", "ab!!", "")),
    (
        Grammar.json({"type": "object", "properties": {"a": {"enum": ["日", "é"]}}, "required": ["a"], "additionalProperties": False}),
        ('{"a": "日"}', '{"a":"é"}'),
        ('{"a": "x"}', "{}", '{"a": "é", "b": 1}', "[]"),
    ),
    (Grammar.json_object(), ("{}", '{"x": [1, null]}'), ("[]", "1", "")),
)  # fmt: skip


class GrammarSuite:
    """See the module's docstring."""

    target: ClassVar[GrammarTarget]

    @pytest.fixture
    def compiler(self) -> GrammarCompiler:
        return self.target.compiler()

    def state(self, compiler: GrammarCompiler, grammar: Grammar) -> Constraint:
        try:
            return compiler.compile(grammar).copy()
        except GrammarError as error:
            if grammar.kind == "choice":
                raise
            pytest.skip(str(error))

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].kind)
    def test_texts_of_the_grammar_and_no_others_can_be_written_and_ended(self, compiler: GrammarCompiler, case: Any) -> None:
        grammar, right, wrong = case
        for text in right:
            assert self.written(compiler, grammar, encode(text)), text
        for text in wrong:
            assert not self.written(compiler, grammar, encode(text)), text

    def test_an_answer_may_be_spelt_by_other_tokens_where_it_is_free(self, compiler: GrammarCompiler) -> None:
        assert self.written(compiler, Grammar.regex("[a-c]{2,4}!"), [token + len(CONTROL) for token in b"abca!"])

    def written(self, compiler: GrammarCompiler, grammar: Grammar, ids: Sequence[int]) -> bool:
        state = self.state(compiler, grammar)
        for token in ids:
            if token not in allowed(compiler, state)[0]:
                return False
            state.accept([token])
        return END in allowed(compiler, state)[0]

    def test_where_nothing_may_follow_only_the_end_is_allowed(self, compiler: GrammarCompiler) -> None:
        state = self.state(compiler, Grammar.choice(["no"]))
        assert END not in allowed(compiler, state)[0]
        state.accept(encode("no"))
        assert allowed(compiler, state) == [{END}]

    def test_control_tokens_and_ids_without_text_are_no_text(self, compiler: GrammarCompiler) -> None:
        state = self.state(compiler, Grammar.choice(["<|call|>", "<|pad|>", "<|end|>"]))
        (found,) = allowed(compiler, state)
        assert found.isdisjoint({0, 1, 2, NOTHING}) and len(CONTROL) + ord("<") in found
        (free,) = allowed(compiler, self.state(compiler, Grammar.regex("(.|\n)*")))
        assert NOTHING not in free and max(free) < len(TOKENS)

    def test_a_copy_goes_its_own_way(self, compiler: GrammarCompiler) -> None:
        state = self.state(compiler, Grammar.choice(["yes", "no"]))
        other = state.copy()
        state.accept(encode("yes"))
        assert allowed(compiler, other) != allowed(compiler, state) == [{END}]
        other.accept(encode("no"))
        assert allowed(compiler, state, other) == [{END}, {END}]

    def test_tokens_that_are_not_allowed_are_an_error_of_that_state_alone(self, compiler: GrammarCompiler) -> None:
        broken, whole = (self.state(compiler, Grammar.choice(["yes", "no"])) for _ in range(2))
        before = allowed(compiler, whole)
        with pytest.raises(GrammarError):
            broken.accept(encode("perhaps"))
        assert allowed(compiler, whole) == before

    def test_many_tokens_at_once_are_the_same_tokens_one_by_one(self, compiler: GrammarCompiler) -> None:
        one, many = (self.state(compiler, Grammar.choice(["yes and no", "yes and yes"])) for _ in range(2))
        for token in encode("yes and "):
            one.accept([token])
        many.accept(encode("yes and "))
        assert allowed(compiler, one) == allowed(compiler, many)

    @pytest.mark.parametrize("grammar", [Grammar.choice([]), Grammar.json({"type": "objekt"}), Grammar.regex("(")])
    def test_what_means_nothing_is_refused_with_a_reason(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        with pytest.raises(GrammarError, match=r"\w"):
            compiler.compile(grammar)

    def test_calls_name_control_tokens_and_hold_json(self, compiler: GrammarCompiler) -> None:
        state = self.state(compiler, Grammar.calls(CALL))
        assert allowed(compiler, state) == [{CONTROL.index("<|call|>")}]
        state.accept([CONTROL.index("<|call|>"), *encode("f(" + json.dumps({"x": 12}) + ")")])
        assert allowed(compiler, state) == [{END, CONTROL.index("<|call|>")}]  # there may be another

    def test_calls_in_the_middle_of_text_begin_where_they_are_triggered(self, compiler: GrammarCompiler) -> None:
        calls = Calls([Call("[f]", {"type": "integer"}, "[/f]")], trigger="[f]")
        for text, right in (("so: [f]12[/f]", True), ("no call", True), ("[f]x[/f]", False), ("a [f]1[/f][f]2[/f]", True)):
            assert self.written(compiler, Grammar.calls(calls), encode(text)) is right, text
