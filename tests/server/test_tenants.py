"""Tenants over HTTP: keys, limits, deadlines, sharing and reload."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.models import ModelTable
from octavo.server.serve import _warn_of_tenants
from octavo.server.service import Service

from tests.server.conftest import FLAGS
from tests.server.harness import ADMIN_KEY, NAME, Server, post_raw, until

SECRET = "sk-a-secret-that-is-shown-nowhere"
TENANTS: dict[str, dict[str, Any]] = {
    "free": {"max_tokens": 20, "max_input_tokens": 40, "min_priority": 2, "max_priority": 5, "models": [NAME]},
    "few": {"requests_per_minute": 3},
    "narrow": {"max_concurrent_requests": 1},
    "metered": {"tokens_per_minute": 60},
    "elsewhere": {"models": ["another/model"]},
    "open": {},
}


def key(name: str) -> str:
    return f"sk-{name}-sixteen-bytes"


def write(path: Path, names: list[str], **weights: float) -> None:
    rows = [{"name": n, "key": key(n), "limits": TENANTS.get(n, {}), "weight": weights.get(n, 1.0)} for n in names]
    path.write_text(json.dumps({"tenants": rows}))


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "keys.json"
    write(path, [*TENANTS, "flood", "quiet"], quiet=1.0)
    return path


@pytest.fixture(scope="module")
def tenanted(long_tiny: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose keys come from a file. One request at a time runs, so that sharing shows."""
    flags = [*FLAGS, "--admin-api-key", ADMIN_KEY, "--api-keys-file", str(keys_file), "--scheduling-policy", "priority"]
    flags[flags.index("--max-num-seqs") + 1] = "2"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OCTAVO_API_KEYS", json.dumps({"tenants": [{"name": "environ", "key": key("environ")}]}))
        running = Server(long_tiny, tmp_path_factory.mktemp("tenanted") / "log", *flags)
    try:
        yield running.ready()
    finally:
        running.stop()


def ask(
    server: Server, name: str, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    fields = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 2, **body}
    with server.client(key(name)) as client:
        return client.post(path, json={k: v for k, v in fields.items() if v is not None}, headers=headers or {})


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_keys_of_the_file_open_the_server_and_others_do_not(tenanted: Server) -> None:
    assert ask(tenanted, "open").status_code == 200
    assert error_of(ask(tenanted, "nobody"), 401)["code"] == "invalid_api_key"


def test_keys_of_the_environment_open_it_too_and_stay_in_the_servers_process(tenanted: Server) -> None:
    assert ask(tenanted, "environ").status_code == 200
    assert key("environ") not in str(tenanted.engine().environ())


def test_more_tokens_than_the_key_may_ask_for_are_refused_and_an_omitted_number_is_cut_down(tenanted: Server) -> None:
    error = error_of(ask(tenanted, "free", max_tokens=21), 400)
    assert (error["code"], error["param"]) == ("limit_exceeded", "max_tokens") and "max_tokens of 20" in error["message"]
    chat = {"prompt": None, "max_tokens": None, "messages": [{"role": "user", "content": "x"}]}
    error = error_of(ask(tenanted, "free", "/v1/chat/completions", **chat, max_completion_tokens=21), 400)
    assert error["param"] == "max_completion_tokens"
    assert error_of(ask(tenanted, "free", "/generate", max_tokens=None, max_new_tokens=21), 400)["param"] == "max_new_tokens"
    assert error_of(ask(tenanted, "free", max_tokens=None, min_tokens=21), 400)["param"] == "min_tokens"
    answer = ask(tenanted, "free", "/v1/chat/completions", **chat).json()
    assert answer["usage"]["completion_tokens"] == 20 and answer["choices"][0]["finish_reason"] == "length"


def test_a_longer_prompt_than_the_key_may_send_is_refused(tenanted: Server) -> None:
    assert ask(tenanted, "free", prompt=[9] * 40).status_code == 200
    error = error_of(ask(tenanted, "free", prompt=["x", "x" * 60]), 400)
    assert (error["code"], error["param"]) == ("limit_exceeded", "prompt") and "max_input_tokens of 40" in error["message"]
    messages = [{"role": "user", "content": "x" * 60}]
    assert error_of(ask(tenanted, "free", "/v1/chat/completions", prompt=None, messages=messages), 400)["param"] == "messages"


def test_a_priority_outside_the_keys_range_is_refused(tenanted: Server) -> None:
    for value, status in ((2, 200), (5, 200), (1, 400), (0, 400), (6, 400)):
        assert ask(tenanted, "free", priority=value).status_code == status
        assert ask(tenanted, "free", headers={"x-octavo-priority": str(value)}).status_code == status
    assert ask(tenanted, "free").status_code == 200, "without one it gets the best that it may have"


def test_a_limit_to_a_model_that_is_not_served_is_a_warning(tenanted: Server) -> None:
    warnings = [line for line in tenanted.text.splitlines() if "which this server does not serve" in line]
    assert len(warnings) >= 1 and all("tenant 'elsewhere' may use another/model" in line for line in warnings)


def test_a_range_of_priorities_that_no_model_heeds_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    keys = "tenants: [{name: free, key: k1, limits: {min_priority: 2}}, {name: plain, key: k2}]"
    state = Service(ServerConfig(api_keys=keys), ["m"])
    for policy, warned in (("fcfs", True), ("priority", False)):
        caplog.clear()
        engine = SimpleNamespace(config=EngineConfig(scheduling_policy=policy))
        state.models = cast(ModelTable, SimpleNamespace(names=["m"], models=[engine]))
        _warn_of_tenants(state)
        assert ("min_priority and max_priority of free count with --scheduling-policy priority alone" in caplog.text) is warned


def test_a_key_sees_and_uses_its_models_only(tenanted: Server) -> None:
    with tenanted.client(key("elsewhere")) as client:
        assert client.get("/v1/models").json()["data"] == []
        assert error_of(client.get(f"/v1/models/{NAME}"), 403)["code"] == "model_not_allowed"
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [9]}), ("/generate", {"prompt": "x"})):
            assert error_of(client.post(path, json=body), 403)["param"] == "model"
    assert error_of(ask(tenanted, "elsewhere", model=NAME), 403)["code"] == "model_not_allowed"
    assert error_of(ask(tenanted, "free", model="another/model"), 404)["code"] == "model_not_found"
    with tenanted.client(key("free")) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [NAME]


def test_too_many_requests_a_minute_are_429_with_the_limits_name_and_a_time(tenanted: Server) -> None:
    assert [ask(tenanted, "few").status_code for _ in range(3)] == [200] * 3
    for options in ({}, {"stream": True}):
        response = ask(tenanted, "few", **options)
        error = error_of(response, 429)
        assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
        assert error["param"] == "requests_per_minute" and "requests_per_minute" in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 20
    with tenanted.client(key("few")) as client:
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 429
    assert ask(tenanted, "open").status_code == 200, "nobody else is held up"


def test_a_second_request_at_a_time_is_429_until_the_first_ends_however_it_ends(tenanted: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    for _ in range(2):
        with post_raw(tenanted, "/v1/completions", body, key("narrow")) as sock:
            sock.recv(100)
            response = ask(tenanted, "narrow")
            assert error_of(response, 429)["param"] == "max_concurrent_requests" and response.headers["retry-after"] == "1"
        until(lambda: ask(tenanted, "narrow").status_code == 200, 2, "the place is free again")
    assert ask(tenanted, "narrow", max_tokens=-1).status_code == 400
    assert ask(tenanted, "narrow").status_code == 200, "a refused request gives its place back as well"


def test_prompts_and_answers_both_count_against_tokens_a_minute(tenanted: Server) -> None:
    assert ask(tenanted, "metered", prompt=[9] * 30, max_tokens=40).status_code == 200
    response = ask(tenanted, "metered", prompt=[9] * 10)
    assert error_of(response, 429)["param"] == "tokens_per_minute"
    assert 15 <= int(response.headers["retry-after"]) <= 20  # 10 too many, and 10 for the prompt, at one a second


def test_the_openai_client_sees_a_rate_limit_as_its_own_exception(tenanted: Server) -> None:
    with (
        openai.OpenAI(base_url=tenanted.url + "/v1", api_key=key("metered"), max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model=NAME, prompt=[9] * 60)
    assert caught.value.code == "rate_limit_exceeded" and int(caught.value.response.headers["retry-after"]) > 0


# ------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_with_an_error_of_its_own(tenanted: Server, header: bool, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 4000, "stream": stream}
    where = {"headers": {"x-octavo-deadline": "0.4"}} if header else {"deadline": 0.4}
    began = time.monotonic()
    response = ask(tenanted, "open", **body, **where)  # type: ignore[arg-type]
    assert 0.35 < time.monotonic() - began < 2
    if stream:
        last = [line for line in response.text.splitlines() if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "[DONE]" not in response.text and '"finish_reason":"' not in response.text
    else:
        error = error_of(response, 504)
        assert response.headers["x-should-retry"] == "false"
    assert (error["code"], error["param"]) == ("deadline_exceeded", "deadline")
    tenanted.idle(2)


def test_a_deadline_ends_a_request_that_still_waits(tenanted: Server) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    socks = [post_raw(tenanted, "/v1/completions", body, key("open")) for _ in range(2)]
    until(lambda: tenanted.gauges()["running"] == 2, 10, "the batch is full")
    began = time.monotonic()
    assert error_of(ask(tenanted, "open", deadline=0.3), 504)["code"] == "deadline_exceeded"
    assert time.monotonic() - began < 2
    for sock in socks:
        sock.close()
    tenanted.idle(2)


def test_a_deadline_that_is_kept_changes_nothing(tenanted: Server) -> None:
    plain = ask(tenanted, "open").json()["choices"]
    assert ask(tenanted, "open", deadline=60).json()["choices"] == plain


def test_the_openai_client_sends_a_deadline_and_does_not_try_again(tenanted: Server) -> None:
    with openai.OpenAI(base_url=tenanted.url + "/v1", api_key=key("open"), max_retries=3) as client:
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(
                model=NAME, prompt="x", max_tokens=4000, extra_body={"deadline": 0.3, "ignore_eos": True, "priority": 1}
            )
    assert caught.value.code == "deadline_exceeded" and time.monotonic() - began < 1.2


@pytest.mark.parametrize("value", [0, -1, 1e9, "soon"])
def test_a_deadline_that_is_no_time_is_refused(tenanted: Server, value: Any) -> None:
    assert error_of(ask(tenanted, "open", deadline=value), 400)["param"] == "deadline"
    assert error_of(ask(tenanted, "open", headers={"x-octavo-deadline": str(value)}), 400)["param"] == "x-octavo-deadline"
    assert ask(tenanted, "open", headers={"x-octavo-deadline": "nan"}).status_code == 400


# ------------------------------------------------------------------ sharing, reload, secrets


def test_a_flood_of_one_tenant_does_not_hold_up_another(tenanted: Server) -> None:
    """Two places; one tenant sends forty requests at once. Another's, sent when the first of them has ended, does not wait for the rest."""

    async def flood() -> tuple[list[float], float, float]:
        began = time.monotonic()

        async def one(client: httpx.AsyncClient, name: str) -> float:
            body = {"prompt": f"{name} {time.monotonic()}", "max_tokens": 40, "ignore_eos": True, "model": NAME}
            response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key(name)}"})
            assert response.status_code == 200
            return time.monotonic() - began

        async with httpx.AsyncClient(base_url=tenanted.url, timeout=60, limits=httpx.Limits(max_connections=100)) as client:
            many = [asyncio.create_task(one(client, "flood")) for _ in range(40)]
            await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
            sent = time.monotonic() - began
            quiet = await one(client, "quiet")
            return sorted(await asyncio.gather(*many)), sent, quiet

    ends, sent, quiet = asyncio.run(flood())
    between = sum(sent < end < quiet for end in ends)
    assert between < 10, (
        f"{between} of 40 ended while the other tenant waited: sent at {sent:.2f} s, ended at {quiet:.2f} s of {ends[-1]:.2f} s"
    )


def test_sighup_reads_the_file_again_and_a_broken_one_changes_nothing(tenanted: Server, keys_file: Path) -> None:
    def reload(line: str) -> None:
        before = tenanted.text.count(line)
        tenanted.signal(signal.SIGHUP)
        until(lambda: tenanted.text.count(line) > before, 3, line)

    keys_file.write_text(f"tenants: [{{name: open, key: {SECRET}, weight: heavy}}]")
    reload("the tenants stay as they were")
    assert ask(tenanted, "open").status_code == 200
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: ask(tenanted, "quiet", **body))
        time.sleep(0.2)
        write(keys_file, ["open", "newcomer"])
        reload("tenants reloaded: 3 in force; new: newcomer; gone: ")
        assert running.result().status_code == 200, "a request that runs is not touched"
    assert ask(tenanted, "newcomer").status_code == 200
    assert ask(tenanted, "quiet").status_code == 401
    assert SECRET not in tenanted.text


def test_a_tenant_sees_its_own_share_in_the_metrics_and_an_administrator_everybodys(tenanted: Server) -> None:
    with tenanted.client(key("open")) as client:
        mine = client.get("/metrics").text
    with tenanted.client(ADMIN_KEY) as client:
        everything = client.get("/metrics").text
    assert 'tenant="open"' in mine and 'tenant="flood"' not in mine and 'tenant="few"' not in mine
    assert 'tenant="open"' in everything and 'tenant="flood"' in everything


def test_no_key_is_in_the_log_or_the_metrics_and_tenants_are_known_by_name(tenanted: Server) -> None:
    with tenanted.client(key("open")) as client:
        page = client.get("/metrics").text
    for name in [*TENANTS, "flood", "quiet", "newcomer"]:
        assert key(name) not in tenanted.text and key(name) not in page
        assert hashlib.sha256(key(name).encode()).hexdigest() not in tenanted.text + page
    assert "key=flood" in tenanted.text
