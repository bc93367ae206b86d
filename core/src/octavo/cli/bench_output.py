"""What the benchmarks of the command line share: the --json flag, how a record is printed, and number arguments."""

from __future__ import annotations

import argparse
import json
from typing import Any


def json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print the whole record as JSON.")


def print_json(record: dict[str, Any]) -> int:
    print(json.dumps(record, indent=2))
    return 0


def print_table(lines: list[str], latencies: dict[str, Any]) -> int:
    from octavo.bench.latency import table

    print("\n".join([*lines, *table(latencies)]).rstrip())
    return 0


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be an integer of at least 1")
    return int(text)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number greater than 0, or inf")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number of at least 0 and less than 1")
    return value
