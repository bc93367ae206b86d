"""The `octavo` command: finds the subcommand, runs it, and turns errors into one clear line.

Owns the list of commands, exit codes and what is printed when something fails. Imports nothing
heavy: a command's module is imported only when that command is named, and `octavo --help` and
`octavo version` never load torch or FastAPI.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from octavo import __version__
from octavo.cli.console import is_utf8
from octavo.cli.flags import Parser
from octavo.cli.options import closest
from octavo.errors import ConfigError, OctavoError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("octavo.cli.serve", "Serve a model over the OpenAI API."),
    "generate": ("octavo.cli.generate", "Answer one prompt and exit."),
    "chat": ("octavo.cli.chat", "Talk to a model in the terminal."),
    "bench": ("octavo.cli.bench", "Measure throughput, latency, one step, start-up, memory or perplexity."),
    "quantize": ("octavo.cli.quantize", "Make a smaller checkpoint of a model: fp8 or awq."),
    "doctor": ("octavo.cli.doctor", "Report what this machine has, and what is wrong with it."),
    "plugins": ("octavo.cli.plugins", "List plugins, and explain which parts a model would get and why."),
    "version": ("octavo.cli.version", "Print versions."),
}
"""name -> (module with add_parser(subparsers), one line of help)."""

INTRO = "Octavo serves large language models. Its every part (attention, memory, formats, models) is a plugin."
EPILOG = """\
first steps:
  octavo generate demo "What is the capital of France?" --temperature 0
  octavo serve demo                 then POST to http://127.0.0.1:8000/v1/chat/completions
  octavo plugins explain demo       which parts run it, and why

Every flag can also be an environment variable (--max-model-len is OCTAVO_MAX_MODEL_LEN) or a line
of the YAML file that --config names. OCTAVO_TRACEBACK=1 shows the traceback of an error.
"""

EXIT_FAILED, EXIT_USAGE, EXIT_PIPE, EXIT_INTERRUPTED = 1, 2, 141, 130


class _Root(Parser):
    """The top parser: prints the commands as a table, and knows a misspelt one."""

    def format_help(self) -> str:
        rows = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
        return f"usage: octavo COMMAND ...\n\n{INTRO}\n\ncommands:\n{rows}\n\n`octavo COMMAND --help` tells the rest.\n\n{EPILOG}"

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"octavo: {message}\nsee octavo --help\n")


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for this command line: only the module of the command that it names is imported."""
    root = _Root(prog="octavo")
    root.add_argument("--version", action="version", version=f"octavo {__version__}")
    named = next((word for word in argv if not word.startswith("-")), None)
    if named is None:
        return root
    if named not in COMMANDS:
        root.error(f"no such command: {named}{closest(named, COMMANDS)}")
    subparsers = root.add_subparsers(dest="command", parser_class=Parser)
    import_module(COMMANDS[named][0]).add_parser(subparsers)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status: 0, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    _show_what_can_be_shown()
    try:
        parser = build_parser(words)
        args = parser.parse_args(words)
        if not hasattr(args, "func"):
            parser.print_help()
            return 0 if not words else EXIT_USAGE
        status = int(args.func(args) or 0)
        sys.stdout.flush()  # what cannot be written is an error now, not a warning of the interpreter's at its end
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _drop_output()
        return EXIT_PIPE
    except (OctavoError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        if os.environ.get("OCTAVO_TRACEBACK") == "1":
            raise
        if isinstance(error, OSError):
            _drop_output()
        print(f"octavo: error: {_said(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def _show_what_can_be_shown() -> None:
    """A terminal that is not UTF-8 shows a question mark for what it has no character for; models write anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not is_utf8(stream):
            stream.reconfigure(errors="replace")


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _drop_output() -> None:
    """What stdout still holds goes nowhere, if it cannot be written: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
