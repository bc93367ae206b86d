"""Several samples of one prompt, and which request is which."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, ask, stream
from tests.server.harness import Server


def test_samples_of_a_seeded_request_are_its_solo_runs_with_seed_plus_index(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": list(range(20, 37)), "temperature": 1, "seed": 11}
    together = [c["text"] for c in ask(client, "/v1/completions", {**body, "n": 4})["choices"]]
    alone = [ask(client, "/v1/completions", {**body, "seed": 11 + i})["choices"][0]["text"] for i in range(4)]
    assert together == alone and len(set(together)) > 1


def test_samples_that_end_at_different_times_keep_their_own_index(client: httpx.Client) -> None:
    """Random text meets the stop soon in one sample and late, or never, in another."""
    body = {**CHAT, "temperature": 1, "seed": 3, "n": 4, "max_tokens": 60, "stop": ["a", "1"]}
    whole = ask(client, "/v1/chat/completions", body)["choices"]
    chunks = [c["choices"][0] for c in stream(client, "/v1/chat/completions", body)[:-1]]
    ends = [(i, c["index"]) for i, c in enumerate(chunks) if c["finish_reason"]]
    assert sorted(index for _, index in ends) == [0, 1, 2, 3] and len({c["message"]["content"] for c in whole}) > 1
    for at, index in ends:
        assert not [c for c in chunks[at + 1 :] if c["index"] == index], "nothing follows a sample's end"
        text = "".join(c["delta"].get("content") or "" for c in chunks if c["index"] == index)
        assert (text, chunks[at]["finish_reason"]) == (whole[index]["message"]["content"], whole[index]["finish_reason"])


def test_unseeded_samples_differ(client: httpx.Client) -> None:
    texts = [c["text"] for c in ask(client, "/v1/completions", {**TEXT, "temperature": 1, "n": 4})["choices"]]
    assert len(set(texts)) > 1


def test_best_of_returns_the_most_likely_of_its_samples(client: httpx.Client) -> None:
    body = {**TEXT, "temperature": 1, "seed": 5, "logprobs": 0}
    every = ask(client, "/v1/completions", {**body, "n": 6})["choices"]
    best = ask(client, "/v1/completions", {**body, "n": 2, "best_of": 6})["choices"]
    by_mean = sorted(every, key=lambda c: -sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]))
    assert [c["text"] for c in best] == [c["text"] for c in by_mean[:2]]
    assert [c["index"] for c in best] == [0, 1]


def test_live_requests_may_share_a_client_id_which_is_only_echoed(server: Server) -> None:
    def one(results: list[httpx.Response]) -> None:
        with server.client() as client:
            results.append(client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "same"}))

    results: list[httpx.Response] = []
    threads = [threading.Thread(target=one, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.status_code for r in results] == [200] * 4
    assert {r.headers["x-request-id"] for r in results} == {"same"}
    assert len({r.json()["id"] for r in results}) == 4
    assert "same" not in server.text


@pytest.mark.parametrize("wrong", ["x" * 200, "a b", "é"])
def test_a_client_id_that_is_no_id_is_replaced_by_ours(client: httpx.Client, wrong: str) -> None:
    response = client.get("/v1/models", headers={"X-Request-Id": wrong.encode()})
    assert response.headers["x-request-id"].isalnum()
