"""Models come, take over and go under load: /admin/models over real engines."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import ADMIN_KEY, API_KEYS, NAME, Server, events, until
from tests.tiny import tiny_llama

GREEDY = {"prompt": "hello world", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 3000, "stream": True}
SIZE = ("--block-size", "16", "--num-gpu-blocks-override", "3000", "--max-num-seqs", "64", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same geometry with other weights."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "other", max_position_embeddings=4096, seed=7)


@pytest.fixture(scope="module")
def server(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("swap") / "log"
    running = Server(long_tiny, log, *SIZE, "--api-key", API_KEYS[0], "--admin-api-key", ADMIN_KEY, "--num-threads", "1")
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.fixture
def admin(server: Server) -> Iterator[httpx.Client]:
    """The administrator; afterwards there are the two models of this module, and no aliases."""
    with server.client(ADMIN_KEY) as client:
        yield client
        client.post(f"/admin/models/{NAME}/default")
        state = client.get("/admin/models").json()
        for alias in state["aliases"]:
            client.delete(f"/admin/aliases/{alias}").raise_for_status()
        for model in state["models"]:
            if model["name"] not in (NAME, "second"):
                client.delete(f"/admin/models/{model['name']}", params={"timeout": 0}).raise_for_status()


@pytest.fixture(scope="module")
def second(server: Server, other: Path) -> str:
    """The name of a second model, added while the server serves."""
    with server.client(ADMIN_KEY) as client:
        answer = add(client, "second", other, settings=SETTINGS)
    assert answer.status_code == 201 and answer.json()["state"] == "serving", answer.text
    return "second"


def text(server: Server, model: str | None = None, **over: Any) -> str:
    """The greedy continuation, from the model of a name or from the default."""
    with server.client() as client:
        answer = client.post("/v1/completions", json={**GREEDY, **({"model": model} if model else {}), **over})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])


def add(admin: httpx.Client, name: str, path: Path, **options: Any) -> httpx.Response:
    return admin.post("/admin/models", json={"name": name, "model": str(path), **options})


def names(admin: httpx.Client) -> list[str]:
    return [model["name"] for model in admin.get("/admin/models").json()["models"]]


SETTINGS = {"block_size": 16, "num_gpu_blocks_override": 3000}


def test_a_model_added_beside_another_answers_to_its_own_name(server: Server, second: str) -> None:
    assert text(server, second) != text(server) == text(server, NAME)
    with server.client() as client:
        listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert listed == [NAME, "second"]
        missing = client.post("/v1/completions", json={**GREEDY, "model": "third"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        assert "second" in missing.json()["error"]["message"]
    page = httpx.get(server.url + "/metrics", headers={"Authorization": f"Bearer {API_KEYS[0]}"}).text
    assert 'octavo_engine_up{engine="0",model_name="second"} 1.0' in page


def test_every_switch_under_fifty_streams_takes_less_than_200_ms_and_loses_none(
    server: Server, admin: httpx.Client, second: str
) -> None:
    """From the administrator's request to the first token of the new default. Three switches, and of three tries one in which
    all of them hold: the machine may have other things to do. What must never happen is asked of every try."""
    tries = []
    for _ in range(3):
        tries.append(switches_under_fifty_streams(server, admin, second))
        print(f"switches under 50 streams, to the first token: {', '.join(f'{1000 * wait:.0f} ms' for wait in tries[-1])}")
        if max(tries[-1]) < 0.2:
            return
    pytest.fail(f"seconds of the switches: {tries}")


def switches_under_fifty_streams(server: Server, admin: httpx.Client, second: str) -> list[float]:
    """Seconds that each of three switches took. Every stream runs to its end where it began."""
    admin.post(f"/admin/models/{NAME}/default").raise_for_status()
    stop = threading.Event()
    answered: Counter[str] = Counter()
    running = threading.Barrier(51)

    def stream(_: int) -> tuple[str, int, Any]:
        """One long stream: who answered, how many events, the last one."""
        count, last = 0, ""
        with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 150}) as response:
            assert response.status_code == 200, response.read()
            for event in events(response.iter_lines()):
                count, last = count + 1, event
                if count == 1:
                    running.wait(60)
            return response.headers["x-octavo-model"], count, last

    def short() -> None:
        """Requests that name no model, one after the other, before, during and after every switch."""
        with server.client() as client:
            while not stop.is_set():
                answer = client.post("/v1/completions", json={**GREEDY, "max_tokens": 2})
                assert answer.status_code == 200, answer.text
                answered[answer.headers["x-octavo-model"]] += 1

    def switch(name: str) -> float:
        """Seconds from the administrator's request to the first token of the new default."""
        with server.client() as client:
            began = time.perf_counter()
            admin.post(f"/admin/models/{name}/default").raise_for_status()
            with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 8}) as response:
                lines = events(response.iter_lines())
                next(lines)
                seconds = time.perf_counter() - began
                assert response.headers["x-octavo-model"] == name
                assert list(lines)[-1] == "[DONE]"
        return seconds

    with concurrent.futures.ThreadPoolExecutor(52) as pool:
        streams = [pool.submit(stream, i) for i in range(50)]
        running.wait(60)  # every stream has begun
        background = pool.submit(short)
        until(lambda: answered[NAME], 30, "the old model answers")
        waits = [switch(name) for name in (second, NAME, second)]
        until(lambda: answered[second], 30, "the new model answers")
        stop.set()
        background.result()
        ended = [one.result() for one in streams]
    assert {(who, last) for who, _, last in ended} == {(NAME, "[DONE]")}  # each ran to its end where it had begun
    assert text(server) == text(server, second) != text(server, NAME)
    return waits


def test_a_replaced_model_keeps_its_name_and_nothing_of_its_cache(
    server: Server, admin: httpx.Client, second: str, long_tiny: Path, other: Path
) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 8
    add(admin, "live", long_tiny, settings={**SETTINGS, "dynamic_memory": True}).raise_for_status()

    def ask(name: str) -> tuple[str, int]:
        with server.client() as client:
            answer = client.post("/v1/completions", json={**GREEDY, "prompt": prompt, "model": name}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    ask("live")
    old, cached = ask("live")
    assert cached > 0
    before = next(m for m in admin.get("/admin/models").json()["models"] if m["name"] == "live")
    body = {**LONG, "max_tokens": 400, "model": "live"}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = events(response.iter_lines())
        next(lines)
        replaced = add(admin, "live", other, replace=True, make_room=True)  # returns while the old engine's stream still runs
        assert replaced.status_code == 201, replaced.text
        assert replaced.json()["generation"] > before["generation"]
        cold, cached = ask("live")
        assert cached == 0 and cold == ask(second)[0] != old
        gone = admin.get("/admin/models").json()["leaving"]
        assert all(model["blocks"] < before["blocks"] for model in gone)  # it gave up what its requests did not hold
        assert list(lines)[-1] == "[DONE]"
    until(lambda: not admin.get("/admin/models").json()["leaving"], 20, "the old engine has ended")
    assert len(engines(server)) == 3
    until(lambda: "KV blocks now that it is alone" in server.text, 10, "the new engine has grown")
    after = next(m for m in admin.get("/admin/models").json()["models"] if m["name"] == "live")
    assert after["blocks"] == before["blocks"]


def engines(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "octavo.engine.process" in child.cmdline()]


def test_a_model_that_cannot_load_leaves_everything_as_it_was(
    server: Server, admin: httpx.Client, second: str, tmp_path: Path, tiny: Path
) -> None:
    before, count = text(server), len(engines(server))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    for name, path, options in (
        ("new", tmp_path / "nowhere", {}),
        (NAME, tmp_path / "nowhere", {"replace": True}),
        (NAME, broken, {"replace": True}),
    ):
        answer = add(admin, name, path, **options)
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "load_failed", answer.text
    assert add(admin, "new", tiny, settings={"max_model": 3}).json()["error"]["code"] == "invalid_value"
    assert names(admin) == [NAME, second] and text(server) == before
    assert len(engines(server)) == count


def test_an_alias_shares_requests_by_weight_exactly(server: Server, admin: httpx.Client, second: str) -> None:
    admin.put("/admin/aliases/prod", json={"models": {NAME: 0.75, second: 0.25}}).raise_for_status()
    with server.client() as client:
        asked = [client.post("/v1/completions", json={**GREEDY, "max_tokens": 1, "model": "prod"}) for _ in range(16)]
        assert Counter(answer.headers["x-octavo-model"] for answer in asked) == {NAME: 12, second: 4}
        assert {answer.json()["model"] for answer in asked} == {"prod"}
        refused = admin.post("/admin/models/second/drain")
        assert refused.status_code == 409 and "prod" in refused.json()["error"]["message"]
        admin.put("/admin/aliases/prod", json={"models": {NAME: 1, second: 0}}).raise_for_status()
        only = [client.post("/v1/completions", json={**GREEDY, "max_tokens": 1, "model": "prod"}) for _ in range(4)]
        assert {answer.headers["x-octavo-model"] for answer in only} == {NAME}
    for weights in ({"nobody": 1}, {NAME: -1}, {NAME: 0}):
        wrong = admin.put("/admin/aliases/other", json={"models": weights})
        assert wrong.status_code in (404, 409), wrong.text


def test_a_drained_model_finishes_refuses_and_can_be_resumed(server: Server, admin: httpx.Client, second: str) -> None:
    body = {**LONG, "model": second, "max_tokens": 300}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = events(response.iter_lines())
        next(lines)
        assert admin.post("/admin/models/second/drain", params={"timeout": 0}).json()["idle"] is False
        refused = server.client().post("/v1/completions", json={**GREEDY, "model": "second"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert list(lines)[-1] == "[DONE]"
    assert admin.post("/admin/models/second/resume").status_code == 200
    assert text(server, "second")


def test_a_removed_model_gives_its_memory_back_and_cuts_what_outlasts_the_timeout(
    server: Server, admin: httpx.Client, other: Path
) -> None:
    def resident() -> int:
        return sum(engine.memory_info().rss for engine in engines(server))

    before = resident()
    assert add(admin, "third", other, settings=SETTINGS, wait=False).status_code == 202
    waiting = server.client().post("/v1/completions", json={**GREEDY, "model": "third"})
    assert waiting.status_code == 503 and waiting.json()["error"]["code"] == "loading" and waiting.headers["retry-after"]
    until(
        lambda: {m["name"]: m["state"] for m in admin.get("/admin/models").json()["models"]}["third"] == "serving",
        120,
        "it loads",
    )
    text(server, "third")
    beside = resident()
    assert admin.delete(f"/admin/models/{NAME}").status_code == 409  # the default
    with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "model": "third"}) as response:
        lines = events(response.iter_lines())
        next(lines)
        assert admin.delete("/admin/models/third", params={"timeout": 0.2}).status_code == 200
        assert list(lines)[-1]["error"]["code"] == "draining"
    assert "third" not in names(admin)
    after = resident()
    print(f"resident: {before >> 20} MiB, {beside >> 20} with one more model, {after >> 20} once it is removed")
    assert beside > before + (100 << 20)  # an engine is a process with torch in it
    assert after < before + (beside - before) * 0.1


def test_a_model_is_warmed_with_prompts_whose_cache_stays(admin: httpx.Client, second: str) -> None:
    prompts = {"prompts": ["a page of an octavo is one of sixteen " * 6, "another text"]}
    computed = [admin.post(f"/admin/models/{second}/warm", json=prompts).json()["computed_tokens"] for _ in range(2)]
    assert 0 < computed[1] < computed[0] / 2
    for nothing in ({}, {"json": {}}, {"content": b""}):
        assert admin.post(f"/admin/models/{second}/warm", **nothing).raise_for_status().json()["name"] == second


def test_what_is_asked_wrongly_is_said(admin: httpx.Client) -> None:
    for method, path, body, status in (
        ("POST", "/admin/models", {"name": "", "model": "x"}, 400),
        ("POST", "/admin/models", {"name": NAME, "model": "x"}, 409),
        ("POST", "/admin/models", {"name": "n", "model": "x", "defualt": True}, 400),
        ("POST", "/admin/models", {"name": NAME, "model": "x", "replace": True, "make_room": True}, 409),
        ("POST", "/admin/models/nobody/default", None, 404),
        ("POST", "/admin/models/nobody/drain", None, 404),
        ("DELETE", "/admin/models/nobody", None, 404),
        ("DELETE", "/admin/aliases/nobody", None, 404),
        ("POST", f"/admin/models/{NAME}/drain", None, 409),  # it is the default
        ("POST", f"/admin/models/{NAME}/drain?timeout=nan", None, 400),
        ("DELETE", "/admin/models/nobody?timeout=-1", None, 400),
        ("POST", f"/admin/models/{NAME}/warm", {"prompts": []}, 400),
    ):
        answer = admin.request(method, path, content=None if body is None else json.dumps(body))
        assert answer.status_code == status, f"{method} {path}: {answer.text}"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
