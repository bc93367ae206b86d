"""`octavo version`: the versions that a bug report needs, read without importing what they name."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from octavo import __version__
from octavo.catalog import CONTRACT

SHOWN = ("torch", "transformers", "pydantic", "fastapi")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("version", usage="octavo version", description="Print versions.")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    print(f"octavo {__version__} (plugin contract {CONTRACT})")
    print(f"python {platform.python_version()}")
    for name in SHOWN:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
    return 0
