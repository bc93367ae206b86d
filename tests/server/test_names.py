"""What a server is called and what it says of itself: several served names, its plugins and the reasons for every choice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.harness import ADMIN_KEY, NAME, Server

SIZE = ("--block-size", "16", "--dtype", "float32", "--num-threads", "1")


@pytest.fixture(scope="module")
def named(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("named") / "log"
    running = Server(tiny, log, "--served-model-name", "short", "--admin-api-key", ADMIN_KEY, *SIZE)
    try:
        yield running.ready()
    finally:
        running.stop()


def test_every_served_name_is_listed_and_answers_alike(named: Server) -> None:
    with named.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [(NAME, NAME), ("short", NAME)]
        texts = set()
        for name in (NAME, "short", None):
            body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, **({"model": name} if name else {})}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["model"] == (name or NAME) and answer.headers["x-octavo-model"] == NAME
            texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        assert client.post("/v1/completions", json={"prompt": "x", "model": "tiny"}).status_code == 404


def test_admin_plugins_says_what_explain_says(named: Server, tiny: Path) -> None:
    """The decisions of the engine that runs are those that the command prints without one."""
    with named.client(ADMIN_KEY) as client:
        told = client.get("/admin/plugins").json()
    command = [sys.executable, "-m", "octavo", "plugins", "explain", str(tiny), "--json", *SIZE]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for part in ("decisions", "catalog", "values"):
        assert told["decisions"][part] == printed[part] and printed[part]
    assert printed["decisions"]["attention"]["why"]
    assert all(other["reason"] for other in printed["decisions"]["attention"]["not_chosen"])
    assert {entry["kind"] for entry in told["providers"]} >= {"allocator", "scheduler", "attention"}
    assert httpx.get(named.url + "/admin/plugins").status_code == 401
