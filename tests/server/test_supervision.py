"""Two models in one server: neither starves, each keeps to its quota, and one that crashes is started again."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import ADMIN_KEY, NAME, Server, events, post_raw, until

BLOCKS, BLOCK = 8, 16  # of the small model: a hard limit of 128 tokens
GREEDY = {"prompt": "hello world", "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 1000, "stream": True}


@pytest.fixture(scope="module")
def server(long_tiny: Path, tiny1: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    small = f"small={tiny1},num_gpu_blocks={BLOCKS},block-size={BLOCK}"
    flags = ("--models", small, "--num-gpu-blocks-override", "100", "--num-threads", "1", "--admin-api-key", ADMIN_KEY)
    running = Server(
        long_tiny, tmp_path_factory.mktemp("pair") / "log", "--block-size", "16", *flags, "--max-engine-restarts", "1"
    )
    try:
        yield running.ready()
    finally:
        running.stop()


def ask(server: Server, model: str, **over: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={**GREEDY, "model": model, "max_tokens": 20, **over}, timeout=60)


def rows(server: Server) -> dict[str, dict[str, Any]]:
    with server.client(ADMIN_KEY) as client:
        return {model["name"]: model for model in client.get("/admin/models").json()["models"]}


def test_both_models_of_the_start_are_served_each_with_its_own_memory(server: Server) -> None:
    cards = {card["id"]: card for card in httpx.get(server.url + "/v1/models").json()["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {NAME: 4096, "small": 512}
    assert {name: row["blocks"] for name, row in rows(server).items()} == {NAME: 100, "small": BLOCKS}
    assert ask(server, NAME).status_code == ask(server, "small").status_code == 200
    ledger = server.client(ADMIN_KEY).get("/admin/models").json()
    device = next(iter(ledger["devices"].values()))
    assert device["planned_bytes"] == sum(row["planned_bytes"] for row in ledger["models"]) < device["bytes"]


def test_a_hard_limit_refuses_what_does_not_fit_now_and_the_other_model_queues(server: Server) -> None:
    """`num_gpu_blocks` of the small model against `num_gpu_blocks_override` of the other."""

    def burst(model: str, tokens: int) -> Counter[int]:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return Counter(a.status_code for a in pool.map(lambda _: ask(server, model, max_tokens=tokens), range(8)))

    small = burst("small", 100)
    assert set(small) == {200, 429}, small
    refused = ask(server, "small", max_tokens=200)  # never, even alone
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "too_large"
    assert burst(NAME, 200) == {200: 8}  # 8 x 13 blocks do not fit 100 at once: they wait for each other


def test_under_load_neither_model_starves(server: Server) -> None:
    """Six clients of one model and two of the other, each with one request at a time: both models go on answering. How they share a
    processor is the kernel's doing, so how many answers each gets in the same time is not judged."""
    counts: Counter[str] = Counter()
    stop = threading.Event()

    def client(model: str) -> None:
        while not stop.is_set():
            counts[model] += ask(server, model, max_tokens=24).status_code == 200
            if counts["small"] >= 10 and counts[NAME] >= 6:
                stop.set()

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        work = [pool.submit(client, model) for model in (NAME,) * 6 + ("small",) * 2]
        fed = stop.wait(60)
        stop.set()
        for one in work:
            one.result()
    assert fed, f"within a minute there were no more answers than {dict(counts)}"
    print(
        f"answers a client in {time.monotonic() - began:.1f} s: {counts['small'] / 2:.0f} small, {counts[NAME] / 6:.0f} of the other"
    )


def test_a_crashed_engine_ends_its_requests_and_serves_again_while_the_other_goes_on(server: Server) -> None:
    first = rows(server)["small"]
    engine = psutil.Process(first["pid"])
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as response:
        lines = events(response.iter_lines())
        next(lines)
        engine.suspend()  # so that the request is certainly not over
        mine = post_raw(server, "/v1/completions", {**GREEDY, "model": "small", "max_tokens": 100, "stream": True})
        until(lambda: rows(server)["small"]["requests"] == 1, 10, "the request is with the engine")
        engine.kill()
        answer = b""
        while b'"engine_dead"' not in answer:
            answer += mine.recv(1 << 16)
        mine.close()
        refused = ask(server, "small")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "restarting"
        assert server.status("/health") == server.status("/ready") == 200  # the server is worth keeping, the default serves
        until(lambda: ask(server, "small").status_code == 200, 120, "it serves again")
        assert list(lines)[-1] == "[DONE]"  # nothing of this reached the other model's stream
    again = rows(server)["small"]
    assert again["restarts"] == 1 and again["generation"] > first["generation"] and again["pid"] != first["pid"]
    assert 'octavo_engine_restarts_total{engine="0",model_name="small"} 1.0' in httpx.get(server.url + "/metrics").text
    assert "model 'small' crashed" in server.text


def test_a_model_that_crashes_too_often_is_given_up_and_health_says_so(server: Server) -> None:
    psutil.Process(rows(server)["small"]["pid"]).kill()
    until(lambda: rows(server)["small"]["state"] == "dead", 30, "it is given up")
    assert server.status("/health") == 503
    assert ask(server, "small").json()["error"]["code"] == "engine_dead" and ask(server, NAME).status_code == 200


def test_a_model_of_the_start_that_cannot_load_stops_it_with_one_line_that_names_it(tiny: Path, tmp_path: Path) -> None:
    server = Server(tiny, tmp_path / "log", "--models", f"broken={tmp_path}/nowhere")
    try:
        assert server.process.wait(90) > 0
    finally:
        server.stop()
    assert "model 'broken'" in server.text and "nowhere" in server.text and "Traceback" not in server.text
