"""RequestOutput and OutputProcessor: identity of samples, deltas, best_of, logprobs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.request import Event, Request, SamplingParams, TokenLogprobs
from octavo.text.output import OutputProcessor, RequestOutput, merge_deltas
from octavo.text.tokenizer import Tokenizer

from tests.unit import tiny_tokenizers as tiny


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny.octavo(tiny.byte_level())


def request(tokenizer: Tokenizer, id: str = "r", **params: object) -> Request:
    return Request(id=id, prompt=tokenizer.encode("User: hello"), params=SamplingParams(max_tokens=100, **params))  # type: ignore[arg-type]


def entries(ids: list[int], value: float = -1.0) -> list[TokenLogprobs]:
    return [TokenLogprobs(t, value, 1, [t, 7], [value, value - 1]) for t in ids]


def events(id: str, sample: int, ids: list[int], finish: str = "length", value: float = -1.0) -> list[Event]:
    return [
        Event(id, sample, [t], finish if at == len(ids) - 1 else None, logprobs=entries([t], value)) for at, t in enumerate(ids)
    ]


def test_what_vllm_scripts_read_is_there(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer, logprobs=1), "User: hello")
    ids = tokenizer.encode("the dog")
    news = [Event("r", 0, ids[:1], cached_tokens=4, logprobs=entries(ids[:1]), prompt_logprobs=[None, *entries([5])])]
    processor.process(news)
    (out,), aborts = processor.process([Event("r", 0, ids[1:], "length", logprobs=entries(ids[1:]))])
    assert (out.request_id, out.prompt, out.prompt_token_ids) == ("r", "User: hello", tokenizer.encode("User: hello"))
    assert out.finished and out.num_cached_tokens == 4 and not aborts
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None and out.prompt_logprobs[1][5].rank == 1  # type: ignore[index]
    sample = out.outputs[0]
    assert (sample.index, sample.text, sample.token_ids) == (0, "the dog", ids)
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    assert sample.cumulative_logprob == pytest.approx(-len(ids))
    assert sample.logprobs is not None and next(iter(sample.logprobs[0])) == ids[0]
    assert sample.logprobs[0][7].rank == 2 and sample.logprobs[0][7].decoded_token == tokenizer.token_text(7)


@settings(deadline=None, max_examples=80)
@given(
    texts=st.lists(st.text("ab é日🎉.", min_size=1, max_size=8), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    merge=st.booleans(),
)
def test_joined_deltas_equal_the_cumulative_output_sample_by_sample(texts: list[str], order: object, merge: bool) -> None:
    tokenizer = tiny.octavo(tiny.byte_level())
    streams = [events("r", i, tokenizer.encode(t)) for i, t in enumerate(texts)]
    pending = [i for i, s in enumerate(streams) for _ in s]
    order.shuffle(pending)  # type: ignore[attr-defined]
    steps = [streams[i].pop(0) for i in pending]
    delta, whole = OutputProcessor(tokenizer), OutputProcessor(tokenizer)
    delta.add(request(tokenizer, n=len(texts), logprobs=1), None, True)
    whole.add(request(tokenizer, n=len(texts), logprobs=1), None, False)
    pieces: list[RequestOutput] = []
    last = None
    for event in steps:
        pieces += delta.process([event])[0]
        last = whole.process([event])[0][-1]
        assert all(o.index == event.sample for o in pieces[-1].outputs), "every delta carries its own index"
    assert last is not None and last.finished and pieces[-1].finished
    assert [o.finished for o in pieces[:-1]] == [False] * (len(pieces) - 1)
    if merge:
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = merge_deltas(joined, piece)
        pieces = [joined]
    for i, text in enumerate(texts):
        mine = [o for p in pieces for o in p.outputs if o.index == i]
        assert "".join(o.text for o in mine) == text == last.outputs[i].text
        assert [t for o in mine for t in o.token_ids] == last.outputs[i].token_ids
        assert [t for o in mine for t in o.token_logprobs or ()] == last.outputs[i].token_logprobs
        assert [t for o in mine for t in o.text_offsets or ()] == last.outputs[i].text_offsets
        assert [o.finish_reason for o in mine if o.finish_reason] == ["length"]


def test_best_of_returns_the_best_by_mean_logprob_at_the_end_only(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer, n=2, best_of=3), None, True)
    outputs: list[RequestOutput] = []
    # The longest sample has the lowest sum and the best mean.
    for sample, text, value in ((0, "ab", -2.0), (1, "the lazy dog and more", -1.0), (2, "a", -1.5)):
        for event in events("r", sample, tokenizer.encode(text), value=value):
            outputs += processor.process([event])[0]
    (out,) = outputs
    assert out.finished and [(o.index, o.text) for o in out.outputs] == [(0, "the lazy dog and more"), (1, "a")]
    assert out.outputs[0].logprobs is None, "they were computed, not asked for"


def test_final_only_gives_one_output(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer), None, final_only=True)
    outputs = [o for e in events("r", 0, tokenizer.encode("the lazy dog")) for o in processor.process([e])[0]]
    assert [o.outputs[0].text for o in outputs] == ["the lazy dog"]


def test_two_live_requests_are_two_and_an_id_can_be_used_again_after_its_end(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer, "a"))
    processor.add(request(tokenizer, "b"))
    with pytest.raises(ValueError, match="already in use"):
        processor.add(request(tokenizer, "a"))
    outputs, _ = processor.process([Event("a", 0, [9], "length"), Event("b", 0, [10])])
    assert [(o.request_id, o.finished) for o in outputs] == [("a", True), ("b", False)]
    processor.add(request(tokenizer, "a"))
    processor.remove("b")
    processor.remove("b")
    assert processor.process([Event("b", 0, [10]), Event("c", 0, [10])]) == ([], [])


def test_the_models_end_token_is_counted_and_has_no_text(tokenizer: Tokenizer) -> None:
    for hide in (True, False):
        processor = OutputProcessor(tokenizer)
        processor.add(request(tokenizer, skip_special_tokens=hide))
        end = tokenizer.id_of("<|im_end|>")
        (out,), _ = processor.process([Event("r", 0, [*tokenizer.encode("dog"), end], "stop")])  # type: ignore[list-item]
        assert out.outputs[0].text == "dog" and out.outputs[0].token_ids[-1] == end and out.outputs[0].stop_reason is None


def test_a_stop_token_of_the_user_has_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("x")[0]
    for include, text in ((False, "dog"), (True, "dogx")):
        processor = OutputProcessor(tokenizer)
        processor.add(request(tokenizer, stop_token_ids=[stop], include_stop_str_in_output=include))
        (out,), _ = processor.process([Event("r", 0, [*tokenizer.encode("dog"), stop], "stop", stop)])
        assert (out.outputs[0].text, out.outputs[0].stop_reason) == (text, stop)


def test_an_error_names_itself_and_ends_its_request_only(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer, "a"))
    processor.add(request(tokenizer, "b"))
    outputs, _ = processor.process([Event("a", 0, [], "error", error="logits were not finite"), Event("b", 0, [9])])
    assert outputs[0].error == "logits were not finite" and outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].error is None and not outputs[1].finished


def test_an_unfinished_character_is_flushed_with_the_last_delta(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日")[:1]
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer), None, True)
    (first,), _ = processor.process([Event("r", 0, ids)])
    (last,), _ = processor.process([Event("r", 0, [], "length")])
    assert (first.outputs[0].text, last.outputs[0].text) == ("", "\ufffd")


@settings(deadline=None, max_examples=60)
@given(prompt=st.text("ab é日.", min_size=1, max_size=8), text=st.text("ab é日🎉.", min_size=1, max_size=8))
def test_text_offsets_point_where_each_token_starts(prompt: str, text: str) -> None:
    tokenizer = tiny.octavo(tiny.byte_level())
    ids = tokenizer.encode(text)
    processor = OutputProcessor(tokenizer)
    processor.add(Request(id="r", prompt=tokenizer.encode(prompt), params=SamplingParams(logprobs=0)), prompt)
    (out,), _ = processor.process([Event("r", 0, ids, "length", logprobs=entries(ids))])
    for token, offset in zip(ids, out.outputs[0].text_offsets or [], strict=True):
        at = text[offset:].encode().find(tokenizer.token_bytes(token))
        assert 0 <= at < len(text[offset].encode()), "it starts at that character, or inside of it"
