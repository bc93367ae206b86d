"""Rules of the house that a careless import would break: core knows no plugin, and being installed costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "octavo"
HEAVY = {"torch", "triton", "cupy", "llvmlite", "transformers", "fastapi"}
SOURCES = sorted(p.parent for p in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")])


def imports(file: Path) -> set[str]:
    """Top-level names of every import statement of a file, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_core_imports_no_plugin() -> None:
    wrong = {
        str(f.relative_to(CORE)): names
        for f in CORE.rglob("*.py")
        if (names := {n for n in imports(f) if n.startswith("octavo_")})
    }
    assert wrong == {}


def test_only_discovery_knows_pluggy_s_manager() -> None:
    users = {str(f.relative_to(CORE)) for f in CORE.rglob("*.py") if "PluginManager(" in f.read_text()}
    assert users == {"plugins.py"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_importing_a_plugin_and_asking_it_loads_nothing_heavy(source: Path) -> None:
    """The package is imported, its hooks are called and its providers listed, as discovery does."""
    (package,) = [p.name for p in (source / "src").iterdir() if p.is_dir() and p.name.startswith("octavo_")]
    code = (
        f"import sys; from octavo.plugins import discover; found = discover(extra_modules=[{package!r}]); "
        f"bad = [e.reason for e in found.problems() if e.origin.module == {package!r}]; "
        f"assert not bad, bad; print(' '.join({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source / "src"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_importing_a_plugin_registers_nothing(source: Path) -> None:
    """What a package does, only its hooks do: the import leaves the catalogue of this process as it was."""
    (package,) = [p.name for p in (source / "src").iterdir() if p.is_dir() and p.name.startswith("octavo_")]
    code = (
        "from octavo.plugins import discover; before = discover().fingerprint(); "
        f"import {package}; assert discover().fingerprint() == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source / "src"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
