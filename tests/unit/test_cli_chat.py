"""`octavo chat`: what the model is told, line by line, and what a server is asked with --url."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from octavo.cli import chat
from octavo.cli.main import main
from octavo.errors import RequestError

from tests.unit.test_bench_serve import running


class Counting:
    """A Talk that answers with the roles that it was shown."""

    async def answer(self, messages: chat.Messages) -> AsyncIterator[str]:
        if messages[-1]["content"] == "long":
            raise RequestError("too long", code="context_length_exceeded")
        if messages[-1]["content"] == "stop":
            yield "part"
            raise KeyboardInterrupt
        for message in messages:
            yield message["role"][0]

    async def close(self) -> None: ...


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    with asyncio.Runner() as runner:
        assert chat._converse(runner, Counting(), system) == 0


def test_every_turn_is_told_and_new_forgets_all_but_the_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(monkeypatch, "one", "", "two", "/new", "three", system="be brief")
    assert capsys.readouterr().out.splitlines() == ["su", "suau", "su"]


def test_a_slash_is_a_command_or_told_to_be_none_and_exit_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(monkeypatch, "/help", "/nwe", "one", "/exit", "two")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["u"]
    assert shown.err.splitlines() == [chat.HELP, f"no command '/nwe'. {chat.HELP}"]


def test_a_turn_that_does_not_fit_is_forgotten_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(monkeypatch, "one", "long", "two")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["u", "", "uau"]
    assert "too long (/new starts afresh)" in shown.err


def test_control_c_stops_the_answer_and_keeps_its_beginning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(monkeypatch, "stop", "two")
    assert capsys.readouterr().out.splitlines() == ["part [stopped]", "uau"]


def test_a_server_is_asked_with_only_what_the_user_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as (url, server):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["chat", "their-model", "--url", f"{url}/v1", "--max-tokens", "3", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "xxx\n"
    assert server.bodies == [
        {"model": "their-model", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 3}
    ]
    assert "authorization: bearer k" in server.heads[0].lower()


def test_a_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", "m", "--url", "http://127.0.0.1:9"]) == 1
    assert "octavo: error: --url http://127.0.0.1:9: nobody answers there" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1, "nobody to ask for the model's name either"
    assert "octavo: error: http://127.0.0.1:9: nobody answers there" in capsys.readouterr().err


def test_an_address_without_its_scheme_is_told_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "--url", "127.0.0.1:8000"]) == 2
    assert "--url 127.0.0.1:8000: must begin with http:// or https://" in capsys.readouterr().err
