"""The `octavo` command: what it loads, how it fails, and its exit codes."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from octavo.cli import main as cli
from octavo.errors import AdmissionRefused, ConfigError, LoadError, OctavoError, RequestError

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "triton")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("command", ["import octavo.cli.main", "from octavo.cli.main import main; main([])"])
def test_the_command_and_its_help_load_neither_torch_nor_fastapi(command: str) -> None:
    loaded = python(f"{command}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])")
    assert loaded.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_the_help_of_every_command_loads_neither_torch_nor_fastapi(name: str) -> None:
    code = f"""
import sys
from octavo.cli.main import main
try:
    main([{name!r}, "--help"])
except SystemExit as stop:
    assert not stop.code, stop.code
print([m for m in {HEAVY} if m in sys.modules])
"""
    assert python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["plugins", "list"], ["plugins", "explain"], ["doctor"], ["serve"], ["generate"]])
def test_the_help_of_a_command_begins_with_its_usage_on_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Not with sixty flags of the engine in brackets."""
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    usage, empty, what = capsys.readouterr().out.splitlines()[:3]
    assert usage.startswith(f"usage: octavo {' '.join(words)} ") and not empty and what


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)


def test_a_misspelt_command_is_answered_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["srve", "demo"])
    assert stop.value.code == 2
    assert "did you mean serve" in capsys.readouterr().err


class TestErrors:
    """A command that raises, run through main()."""

    def run(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
        def fail(args: object) -> int:
            raise error

        monkeypatch.setattr("octavo.cli.version.run", fail)
        return cli.main(["version"])

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (ConfigError("--port: 'x' is not allowed"), 2),
            (LoadError("no such folder"), 1),
            (RequestError("temperature: must be finite", param="temperature"), 1),
            (AdmissionRefused("too large", code="too_large"), 1),
        ],
    )
    def test_an_octavo_error_is_one_line_without_a_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OctavoError, status: int
    ) -> None:
        monkeypatch.delenv("OCTAVO_TRACEBACK", raising=False)
        assert self.run(monkeypatch, error) == status
        assert capsys.readouterr().err == f"octavo: error: {error}\n"

    def test_the_traceback_is_there_when_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_TRACEBACK", "1")
        with pytest.raises(LoadError):
            self.run(monkeypatch, LoadError("no such folder"))

    def test_an_unexpected_error_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ZeroDivisionError):
            self.run(monkeypatch, ZeroDivisionError())

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (OSError(errno.ENOSPC, "No space left on device", "/a/file"), "/a/file: No space left on device"),
            (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
            (OSError("something else"), "something else"),
        ],
    )
    def test_what_the_system_refuses_is_one_line_too(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, said: str
    ) -> None:
        monkeypatch.delenv("OCTAVO_TRACEBACK", raising=False)
        assert self.run(monkeypatch, error) == 1
        assert capsys.readouterr().err == f"octavo: error: {said}\n"

    def test_control_c_exits_130_and_says_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["version", "doctor"])
def test_an_output_that_cannot_be_written_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "octavo", command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "octavo: error: No space left on device\n")


def test_a_wrong_flag_of_a_benchmark_names_the_command_in_one_breath(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "serve", "--request-rate", "0"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("octavo bench serve: argument --request-rate: '0' is not allowed")
    assert said[1] == "octavo bench serve: see octavo bench serve --help"


@pytest.mark.parametrize("words", [["demo", "--json", "--"], ["--json", "demo", "--"], ["--json", "--"]])
def test_what_follows_two_dashes_is_handed_on(words: list[str]) -> None:
    argv = ["bench", "startup", *words, "--load-format", "dummy"]
    args = cli.build_parser(argv).parse_args(argv)
    assert (args.model, args.json, args.flags) == ("demo", True, ["--load-format", "dummy"])


@pytest.mark.parametrize("flag", ["--api-key=secret", "--uds", "--ssl_certfile=x"])
def test_a_start_that_could_not_be_asked_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "startup", "demo", "--", flag]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"octavo: error: {flag.split('=')[0].replace('_', '-')}: the server is asked over plain HTTP")
    assert "secret" not in said


def test_nothing_to_hand_on() -> None:
    assert cli.build_parser(["bench", "startup", "demo"]).parse_args(["bench", "startup", "demo"]).flags == []


def test_control_c_while_python_still_imports_says_nothing(tmp_path: Path) -> None:
    """The stand-in for a slow import sends the signal itself: it comes at that moment, however quick the machine."""
    (tmp_path / "yaml.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from octavo.cli.start import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
