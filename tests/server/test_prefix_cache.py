"""Warm prefixes over a real server: from the file at the start and over /admin/prefix-cache; tenants share them and nothing else."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.cache.prefix import PUBLIC
from octavo.server.runs import _domain

from tests.server.harness import ADMIN_KEY, API_KEYS, NAME, Server

PREFIX = "The quick brown fox jumps over the lazy dog. " * 56  # about 2,100 tokens
SYSTEM = {"role": "system", "content": "You are a patient assistant of a small library. " * 10}


@pytest.fixture(scope="module")
def warm(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("warm")
    file = folder / "prefixes.yaml"
    file.write_text(json.dumps([PREFIX, {"messages": [SYSTEM], "pin": True}]))  # JSON is YAML
    keys = [flag for key in API_KEYS for flag in ("--api-key", key)]
    flags = ("--warm-prefixes", str(file), "--admin-api-key", ADMIN_KEY, "--block-size", "16", "--max-num-seqs", "4")
    running = Server(long_tiny, folder / "log", *flags, "--num-gpu-blocks-override", "500", *keys)
    try:
        yield running.ready()
    finally:
        running.stop()


def complete(server: Server, prompt: str, key: str = API_KEYS[0]) -> tuple[int, int]:
    """(prompt tokens, those of them that were cached)."""
    with server.client(key) as client:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def admin(server: Server, method: str, body: Any = None, **query: Any) -> httpx.Response:
    with server.client(ADMIN_KEY) as client:
        return client.request(method, "/admin/prefix-cache", json=body, params=query)


def test_the_first_real_request_of_every_tenant_finds_the_warm_prefix(warm: Server) -> None:
    """Under a quarter of the prompt is computed: the time to the first token falls with it (at least 76%)."""
    for tenant, key in enumerate(API_KEYS):
        prompt, cached = complete(warm, f"{PREFIX} Tenant {tenant} asks.", key)
        assert prompt > 2048 and (prompt - cached) / prompt < 0.24
    assert "2 prefixes of" in warm.text and "tokens pinned" in warm.text


def test_a_conversation_that_begins_with_warm_messages_hits_them(warm: Server) -> None:
    with warm.client() as client:
        body = {"model": NAME, "messages": [SYSTEM, {"role": "user", "content": "hello"}], "max_tokens": 1}
        usage = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 40


def test_what_a_tenant_sends_stays_its_own(warm: Server) -> None:
    prompt = "A private matter of the first tenant, which nobody else may find out about by timing. " * 3
    assert complete(warm, prompt, API_KEYS[0])[1] == 0
    assert complete(warm, prompt, API_KEYS[0])[1] > 0
    assert complete(warm, prompt, API_KEYS[1])[1] == 0


@given(
    st.text(max_size=40),
    st.text(min_size=1, max_size=80),
    st.text(max_size=40),
    st.one_of(st.none(), st.text(min_size=1, max_size=80)),
)
def test_a_clients_salt_can_only_narrow_what_its_key_may_read(
    domain: str, salt: str, other: str, others_salt: str | None
) -> None:
    """Whatever is sent as cache_salt, another tenant's domain or the name of the public one included. Domains of keys are
    hexadecimal; without keys all have the empty one."""
    mine, theirs = (hashlib.sha256(name.encode()).hexdigest()[:32] if name else "" for name in (domain, other))
    for sent in (salt, theirs or "x", PUBLIC, f"/{theirs}"):
        narrowed = _domain(mine, sent)
        assert narrowed not in (mine, theirs, PUBLIC)
        assert (narrowed == _domain(theirs, others_salt)) == (mine == theirs and sent == others_salt)


def test_warm_pin_unpin_and_state_over_http(warm: Server) -> None:
    text = "An announcement that will be asked about all day long, by everybody. " * 5
    before = admin(warm, "GET").json()
    answer = admin(warm, "POST", {"action": "pin", "prefixes": [text]}).raise_for_status().json()
    (result,) = answer["results"]
    assert result["pinned"] == result["tokens"] // 16 * 16 > 0 and result["cached"] == 0 and result["note"] == ""
    after = admin(warm, "GET").json()
    assert after["pinned_blocks"] - before["pinned_blocks"] == result["pinned"] // 16
    assert complete(warm, text + "?", API_KEYS[1])[1] == result["pinned"]
    (again,) = admin(warm, "POST", {"action": "warm", "prefixes": [{"prompt": text}]}).json()["results"]
    assert again["cached"] > 0
    (let_go,) = admin(warm, "POST", {"action": "unpin", "prefixes": [text]}).json()["results"]
    assert let_go["pinned"] == result["pinned"]
    assert admin(warm, "GET").json()["pinned_blocks"] == before["pinned_blocks"]
    (nothing,) = admin(warm, "POST", {"action": "unpin", "prefixes": [text]}).json()["results"]
    assert nothing["pinned"] == 0 and "was not pinned" in nothing["note"]


def test_a_pin_that_would_leave_less_than_one_context_says_so(warm: Server) -> None:
    """500 blocks, of which one request of 4,096 tokens needs 256."""
    big = ["".join(chr(97 + (i * j) % 26) for i in range(3000)) for j in (1, 3)]
    results = admin(warm, "POST", {"action": "pin", "prefixes": big}).json()["results"]
    assert [r["pinned"] > 0 for r in results] == [True, False]
    assert "would not hold" in results[-1]["note"]
    admin(warm, "POST", {"action": "unpin", "prefixes": big})


def test_a_pin_that_fills_no_block_says_so(warm: Server) -> None:
    (result,) = admin(warm, "POST", {"action": "pin", "prefixes": ["short"]}).json()["results"]
    assert result["tokens"] < 16 and result["pinned"] == 0
    assert "does not fill one KV block" in result["note"] and "would not hold" not in result["note"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"action": "pin", "prefixes": []}, "prefixes"),
        ({"action": "burn", "prefixes": ["x"]}, "action"),
        ({"action": "warm", "prefixes": [{"text": "x"}]}, "unknown key 'text'"),
        ({"action": "warm", "prefixes": ["x" * 5000]}, "maximum context length"),
    ],
)
def test_a_wrong_order_is_told_what_is_wrong(warm: Server, body: Any, words: str) -> None:
    response = admin(warm, "POST", body)
    assert response.status_code == 400 and words in response.text


def test_a_reset_forgets_prefixes_and_computes_pins_again(warm: Server) -> None:
    before = admin(warm, "GET").json()
    assert before["pins"]
    state = admin(warm, "DELETE").raise_for_status().json()
    assert state["cached_blocks"] == 0
    for _ in range(200):
        if state["pins"] == before["pins"] and not state["pins_returning"]:
            break
        time.sleep(0.05)
        state = admin(warm, "GET").json()
    assert state["pins"] == before["pins"] and state["pinned_blocks"] == before["pinned_blocks"]


def test_a_reset_with_pins_forgets_those_too(warm: Server) -> None:
    """Last of this file: it takes the warm prefixes with it."""
    state = admin(warm, "DELETE", pins=True).raise_for_status().json()
    assert state["cached_blocks"] == state["pinned_blocks"] == state["pins_returning"] == 0 and state["pins"] == {}
    assert complete(warm, f"{PREFIX} Once more.")[1] == 0


def test_the_admin_key_is_needed(warm: Server) -> None:
    with warm.client(API_KEYS[0]) as client:
        for method in ("GET", "POST", "DELETE"):
            assert client.request(method, "/admin/prefix-cache").status_code == 403
