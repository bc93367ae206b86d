"""A real Prometheus with the configuration and the rules of deploy/, beside a real server: where one is installed.

What differs from deploy/: the server's address, the place of the key and the intervals.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.test_deploy import DEPLOY, asked
from tests.server.harness import ADMIN_KEY, API_KEYS, Server, until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is a package of Debian's")
GPU = "octavo_gpu_"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def prometheus(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Its API, once it has scraped a server that has answered two tenants, one of them beyond its limit."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "keys.yaml").write_text("tenants:\n- {name: slow, key: key-of-a-slow-tenant, limits: {requests_per_minute: 1}}\n")
    server = Server(
        *(tiny, folder / "log", "--api-key", API_KEYS[0], "--admin-api-key", ADMIN_KEY),
        *("--api-keys-file", str(folder / "keys.yaml")),
    ).ready()
    (folder / "key").write_text(ADMIN_KEY)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "key")
    job["static_configs"] = [{"targets": [":".join(map(str, server.address))]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "prometheus.log").open("wb") as out:
        where = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
        command = ["prometheus", *where, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as api, server.client() as client:
            until(lambda: scraped(api), 30, f"a scrape:\n{(folder / 'prometheus.log').read_text()}")
            for key in (API_KEYS[0], API_KEYS[0], "key-of-a-slow-tenant", "key-of-a-slow-tenant"):
                headers = {"Authorization": f"Bearer {key}"}
                client.post("/v1/completions", json={"prompt": list(range(5, 60)), "max_tokens": 8}, headers=headers)
            until(lambda: answer(api, "sum(rate(octavo_generation_tokens_total[1m])) > 0"), 30, "two scrapes of that traffic")
            yield api
    finally:
        process.terminate()
        process.wait(10)
        server.stop()


def scraped(api: httpx.Client) -> bool:
    try:
        targets = api.get("/targets").json()["data"]["activeTargets"]
    except (httpx.TransportError, ValueError):
        return False
    assert not [target["lastError"] for target in targets if target["lastError"]], targets
    return bool(targets) and all(target["health"] == "up" for target in targets)


def answer(api: httpx.Client, query: str) -> list[Any]:
    told = api.get("/query", params={"query": query}).json()
    assert told["status"] == "success", (query, told)
    result: list[Any] = told["data"]["result"]
    return result


def test_it_evaluates_every_rule_and_none_alerts_about_a_healthy_server(prometheus: httpx.Client) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("/rules").json()["data"]["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] == "ok" for rule in rules()), 20, f"every rule has been evaluated: {rules()}")
    assert len(rules()) == 10 and [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_every_query_of_the_dashboard_and_of_keda_has_an_answer_but_those_about_a_gpu(prometheus: httpx.Client) -> None:
    rules = {rule["name"] for group in prometheus.get("/rules").json()["data"]["groups"] for rule in group["rules"]}
    for where, expression in asked():
        query = re.sub(r"\$(?!__)\w+", ".*", expression.replace("$__rate_interval", "1m"))
        answer(prometheus, query)
        if where not in rules and not query.startswith("ALERTS") and GPU not in query:  # an alert's is empty while all is well
            # A rate needs two scrapes, and a tenant's first row comes with its first request.
            until(lambda query=query: answer(prometheus, query), 10, query)  # type: ignore[misc]
