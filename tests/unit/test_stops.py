"""Stop strings: found at the first token that completes one, held back no longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.request import Event, Request, SamplingParams, TokenLogprobs
from octavo.text.output import OutputProcessor, RequestOutput
from octavo.text.stops import StopMatcher
from octavo.text.tokenizer import Tokenizer

from tests.unit import tiny_tokenizers as tiny

AB = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def run(
    tokenizer: Tokenizer, ids: list[int], *, delta: bool, finish: str = "length", per_event: int = 1, **params: object
) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
    """Feed ids one event at a time, as an engine that has not heard of the stop yet would."""
    processor = OutputProcessor(tokenizer)
    processor.add(
        Request(id="r", prompt=tokenizer.encode("a"), params=SamplingParams(max_tokens=1000, **params)), "a", delta  # type: ignore[arg-type]
    )  # fmt: skip
    outputs, aborts = [], []
    for at in range(0, len(ids), per_event):
        tokens = ids[at : at + per_event]
        logprobs = [TokenLogprobs(t, -1.0, 1, [], []) for t in tokens]
        end = finish if at + per_event >= len(ids) else None
        more, ended = processor.process([Event("r", 0, tokens, end, logprobs=logprobs)])
        outputs += more
        aborts += ended
    return outputs, aborts


def text_of(outputs: list[RequestOutput], delta: bool) -> str:
    return "".join(o.outputs[0].text for o in outputs) if delta else outputs[-1].outputs[0].text


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    return [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == c.encode()) for c in text]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny.octavo(tiny.byte_level())


# ---------------------------------------------------------------- the matcher, against a naive reference


@settings(deadline=None, max_examples=200)
@given(text=AB, stops=STOPS)
def test_the_matcher_finds_what_a_naive_search_finds_and_holds_what_can_still_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    for end in range(1, len(text) + 1):
        seen = text[:end]
        naive = [(end - len(s), end) for s in stops if seen.endswith(s)]
        assert matcher.feed(text[end - 1]) == (min(naive) if naive else None)
        suffixes = [n for n in range(1, end + 1) if any(len(s) > n and s.startswith(seen[end - n :]) for s in stops)]
        assert matcher.held == max(suffixes, default=0)


@settings(deadline=None, max_examples=150)
@given(text=AB, stops=STOPS, delta=st.booleans(), include=st.booleans(), min_tokens=st.integers(0, 6))
def test_text_ends_right_before_the_first_stop_that_is_complete(
    text: str, stops: list[str], delta: bool, include: bool, min_tokens: int
) -> None:
    tokenizer = tiny.octavo(tiny.byte_level())
    ids = letters(tokenizer, text)
    if not ids:
        return
    outputs, aborts = run(
        tokenizer, ids, delta=delta, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )  # fmt: skip
    expected, reason, count = text, None, len(ids)
    for end in range(min_tokens + 1, len(text) + 1):
        found = sorted((end - len(s), s) for s in stops if text[:end].endswith(s))
        if found:
            start, reason = found[0]
            expected, count = (text[:end] if include else text[:start]), end
            break
    final = outputs[-1].outputs[0]
    assert text_of(outputs, delta) == expected
    assert (final.finish_reason, final.stop_reason) == (("stop", reason) if reason else ("length", None))
    tokens = [t for o in outputs for t in o.outputs[0].token_ids] if delta else final.token_ids
    assert tokens == ids[:count], "tokens after the one that completes the stop are neither sent nor counted"
    assert aborts == ([("r", 0)] if reason and count < len(ids) else [])


# ---------------------------------------------------------------- over real tokens


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("per_event", [1, 3, 100])
def test_a_stop_that_spans_tokens_is_found_and_nothing_of_it_is_sent(tokenizer: Tokenizer, delta: bool, per_event: int) -> None:
    text = "The quick brown fox naïve 日本 jumps over the lazy dog"
    ids = tokenizer.encode(text)
    for start in range(0, len(text) - 7, 3):
        stop = text[start : start + 7]
        outputs, _ = run(tokenizer, ids, delta=delta, stop=[stop, "never"], per_event=per_event)
        sent = text_of(outputs, delta)
        assert sent == text[: text.index(stop)]


@pytest.mark.parametrize("stop", [None, [], ()])
def test_no_stop_means_none(tokenizer: Tokenizer, stop: object) -> None:
    outputs, aborts = run(tokenizer, tokenizer.encode("the lazy dog"), delta=True, stop=stop)
    assert text_of(outputs, True) == "the lazy dog" and not aborts


def test_one_string_duplicates_and_a_prefix_of_another_stop_all_work(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog")
    for stop in (" lazy", [" lazy", " lazy"], [" la", " lazy"], [" lazy", " la"]):
        outputs, _ = run(tokenizer, ids, delta=True, stop=stop)
        assert text_of(outputs, True) == "the"


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_the_text_of_a_special_token_stops_also_where_it_is_hidden(
    tokenizer: Tokenizer, delta: bool, hide: bool, finish: str
) -> None:
    """finish "stop": the engine ends at that token by itself."""
    end = tokenizer.id_of("<|im_end|>")
    ids = [*tokenizer.encode("the dog"), end] + ([] if finish == "stop" else tokenizer.encode(" and more"))
    outputs, _ = run(tokenizer, ids, delta=delta, stop="<|im_end|>", skip_special_tokens=hide, finish=finish)  # type: ignore[arg-type]
    final = outputs[-1].outputs[0]
    assert text_of(outputs, delta) == "the dog"
    assert (final.finish_reason, final.stop_reason) == ("stop", "<|im_end|>")


def test_a_stop_may_span_visible_and_hidden_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the dog"), tokenizer.id_of("<|im_end|>"), *tokenizer.encode("now")]
    outputs, _ = run(tokenizer, ids, delta=True, stop="dog<|im_end|>n")  # type: ignore[arg-type]
    assert text_of(outputs, True) == "the "


def test_held_back_text_is_sent_as_soon_as_it_cannot_become_a_stop(tokenizer: Tokenizer) -> None:
    outputs, _ = run(tokenizer, letters(tokenizer, "xabaz"), delta=True, stop="abab")
    assert [o.outputs[0].text for o in outputs] == ["x", "", "", "", "abaz"]


def test_held_back_text_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    outputs, _ = run(tokenizer, letters(tokenizer, "xab"), delta=True, stop="abc")
    assert text_of(outputs, True) == "xab" and outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("delta", [True, False])
def test_logprobs_of_a_stop_string_are_not_sent_either(tokenizer: Tokenizer, delta: bool) -> None:
    outputs, _ = run(tokenizer, letters(tokenizer, "xyabc"), delta=delta, stop="abc", logprobs=0)
    entries = [e for o in (outputs if delta else outputs[-1:]) for e in o.outputs[0].token_logprobs or ()]
    assert [tokenizer.token_text(e.token) for e in entries] == ["x", "y"]


@pytest.mark.timeout(20)
def test_sixteen_long_stops_cost_little() -> None:
    tokenizer = tiny.octavo(tiny.byte_level())
    stops = ["a" * (240 + i) + "b" for i in range(16)]
    outputs, _ = run(tokenizer, letters(tokenizer, "a" * 3000), delta=True, stop=stops)
    assert text_of(outputs, True) == "a" * 3000
