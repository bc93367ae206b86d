"""What every benchmark's JSON says about where and when it ran: versions, machine, commit, date.

A figure without these cannot be compared, so no benchmark reports one without them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("octavo", "torch", "transformers", "numpy", "triton")


def surroundings() -> dict[str, Any]:
    """Versions, machine, load before the run, git commit (None outside a checkout), UTC time."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["octavo", *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" where tracked files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed from a wheel, perhaps inside somebody else's checkout
    head = git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+changes" if git("status", "--porcelain", "-uno") else "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
