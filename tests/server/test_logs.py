"""The log: what a line holds, where it goes, and what is never in it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.config import ServerConfig
from octavo.engine.relay import MARK, take
from octavo.errors import ConfigError
from octavo.server import logs

from tests.server.harness import ADMIN_KEY, API_KEYS, NAME, Server

SECRET = "the prompt of a client"
FILE_KEY, WRONG_KEY = "key-of-the-file-of-tenants", "a-wrong-key-that-must-not-show"
SECRETS = (API_KEYS[0], FILE_KEY, ADMIN_KEY, WRONG_KEY)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    levels = {name: logging.getLogger(name).level for name in ("octavo", "uvicorn")}
    yield logger
    for handler in logger.handlers:
        if handler not in before:
            with contextlib.suppress(OSError):  # what /dev/full still holds
                handler.close()
    logger.handlers, logger.level = before, level
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)


@pytest.fixture(scope="module")
def told(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, list[dict[str, Any]], dict[str, Any]]:
    """A server that has ended, every line of its JSON log file (at level debug, so that nothing is left out), and the request
    ids it gave."""
    folder = tmp_path_factory.mktemp("logs")
    file = folder / "octavo.log"
    (folder / "keys.json").write_text(json.dumps({"tenants": [{"name": "of-the-file", "key": FILE_KEY}]}))
    flags = ("--log-format", "json", "--log-file", str(file), "--log-level", "debug", "--log-requests-on-error")
    keys = ("--api-key", API_KEYS[0], "--api-keys-file", str(folder / "keys.json"), "--admin-api-key", ADMIN_KEY)
    server = Server(tiny, folder / "terminal", *flags, *keys)
    try:
        with server.ready().client() as client:
            good = client.post("/v1/completions", json={"prompt": "a good " + SECRET, "max_tokens": 2})
            bad = client.post("/v1/completions", json={"prompt": "a bad " + SECRET, "max_tokens": 10_000})
            for key in (FILE_KEY, ADMIN_KEY, WRONG_KEY):
                for path in ("/v1/models", "/admin/status", "/metrics", f"/no/such/path?api_key={key}"):
                    said = client.get(path, headers={"Authorization": f"Bearer {key}"}).text
                    assert not [secret for secret in SECRETS if secret in said], path
            client.post(
                "/admin/models", json={"name": "b", "model": "/no/such/folder"}, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
            )
        assert good.status_code == 200 and bad.status_code == 400
    finally:
        server.stop()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return server, lines, {"good": good.headers["x-request-id"], "bad": bad.headers["x-request-id"]}


def test_every_line_is_an_object_that_says_when_how_bad_and_who(told: Any) -> None:
    server, lines, _ = told
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert [json.loads(line) for line in server.text.splitlines()] == lines  # the terminal has the same, and nothing else


def test_the_engine_writes_into_the_same_log(told: Any) -> None:
    _, lines, _ = told
    assert any(line["logger"].startswith("octavo.engine") and "KV cache size" in line["message"] for line in lines)


def test_a_request_is_one_line_with_its_facts_and_the_id_that_its_client_got(told: Any) -> None:
    _, lines, ids = told
    (line,) = [line for line in lines if line["logger"] == "octavo.server.requests" and line.get("request_id") == ids["good"]]
    facts = line["request"]
    assert facts["id"] == ids["good"] and facts["outcome"] == "ok" and facts["model"] == NAME and facts["tenant"] == "key-0"
    assert facts["completion_tokens"] == 2 and facts["ttft_seconds"] <= facts["total_seconds"]


def test_only_a_failed_request_carries_its_prompt_and_its_stack(told: Any) -> None:
    server, lines, ids = told
    (failed,) = [line for line in lines if SECRET in line["message"]]
    assert failed["request_id"] == ids["bad"] and "context_length_exceeded" in failed["message"]
    assert "a bad " + SECRET in failed["message"] and "Traceback" in failed["message"]
    assert "a good" not in server.text


def test_no_key_is_ever_in_the_log(told: Any) -> None:
    server, lines, _ = told
    assert any(line["level"] == "debug" for line in lines)
    for key in SECRETS:
        assert key not in server.text and key not in json.dumps(lines)


def test_a_log_file_is_rotated_and_five_old_ones_are_kept(tmp_path: Path, root: logging.Logger) -> None:
    logs.configure(ServerConfig(log_file=str(tmp_path / "log"), log_file_bytes=4096))
    for i in range(600):
        logging.getLogger("octavo.test").info("line %d %s", i, "x" * 60)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6 and all(file.stat().st_size <= 4096 for file in files)
    assert "line 599" in (tmp_path / "log").read_text()


def test_a_log_file_that_cannot_be_written_stops_the_start(tmp_path: Path, root: logging.Logger) -> None:
    with pytest.raises(ConfigError, match="--log-file"):
        logs.configure(ServerConfig(log_file=str(tmp_path / "no" / "folder" / "log")))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_said_once_and_the_terminal_goes_on(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    logs.configure(ServerConfig(log_file="/dev/full"))
    for i in range(3):
        logging.getLogger("octavo.test").info("line %d", i)
    said = capsys.readouterr().err
    assert said.count("--log-file /dev/full") == 1 and "Traceback" not in said and "Logging error" not in said
    assert [f"line {i}" in said for i in range(3)] == [True, True, True]


def test_a_text_line_names_its_request_once(capsys: pytest.CaptureFixture[str], root: logging.Logger) -> None:
    logs.configure(ServerConfig())
    token = logs.request_id.set("abc123")
    logging.getLogger("octavo.server").warning("something of a request")
    logging.getLogger("octavo.server.requests").info("abc123 /generate ok")
    logs.request_id.reset(token)
    logging.getLogger("octavo.server").info("something of nobody's")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("something of a request [abc123]") and second.endswith("abc123 /generate ok")
    assert third.endswith("something of nobody's")


def test_what_an_engine_prints_is_logged_line_by_line_and_a_record_as_a_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    take(MARK + json.dumps({"name": "octavo.engine.build", "level": logging.INFO, "message": "m", "created": 1.0, "stack": "s"}))
    take("Fatal Python error: Segmentation fault")
    take(MARK + '{"name": "octavo.eng')  # cut off by the child's death
    take("")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("octavo.engine.build", "INFO", "m"),
        ("octavo.engine.output", "WARNING", "Fatal Python error: Segmentation fault"),
        ("octavo.engine.output", "WARNING", '{"name": "octavo.eng'),
    ]
    assert caplog.records[0].exc_text == "s"
