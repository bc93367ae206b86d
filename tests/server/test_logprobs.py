"""Values of tokens: their shape, their bytes, an echoed prompt's, and that they are transformers' own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, alike, ask, stream


def test_chat_logprobs_hold_the_token_its_bytes_and_as_many_alternatives_as_asked(client: httpx.Client) -> None:
    for top in (None, 0, 2, 20):
        options = {} if top is None else {"top_logprobs": top}
        choice = ask(client, "/v1/chat/completions", {**CHAT, "logprobs": True, **options})["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 12
        raw = b"".join(bytes(entry["bytes"]) for entry in content)
        assert raw.decode("utf-8", "replace") == choice["message"]["content"]
        for entry in content:
            assert len(entry["top_logprobs"]) == (top or 0)
            assert entry["logprob"] <= 0
            if top:
                assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy takes the best
    assert ask(client, "/v1/chat/completions", CHAT)["choices"][0]["logprobs"] is None


def test_a_token_that_is_part_of_a_character_shows_its_bytes(client: httpx.Client) -> None:
    body = {**CHAT, "logit_bias": {str(8 + 0xE2 - 0): 0.0}, "logprobs": True, "max_tokens": 60}
    content = ask(client, "/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    partial = [entry for entry in content if entry["token"].startswith("bytes:")]
    assert partial, "a random byte-level model emits broken UTF-8 within 60 tokens"
    for entry in partial:
        assert entry["token"] == "bytes:" + "".join(f"\\x{b:02x}" for b in entry["bytes"])


def test_completion_logprobs_of_zero_still_hold_the_chosen_tokens_value(client: httpx.Client) -> None:
    logprobs = ask(client, "/v1/completions", {**TEXT, "logprobs": 0})["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 12
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[value] for value in logprobs["token_logprobs"]]


def test_text_offsets_count_from_the_start_of_the_prompt(client: httpx.Client) -> None:
    plain = ask(client, "/v1/completions", {**TEXT, "logprobs": 0})["choices"][0]
    echoed = ask(client, "/v1/completions", {**TEXT, "logprobs": 0, "echo": True})["choices"][0]
    assert plain["logprobs"]["text_offset"][0] == len(TEXT["prompt"])
    assert echoed["text"] == TEXT["prompt"] + plain["text"]
    assert echoed["logprobs"]["text_offset"][-12:] == plain["logprobs"]["text_offset"]
    assert echoed["logprobs"]["text_offset"][0] == 0 and echoed["logprobs"]["token_logprobs"][0] is None
    offsets, tokens = echoed["logprobs"]["text_offset"], echoed["logprobs"]["tokens"]
    for before, offset, token in zip(["", *tokens], offsets, tokens, strict=False):
        if token.isascii() and not token.startswith(("bytes:", "<|")) and not before.startswith("bytes:"):
            assert echoed["text"][offset : offset + len(token)] == token


def test_echo_alone_is_the_prompt_and_its_values(client: httpx.Client) -> None:
    answer = ask(client, "/v1/completions", {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1})
    choice = answer["choices"][0]
    assert choice["text"] == TEXT["prompt"] and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


def test_values_of_a_prompt_come_once_in_a_stream_and_equal_the_whole_answers(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": [9] * 200, "prompt_logprobs": 3, "n": 2}
    whole = ask(client, "/v1/completions", body)["choices"]
    chunks = [c["choices"][0] for c in stream(client, "/v1/completions", body)[:-1]]
    for index in (0, 1):
        found = [c["prompt_logprobs"] for c in chunks if c["index"] == index and "prompt_logprobs" in c]
        assert len(found) == 1 and alike(found[0], whole[index]["prompt_logprobs"]) and len(found[0]) == 200


def test_more_values_of_a_prompt_than_one_answer_holds_are_refused() -> None:
    from octavo.errors import RequestError
    from octavo.request import ModelInfo, SamplingParams
    from octavo.server.limits import MAX_PROMPT_VALUES
    from octavo.server.runs import resolve

    info = ModelInfo(
        model="m", vocab_size=512, max_model_len=1 << 20, num_blocks=1, block_size=1, kv_cache_tokens=1, dtype="float32"
    )
    ids = [9] * (MAX_PROMPT_VALUES // 21)
    assert resolve(ids, SamplingParams(prompt_logprobs=20), info).prompt_logprobs == 20
    with pytest.raises(RequestError) as caught:
        resolve([*ids, 9, 9], SamplingParams(prompt_logprobs=20), info)
    assert caught.value.param == "prompt_logprobs"


def test_logprobs_are_those_of_transformers(client: httpx.Client, long_tiny: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [1, 40, 50, 60, 300, 310]
    answer = ask(client, "/v1/completions", {**TEXT, "prompt": ids, "echo": True, "logprobs": 1, "add_special_tokens": False})
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    found = ask(client, "/v1/completions", {**TEXT, "prompt": ids, "prompt_logprobs": 0})["choices"][0]["prompt_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(long_tiny, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for _ in range(12):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logits[i - 1, token]) for i, token in enumerate(ids) if i]
    assert values[0] is None and found[0] is None
    assert values[1:] == pytest.approx(expected, abs=1e-3)
    assert [entry[str(token)]["logprob"] for entry, token in zip(found[1:], ids[1:6], strict=True)] == pytest.approx(
        expected[:5], abs=1e-3
    )
