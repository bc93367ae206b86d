"""What users of the `openai` package see, and what keys separate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import API_KEYS, NAME, Server

MESSAGES: Any = [{"role": "user", "content": "hello world"}]
GREEDY: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=API_KEYS[0], max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=10, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_completion_tokens=10, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert whole.object == "chat.completion" and whole.model == NAME and whole.choices[0].message.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
    assert len({c.id for c in chunks}) == 1 and chunks[0].id != whole.id


def test_chat_logprobs_through_the_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI) -> None:
    for prompt, count in (("hello", 1), (["hello", "world"], 2), ([40, 50], 1), ([[40], [50, 60]], 2)):
        answer = client.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=3, seed=1)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)


def test_stops_end_the_text_before_them_and_say_so(client: openai.OpenAI) -> None:
    text = client.completions.create(model=NAME, prompt="hello", max_tokens=40, **GREEDY).choices[0].text
    stop = next(text[i : i + 3] for i in range(4, 30) if "\ufffd" not in text[i : i + 3])
    expected = text[: text.index(stop)]
    whole = client.completions.create(model=NAME, prompt="hello", max_tokens=40, stop=stop, **GREEDY).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    pieces = list(client.completions.create(model=NAME, prompt="hello", max_tokens=40, stop=[stop], stream=True, **GREEDY))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt-4", prompt="x")
    assert not_found.value.code == "model_not_found" and not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1, stream=True)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tools.value.code == "unsupported" and tools.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as shape:
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format={"type": "json_schema"})
    assert shape.value.param == "response_format.json_schema"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_cached_prefixes_are_shared_within_a_key_and_never_across_keys(server: Server) -> None:
    def cached(key: str, **extra: Any) -> int:
        with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model=NAME, prompt=list(range(100, 164)), max_tokens=1, extra_body=extra)
        found: int = answer.usage.prompt_tokens_details.cached_tokens
        return found

    first, second = API_KEYS
    assert cached(first) == 0 and cached(first) > 0
    assert cached(second) == 0 and cached(second) > 0
    assert cached(first, cache_salt="s") == 0 and cached(first, cache_salt="s") > 0
    assert cached(second, cache_salt="s") == 0 and cached(first, cache_salt="t") == 0


def test_keys_and_texts_are_in_no_log_line(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=NAME, prompt="a-prompt-nobody-logs", max_tokens=2, user="a-user-nobody-logs")
    for secret in (*API_KEYS, "a-prompt-nobody-logs", "a-user-nobody-logs"):
        assert secret not in server.text
    line = server.text.splitlines()[-1]
    assert "/v1/completions ok" in line and "completion=2" in line and "key=key-0" in line
