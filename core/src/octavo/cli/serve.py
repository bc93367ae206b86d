"""`octavo serve`: settings in, server started. Owns nothing else; the server is octavo.server."""

from __future__ import annotations

import argparse
import os
from typing import Any

from octavo.cli.flags import add_flags, add_model, place, read
from octavo.config import EngineConfig, ServerConfig


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="octavo serve [MODEL] [options]",
        description="Serve a model over the OpenAI API. Ctrl-C or SIGTERM lets running requests finish first.",
    )
    add_model(parser)
    add_flags(parser, EngineConfig, ServerConfig)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    engine, server = read(EngineConfig, args), read(ServerConfig, args)
    os.environ["OCTAVO_LOG_LEVEL"] = server.log_level  # the engine's process logs as this one does
    from octavo.cli.console import Stages
    from octavo.server.serve import serve

    with Stages(quiet=server.log_format == "json") as stages:  # what reads JSON lines reads nothing else
        return serve(engine, server, models_from=place("models", args), on_progress=stages.update)
