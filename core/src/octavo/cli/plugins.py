"""`octavo plugins list` and `octavo plugins explain MODEL`: what is installed, and what a model would get.

`explain` prints the plan that the build uses. It reads no weights and takes no device memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from octavo.cli.console import wide_console
from octavo.cli.flags import add_flags, add_model, read
from octavo.config import EngineConfig


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plugins",
        usage="octavo plugins {list,explain} ...",
        description="List plugins, and explain which parts a model would get and why.",
    )
    actions = parser.add_subparsers(dest="action", metavar="{list,explain}", required=True)

    listing = _action(actions, "list", "[--json] [options]", "Every provider that is installed: state and reason.")
    add_flags(listing, EngineConfig, skip=set(EngineConfig.model_fields) - {"plugins"})
    listing.add_argument("--json", action="store_true", help="Print JSON, tracebacks included.")
    listing.set_defaults(func=list_plugins)

    explaining = _action(
        actions,
        "explain",
        "[MODEL] [--json] [options]",
        "For every kind of part: what MODEL would get, why, and why not the others.",
    )
    add_model(explaining)
    add_flags(explaining, EngineConfig)
    explaining.add_argument("--json", action="store_true", help="Print JSON.")
    explaining.set_defaults(func=explain_plugins)


def _action(actions: Any, name: str, arguments: str, line: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, usage=f"octavo plugins {name} {arguments}", description=line, help=line
    )
    return parser


def list_plugins(args: argparse.Namespace) -> int:
    """Print the inventory. A broken plugin is a line of it, not a failure of the command (`octavo doctor` exits 1)."""
    from octavo.plugins import discover

    rows = discover(read(EngineConfig, args).plugins).inventory()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print_inventory(rows)
    return 0


def explain_plugins(args: argparse.Namespace) -> int:
    from octavo.engine.explain import render
    from octavo.engine.plan import plan_engine
    from octavo.plugins import discover

    config = read(EngineConfig, args)
    plan = plan_engine(config, discover(config.plugins))
    if args.json:
        print(json.dumps(plan.explain(), indent=2))
    else:
        wide_console().print(render(plan))
    return 0


def print_inventory(rows: list[dict[str, Any]]) -> None:
    """The inventory as a table; a broken plugin's line says why."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=sys.stdout.isatty())
    for column, fold in (
        ("kind", False),
        ("name", False),
        ("distribution", False),
        ("contract", False),
        ("state", False),
        ("", True),
    ):
        table.add_column(column, overflow="fold", no_wrap=not fold)
    for row in rows:
        style = "" if row["state"] == "ok" else "red"
        table.add_row(
            Text(row["kind"]),
            Text(row["name"], style="bold"),
            Text(f"{row['distribution']} {row['version']}".rstrip()),
            Text("" if row["contract_version"] is None else str(row["contract_version"])),
            Text(row["state"], style=style),
            Text(row["reason"] or row["summary"], style=style),
        )
    wide_console().print(table)
