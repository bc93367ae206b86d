"""A stream says what the whole answer says, and its usage comes last."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, alike, ask, stream


@pytest.mark.parametrize(
    "options", [{}, {"n": 3, "seed": 7, "temperature": 1}, {"stop": "e"}, {"logprobs": True, "top_logprobs": 2}]
)
def test_a_chat_stream_joined_is_the_whole_answer(client: httpx.Client, options: dict[str, Any]) -> None:
    body = {**CHAT, **options}
    whole = ask(client, "/v1/chat/completions", body)
    chunks = stream(client, "/v1/chat/completions", body)
    assert chunks[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            joined = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert alike(joined, choice["logprobs"]["content"])


@pytest.mark.parametrize(
    "options", [{}, {"n": 2, "seed": 7, "temperature": 1}, {"logprobs": 3}, {"logprobs": 2, "echo": True}, {"echo": True}]
)
@pytest.mark.parametrize(
    "prompt", ["hello world", ["one", "two", "three"], [10, 20, 30], [[10], [20, 30]]], ids=["text", "texts", "ids", "lists"]
)
def test_a_completion_stream_joined_is_the_whole_answer(client: httpx.Client, prompt: Any, options: dict[str, Any]) -> None:
    body = {**TEXT, "prompt": prompt, **options}
    whole = ask(client, "/v1/completions", body)
    chunks = stream(client, "/v1/completions", body)
    count = (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1) * options.get("n", 1)
    assert [c["index"] for c in whole["choices"]] == list(range(count))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = list(itertools.chain.from_iterable(c["logprobs"][field] for c in mine))
                assert alike(joined, choice["logprobs"][field])


def test_generate_streams_the_texts_that_it_answers_whole(client: httpx.Client) -> None:
    body = {"prompt": "hello", "max_new_tokens": 8, "n": 2, "seed": 3}
    whole = ask(client, "/generate", body)
    chunks = stream(client, "/generate", body)
    texts = ["".join(c["text"] for c in chunks[:-1] if c["index"] == i) for i in range(2)]
    assert texts == whole["text"] and chunks[-1] == "[DONE]"
    assert whole["usage"]["completion_tokens"] == 16


def test_usage_is_the_last_chunk_and_counts_a_prompt_once(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": ["one", "two"], "n": 2, "stream_options": {"include_usage": True}}
    chunks = stream(client, "/v1/completions", body)
    del body["stream_options"]
    whole = ask(client, "/v1/completions", body)
    usage = chunks[-2]["usage"]
    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"] == [] and all(c["usage"] is None for c in chunks[:-2])
    assert usage["completion_tokens"] == 4 * 12
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    solo = sum(ask(client, "/v1/completions", {**TEXT, "prompt": p})["usage"]["prompt_tokens"] for p in ("one", "two"))
    assert usage["prompt_tokens"] == solo


def test_running_usage_grows_to_the_final_one(client: httpx.Client) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = stream(client, "/v1/chat/completions", {**CHAT, **options})
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts == sorted(counts) and counts[-1] == 12
