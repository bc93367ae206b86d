"""Tenants: the file, the table of keys, the quotas (with a clock that the test moves), and all of it over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.quota import Bucket, Quota
from octavo.server.tenant_file import Limits, parse_tenants
from octavo.server.tenants import Tenants

from tests.server.conftest import FLAGS
from tests.server.harness import ADMIN_KEY, NAME, Server, post_raw, until

SECRET = "sk-a-secret-that-is-shown-nowhere"


def one(text: str) -> Any:
    return parse_tenants(text, "FILE")[0]


# ------------------------------------------------------------------ the file


def test_a_tenant_has_a_name_keys_a_weight_and_limits() -> None:
    text = f"""
    tenants:
      - name: team-a
        key: [old-key, new-key]
        weight: 2.5
        limits: {{max_tokens: 64, models: small}}
      - name: team.b
        key_sha256: {hashlib.sha256(b"b-key").hexdigest()}
    """
    first, second = parse_tenants(text, "FILE")
    assert (first.name, first.key, first.weight) == ("team-a", ("old-key", "new-key"), 2.5)
    assert first.limits == Limits(max_tokens=64, models=("small",))
    assert (second.weight, second.limits) == (1.0, Limits())


def test_the_example_of_the_documents_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    example = page.split("## Tenants", 1)[1].split("```yaml", 1)[1].split("```", 1)[0]
    search, trial = parse_tenants(example, "docs/operating.md")
    assert (search.name, search.weight) == ("search", 3)
    assert set(trial.limits.model_dump(exclude_none=True)) == set(Limits.model_fields), "every limit is in the example"
    assert all(f"| `{name}`" in page or f", `{name}` |" in page for name in Limits.model_fields), "and in the table"


def test_json_is_read_too_with_tabs() -> None:
    assert one('{\t"tenants": [{"name": "a", "key": "k"}]}').name == "a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tenants"),
        ("tenants: []", "at least one"),
        ("- name: a", "tenants"),
        ("tenants: [{name: a}]", "key"),
        ("tenants: [{name: '', key: k}]", "tenants[0].name"),
        ("tenants: [{name: 'a b', key: k}]", "tenants[0].name"),
        ("tenants: [{name: a, key: ''}]", "key"),
        ("tenants: [{name: a, key: ' k'}]", "key"),
        ("tenants: [{name: a, key: 5}]", "tenants[0].key"),
        ("tenants: [{name: a, key_sha256: abc}]", "64 hexadecimal"),
        ("tenants: [{name: a, key: k, weight: 0}]", "tenants[0].weight"),
        ("tenants: [{name: a, key: k, weight: .inf}]", "tenants[0].weight"),
        ("tenants: [{name: a, key: k, limits: {max_tokens: 0}}]", "tenants[0].limits.max_tokens"),
        ("tenants: [{name: a, key: k, limits: {max_token: 1}}]", "did you mean 'max_tokens'"),
        ("tenants: [{name: a, kye: k}]", "did you mean 'key'"),
        ("tenants: [{name: a, key: k, limits: {min_priority: 2, max_priority: 1}}]", "min_priority"),
        ("tenants: [{name: a, key: k, limits: {models: []}}]", "tenants[0].limits.models"),
        ("tenants: [{name: a, name: b, key: k}]", "set twice"),
        ('{"tenants": [{"name": "a", "key": "k", "key": "l"}]}', "set twice"),
        ("tenants: [{name: a, key: k}", "not valid YAML"),
        ('{"tenants": [', "not valid JSON"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, "FILE")
    assert str(caught.value).startswith("FILE: ") and says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"tenants: [{{name: a, key: '{SECRET}', weight: x}}]",
        f"tenants: [{{name: '{SECRET} x', key: k}}]",
        f"tenants: [{{name: a, key: k, limits: {{max_tokens: '{SECRET}'}}}}]",
        f"tenants: [{{name: a, key: '{SECRET}\u0007'}}]",
        f"tenants: [{{name: a, key_sha256: '{SECRET}'}}]",
        f"tenants: [{{name: a, '{SECRET}': 1}}]",
        f"tenants: [{{name: a, key: '{SECRET}]",
        f"{SECRET}: {{limits: 1}}",
        f"tenants:\n  - name: a\n    key: {SECRET}\n   weight: 1",
        f'{{"tenants": [{{"name": "a", "key": "{SECRET}" ',
        f"tenants: [{{'{SECRET}': 1, '{SECRET}': 2}}]",
    ],
)
def test_no_error_about_the_file_shows_what_may_be_a_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, "FILE")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__, "a traceback would show it"


def test_keys_are_not_in_a_tenants_repr() -> None:
    entry = one(f"tenants: [{{name: a, key: {SECRET}}}]")
    assert SECRET not in repr(entry) and SECRET not in str(entry)


# ------------------------------------------------------------------ the table of keys


def table(tmp_path: Path, text: str, **config: Any) -> Tenants:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return Tenants(ServerConfig(api_keys_file=str(path), **config))


def test_a_key_or_its_digest_finds_its_tenant(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"two").hexdigest().upper()
    tenants = table(tmp_path, f"tenants: [{{name: a, key: one, weight: 3}}, {{name: b, key_sha256: {digest}}}]")
    assert [tenants.find(key).tenant for key in ("one", "two")] == ["a", "b"]  # type: ignore[union-attr]
    assert tenants.find("one").weight == 3  # type: ignore[union-attr]
    assert tenants.find("three") is None and tenants.find(digest) is None


def test_keys_of_flags_file_and_environment_stand_side_by_side(tmp_path: Path) -> None:
    tenants = table(
        tmp_path, "tenants: [{name: a, key: one}]", api_key=("flag",), api_keys='{"tenants": [{"name": "e", "key": "env"}]}'
    )
    assert tenants.names == ["key-0", "e", "a"]
    assert [tenants.find(key).tenant for key in ("flag", "env", "one")] == ["key-0", "e", "a"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "config", "says"),
    [
        ("tenants: [{name: a, key: x}, {name: a, key: y}]", {}, "'a' is defined twice"),
        ("tenants: [{name: a, key: x}, {name: b, key: x}]", {}, "'a' and 'b' have a key in common"),
        ("tenants: [{name: a, key: x}]", {"api_key": ("x",)}, "have a key in common"),
        ("tenants: [{name: key-0, key: x}]", {"api_key": ("y",)}, "'key-0' is defined twice"),
        ("tenants: [{name: a, key: adm}]", {"admin_api_key": ("adm",)}, "administrator"),
    ],
)
def test_what_would_mix_tenants_up_stops_the_start(tmp_path: Path, text: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        table(tmp_path, text, **config)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants(ServerConfig(api_keys_file=str(tmp_path / "none")))


def test_cache_domains_come_from_the_key_and_differ_between_keys_and_servers(tmp_path: Path) -> None:
    text = "tenants: [{name: a, key: [one, two]}, {name: b, key: three}]"
    tenants, another = table(tmp_path, text), table(tmp_path, text)
    domains = [tenants.find(key).domain for key in ("one", "two", "three")]  # type: ignore[union-attr]
    assert len(set(domains)) == 3 and all(domains)
    assert another.find("one").domain != domains[0]  # type: ignore[union-attr]
    tenants.reload()
    assert tenants.find("one").domain == domains[0]  # type: ignore[union-attr]


def test_a_reload_replaces_the_table_whole_or_not_at_all(tmp_path: Path) -> None:
    tenants = table(tmp_path, "tenants: [{name: a, key: one}, {name: b, key: two}]")
    path = tmp_path / "keys.yaml"
    for broken in ("", "tenants: [{name: a, key: three}, {name: a, key: four}]", "tenants: [{name: c, key: '"):
        path.write_text(broken)
        with pytest.raises(ConfigError):
            tenants.reload()
        assert tenants.names == ["a", "b"] and tenants.find("two") is not None
    path.write_text("tenants: [{name: a, key: three}, {name: c, key: two}]")
    tenants.reload()
    assert tenants.find("one") is None
    assert tenants.find("two").tenant == "c" and tenants.find("three").tenant == "a"  # type: ignore[union-attr]


def test_what_a_tenant_has_used_survives_a_reload_and_new_limits_hold_at_once(tmp_path: Path) -> None:
    tenants = table(tmp_path, "tenants: [{name: a, key: one, limits: {requests_per_minute: 3}}]")
    quota = tenants.find("one").quota  # type: ignore[union-attr]
    for _ in range(3):
        quota.enter()
    tenants.reload()
    with pytest.raises(ApiError):
        tenants.find("one").quota.enter()  # type: ignore[union-attr]
    (tmp_path / "keys.yaml").write_text("tenants: [{name: a, key: one, limits: {requests_per_minute: 5}}]")
    tenants.reload()
    quota.enter()
    quota.enter()
    with pytest.raises(ApiError):
        quota.enter()
    (tmp_path / "keys.yaml").write_text("tenants: [{name: a, key: one}]")
    tenants.reload()
    assert quota.enter() and quota.running == 6


# ------------------------------------------------------------------ quotas


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(quota: Quota, call: Any, *args: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    error = caught.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.param and error.param in error.message and quota.refused[error.param]
    return error


def test_a_bucket_is_full_at_first_and_fills_at_its_rate() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.level == 60
    bucket.use(60)
    assert (bucket.level, bucket.wait(1)) == (0, 1.0)
    clock.now += 30
    assert bucket.level == 30
    clock.now += 3600
    assert bucket.level == 60, "it never holds more than a minute's worth"


def test_requests_a_minute() -> None:
    clock = Clock()
    quota = Quota("a", Limits(requests_per_minute=6), clock)
    for _ in range(6):
        quota.enter().close()
    error = refused(quota, quota.enter)
    assert error.param == "requests_per_minute" and error.headers["Retry-After"] == "10"
    clock.now += 9.9
    assert refused(quota, quota.enter).headers["Retry-After"] == "1"
    clock.now += 0.2
    quota.enter()


def test_concurrent_requests_count_until_they_close_and_once() -> None:
    quota = Quota("a", Limits(max_concurrent_requests=2, requests_per_minute=3), Clock())
    first, _ = quota.enter(), quota.enter()
    assert refused(quota, quota.enter).param == "max_concurrent_requests"
    first.close()
    first.close()
    assert quota.running == 1
    quota.enter()  # the refused one above took nothing of the three a minute
    assert quota.running == 2


def test_tokens_are_charged_as_they_are_used_and_a_debt_is_paid_off_in_time() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=600), clock)
    quota.admit_prompt(500)
    quota.use_tokens(700)  # a long answer: 600 below zero
    error = refused(quota, quota.admit_prompt, 100)
    assert error.param == "tokens_per_minute" and error.headers["Retry-After"] == "70"
    clock.now += 71
    quota.admit_prompt(100)


def test_a_prompt_larger_than_the_whole_budget_waits_for_a_full_one() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=60), clock)
    quota.admit_prompt(150)
    assert refused(quota, quota.admit_prompt, 150).headers["Retry-After"] == "150"
    clock.now += 150
    quota.admit_prompt(150)


def test_over_any_long_time_a_tenant_gets_its_rate_and_no_more() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=1000), clock)
    used = 0
    for _ in range(6000):
        clock.now += 0.1
        try:
            quota.admit_prompt(50)
        except ApiError:
            continue
        quota.use_tokens(70)
        used += 120
    assert used == pytest.approx(1000 * 10 + 1000, rel=0.02)  # ten minutes, and the full bucket of the start


def test_without_limits_nothing_is_refused() -> None:
    quota = Quota("a", Limits(), Clock())
    for _ in range(1000):
        quota.enter()
        quota.admit_prompt(10**6)


# ------------------------------------------------------------------ over HTTP

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
