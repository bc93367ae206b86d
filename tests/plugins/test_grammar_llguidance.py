"""octavo-grammar-llguidance: the suite of grammar providers, and what clients feed it."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

pytest.importorskip("llguidance")

from octavo.grammar import Call, Calls, Grammar, GrammarError
from octavo.interfaces import GrammarCompiler, GrammarParts
from octavo.testing import choices
from octavo.testing.grammar import END, GrammarSuite, GrammarTarget, allowed, encode
from octavo.text.detokenizer import pieces_of
from octavo_grammar_llguidance.compiler import Compiler
from octavo_grammar_llguidance.provider import PROVIDER, Limits

from tests.tiny import EOS, SPECIAL, tiny_tokenizer


class TestLlguidance(GrammarSuite):
    target = GrammarTarget(PROVIDER)


class TestChoices(GrammarSuite):
    target = GrammarTarget(choices.register_grammars()[0])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarTarget(PROVIDER).compiler()


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [{"type": "object", "properties": {"a": schema}, "required": ["a"]}, {"type": "array"}]}
    return schema


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.regex("("), "unclosed group"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.json({"type": "objekt"}), "objekt"),
        (Grammar.json({"type": "string", "pattern": "("}), "unclosed group"),
        (Grammar.json({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (Grammar.json({"$ref": "#/$defs/missing"}), "missing"),
        (Grammar.json({"$ref": "http://example.com/schema"}), "example.com"),
        (Grammar.json({"$ref": "#"}), "no text satisfies it"),
        (Grammar.json({"enum": []}), "empty"),
        (Grammar.json(False), "nothing satisfies"),
        (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "use anyOf"),
        (Grammar.json(nested(40)), "recursion limit"),
        (Grammar("json_schema", "[" * 100_000), "nested too deeply"),
        (Grammar("json_schema", '"text"'), "a JSON schema is an object"),
        (Grammar.lark("start: missing"), "missing"),
        (Grammar.lark("start: start"), "no text satisfies it"),
    ],
    ids=lambda value: value.text[:24] if isinstance(value, Grammar) else None,
)
def test_a_grammar_that_cannot_be_enforced_is_refused_at_once_with_what_and_where(
    compiler: GrammarCompiler, grammar: Grammar, says: str
) -> None:
    began = time.process_time()
    with pytest.raises(GrammarError, match=says) as caught:
        compiler.compile(grammar)
    assert time.process_time() - began < 0.5
    assert len(str(caught.value)) <= 600 and "<state>" not in str(caught.value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("((a|b)*)+c"),
        Grammar.regex("(?:(?:a|b){1,900}c){1,900}d"),
        Grammar.json({"enum": [f"value {i}" for i in range(10_000)]}),
        Grammar.json({"type": "string", "minLength": 3, "maxLength": 100_000}),
        Grammar.json({"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}),
        Grammar.json(nested(20)),
        Grammar.json({}),
        Grammar.json(True),
    ],
    ids=lambda grammar: grammar.text[:24],
)
def test_a_grammar_that_costs_others_dearly_is_compiled_in_bounded_time(compiler: GrammarCompiler, grammar: Grammar) -> None:
    began = time.process_time()
    state = compiler.compile(grammar)
    assert allowed(compiler, state)[0]
    assert time.process_time() - began < 2.0


def test_a_state_whose_work_in_one_step_is_too_much_allows_nothing_and_says_no_end() -> None:
    small = GrammarTarget(PROVIDER, {"lexer_states": 1000}).compiler()
    state = small.compile(Grammar.regex(".*a.{300}b")).copy()
    for token in encode("a" * 400):
        if not (found := allowed(small, state)[0]):
            return
        assert END not in found
        try:
            state.accept([token])
        except GrammarError:
            return
    pytest.fail("the limit of states was not reached")


def test_spaces_between_the_parts_of_json_come_to_an_end(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Grammar.json_object()).copy()
    state.accept(encode("{"))
    with pytest.raises(GrammarError):
        state.accept(encode("\n" * 200))


def test_calls_of_several_functions_are_separated_and_enclosed(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    calls = Calls([Call("[f ", schema, "]"), Call("[g ", None, "]")], before="<", separator="; ", after=">")
    suite = TestLlguidance()
    for text, right in (
        ('<[f {"n": 1}]>', True),
        ('<[f {"n": 1}]; [g {"any": [true]}]>', True),
        ('<[f {"m": 1}]>', False),
        ("<[h {}]>", False),
        ('<[f {"n": 1}][g {}]>', False),
        ("text", False),
    ):
        assert suite.written(compiler, Grammar.calls(calls), encode(text)) is right, text
    one = Calls(calls.calls, many=False)
    assert suite.written(compiler, Grammar.calls(one), encode('[f {"n": 1}]'))
    assert not suite.written(compiler, Grammar.calls(one), encode('[f {"n": 1}][g {}]'))


def test_the_schema_of_a_call_may_refer_to_its_own_definitions(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
    }
    suite, grammar = TestLlguidance(), Grammar.calls(Calls([Call("f", schema, "")]))
    assert suite.written(compiler, grammar, encode("f" + json.dumps({"at": [1, 2]})))
    assert not suite.written(compiler, grammar, encode("f" + json.dumps({"at": [1]})))


def test_text_that_is_forced_is_written_in_the_model_s_own_tokens_and_never_in_control_tokens() -> None:
    tokenizer = tiny_tokenizer(add_bos=False)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    pieces, size = pieces_of(tokenizer), tokenizer.get_vocab_size()
    tokens, control = [pieces[token] for token in range(size)], {token: SPECIAL[token] for token in range(len(SPECIAL))}
    for before in ("", " "):  # a tokenizer that puts a space before every text has no way to write what is asked for
        parts = GrammarParts(tokens, control, (EOS,), lambda text, before=before: tokenizer.encode(before + text).ids)
        made = Compiler(Limits(), parts)
        masks = np.zeros((1, -(-size // 32)), np.int32)
        for text, first in (
            ("<tool_call>\n", size - 1),
            ("<|im_end|>", tokens.index(b"<")),
            (" the model", tokens.index(b" the")),
        ):
            made.fill([made.compile(Grammar.choice([text]))], masks)
            assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [first], (text, before)
