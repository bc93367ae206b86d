"""`octavo plugins list`, `octavo plugins explain` and `octavo doctor`: for people, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.engine.plan import plan_engine
from octavo.plugins import KIND_OF_HOOK, discover

from tests.plugins.conftest import Install, provider

COLUMNS = {"kind", "name", "distribution", "contract_version", "state", "reason"}


def test_list_prints_every_provider_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) >= COLUMNS for row in rows)
    assert set(KIND_OF_HOOK.values()) <= {row["kind"] for row in rows}


def test_list_shows_a_broken_plugin_and_does_not_fail(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-broken", "import a_module_that_is_nowhere\n")
    assert main(["plugins", "list"]) == 0
    text = capsys.readouterr().out
    assert "acme-broken 1.0" in text and "failed" in text and "a_module_that_is_nowhere" in text


def test_explain_prints_the_plan_of_the_build(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "explain", str(tiny), "--num-threads", "1", "--block-size", "32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = plan_engine(EngineConfig(model=str(tiny), num_threads=1, block_size=32), discover()).explain()
    for report in (told, expected):
        report["device"].pop("free_memory")  # of this moment
    assert told == expected


def test_explain_tells_people_what_was_chosen_and_what_was_not(
    tiny: Path, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends"))
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plugins", "explain", str(tiny)]) == 0
    text = capsys.readouterr().out
    for word in (*KIND_OF_HOOK.values(), "torch", "not acme", "plugins.enable", "KV cache: 640 tokens", "float32"):
        assert word in text, word


def test_a_wrong_name_is_one_line_and_no_traceback(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "explain", str(tiny), "--attention-backend", "torc"]) == 1
    assert capsys.readouterr().err == "octavo: error: attention 'torc': no such attention provider; did you mean 'torch'?\n"


def test_doctor_reports_versions_device_plugins_and_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == bool(report["problems"])
    assert report["versions"]["torch"] and report["cpu"]["memory"] > 0 and report["cpu"]["threads"] >= 1
    assert report["device"]["type"] in ("cpu", "cuda") and report["device"]["why"]
    assert {row["name"]: row["works"] for row in report["parts"]["attention"]}["torch"] == "yes"
    assert report["demo_model"]["present"] is True


def test_doctor_exits_1_and_says_what_is_to_be_mended(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-broken", "import a_module_that_is_nowhere\n")
    install("acme-gpu", "@hookimpl\ndef register_attention_backends():\n    return [Provider('acme', 'attention', 'a:B', accepts=lambda n, o: Reject('needs a GPU'))]\n")  # fmt: skip
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem: acme-broken 1.0" in text and "a_module_that_is_nowhere" in text
    assert "needs a GPU" in text and "nothing to mend" not in text
