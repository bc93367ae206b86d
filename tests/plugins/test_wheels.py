"""Core and plugins as users get them: built into wheels, installed into a fresh environment, seen by their entry points.

Nothing here is editable and nothing is fetched. The environment borrows the heavy dependencies (torch and the rest)
of the one that runs the tests; core and the plugins come from the wheels, which the first test asserts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "octavo-attention-sdpa"
SET_UP = (ROOT / "plugins" / "ops_cpu", ROOT / "plugins" / "grammar_llguidance")
"""Beside core in what `make setup` makes, so that the borrowed environment lists them."""
PLUGINS = sorted(project.parent for project in ROOT.glob("plugins/*/pyproject.toml"))


class Environment:
    """A throw-away virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = Path(self._out(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # after the environment's own packages; a path in a .pth is not searched for further .pth files, so the
        # editable install of core in the borrowed environment stays behind
        (self.site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @staticmethod
    def _out(*command: str | Path) -> str:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, env=clean()).stdout

    def install(self, *arguments: str | Path) -> None:
        self._out(sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index", *arguments)

    def run(self, *arguments: str | Path, extra: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the environment's python; `extra` is a folder of further distributions."""
        env = clean() | ({"PYTHONPATH": str(extra)} if extra else {})
        return subprocess.run(list(map(str, (self.python, *arguments))), capture_output=True, text=True, env=env, cwd=self.site)

    def octavo(self, *arguments: str | Path, extra: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(self.python.parent / "octavo", *arguments, extra=extra)

    def inventory(self, extra: Path | None = None) -> list[dict[str, Any]]:
        done = self.octavo("plugins", "list", "--json", extra=extra)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows


def clean() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "PYTHON", "PIP_", "VIRTUAL_ENV"))}
    return keep | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def build(source: Path, into: Path) -> Path:
    """The wheel of a source tree, built with the hatchling that is here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        str(into),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=clean())
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Core, the plugins that `make setup` installs beside it, and the example plugin,
    installed from wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    made = Environment(folder / "env")
    made.install(*(build(source, folder / source.name) for source in (ROOT / "core", *SET_UP, EXAMPLE)))
    return made


def write_distribution(site: Path, name: str, source: str) -> None:
    """What pip leaves of a plugin: a module and its dist-info."""
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(
        "from octavo import hookimpl\nfrom octavo.catalog import Options, Provider\n" + dedent(source)
    )
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[octavo]\nmain = {module}\n")


BROKEN = {
    "acme-misspelt": "@hookimpl\ndef register_atention_backends():\n    return []\n",
    "acme-import": "import a_module_that_is_nowhere\n",
    "acme-version": "@hookimpl\ndef register_executors():\n    return [Provider('future', 'executor', 'a:B', api=99)]\n",
    "acme-twin": "@hookimpl\ndef register_attention_backends():\n    return [Provider('sdpa', 'attention', 'a:B')]\n",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one distribution for each way to be broken."""
    site = tmp_path_factory.mktemp("broken")
    for name, source in BROKEN.items():
        write_distribution(site, name, source)
    return site


def test_the_wheels_carry_the_entry_points_and_are_not_editable(environment: Environment) -> None:
    code = "import octavo, octavo_attention_sdpa, sys; print(octavo.__file__, octavo_attention_sdpa.__file__, 'torch' in sys.modules)"
    core, example, torch = environment.run("-c", code).stdout.split()
    assert core.startswith(str(environment.site)) and example.startswith(str(environment.site)) and torch == "False"
    rows = {(r["kind"], r["name"]): r for r in environment.inventory()}
    assert {"allocator", "scheduler", "attention", "quantizer", "model", "operators", "executor", "grammar"} <= {
        kind for kind, _ in rows
    }
    sdpa = rows["attention", "sdpa"]
    assert (sdpa["distribution"], sdpa["version"], sdpa["contract_version"], sdpa["state"]) == (
        "octavo-attention-sdpa",
        "0.1.0",
        1,
        "ok",
    )
    assert not sdpa["auto"] and "plugins.enable" in sdpa["reason"]
    assert all(row["state"] == "ok" for row in rows.values())


@pytest.mark.parametrize("source", PLUGINS, ids=lambda p: p.name)
def test_every_plugin_of_this_repository_is_listed_from_its_wheel(source: Path, environment: Environment, tmp_path: Path) -> None:
    """Without the hardware it is for: `auto` may consider it, and its `accepts` gives the reason."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["octavo"], "a plugin is found by its entry point"
    environment.install("--target", tmp_path / "site", build(source, tmp_path / "wheel"))
    rows = [r for r in environment.inventory(tmp_path / "site") if r["distribution"] == project["name"]]
    assert rows and all(r["state"] == "ok" and r["auto"] and r["version"] == project["version"] for r in rows)


def test_the_wheel_of_core_is_typed_and_holds_nothing_but_the_package(environment: Environment) -> None:
    assert (environment.site / "octavo" / "py.typed").exists()
    packages = {p.name for p in environment.site.iterdir() if p.suffix != ".dist-info"}
    assert packages - {"borrowed.pth", "__pycache__"} == {
        "octavo",
        "octavo_ops_cpu",
        "octavo_grammar_llguidance",
        "octavo_attention_sdpa",
    }


def test_listing_plugins_imports_no_torch(environment: Environment) -> None:
    code = "import sys; from octavo.plugins import discover; discover().inventory(); print({'torch', 'triton', 'cupy', 'fastapi'} & set(sys.modules))"
    assert environment.run("-c", code).stdout.strip() == "set()"


def test_each_broken_plugin_is_a_line_that_says_what_is_wrong(environment: Environment, broken: Path) -> None:
    rows = environment.inventory(broken)
    by = {r["distribution"]: r for r in rows}
    assert (
        by["acme-misspelt"]["state"] == "rejected"
        and "did you mean 'register_attention_backends'" in by["acme-misspelt"]["reason"]
    )
    assert by["acme-import"]["state"] == "failed" and "ModuleNotFoundError" in by["acme-import"]["traceback"]
    assert by["acme-version"]["state"] == "rejected" and by["acme-version"]["contract_version"] == 99
    for name in ("acme-twin", "octavo-attention-sdpa"):
        assert by[name]["state"] == "duplicate"
        assert "acme-twin 1.0" in by[name]["reason"] and "octavo-attention-sdpa 0.1.0" in by[name]["reason"]
    assert all(r["state"] == "ok" for r in rows if r["distribution"] == "octavo")
    table = environment.octavo("plugins", "list", extra=broken).stdout
    assert all(name in table for name in BROKEN)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--attention-backend", "spda"), ("did you mean 'sdpa'",)),
        (("--attention-backend", "sdpa"), ("acme-twin 1.0", "octavo-attention-sdpa 0.1.0")),
        (("--executor", "future"), ("acme-version 1.0", "contract 99")),
        (("--executor", "from-acme"), ("no such executor provider", "acme-import 1.0", "a_module_that_is_nowhere")),
        (("--plugins", '{"attention": {"torch": {"tile": 3}}}'), ("plugins.attention.torch.tile", "unknown option")),
        (("--plugins", '{"enable": ["acme-nowhere"]}'), ("acme-nowhere", "not an installed plugin")),
    ],
)
def test_naming_what_is_broken_is_an_error_that_says_why(
    flags: tuple[str, str], words: tuple[str, ...], environment: Environment, broken: Path, tiny: Path
) -> None:
    done = environment.octavo("plugins", "explain", tiny, *flags, extra=broken)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_broken_stranger_stops_no_model_that_does_not_name_it(environment: Environment, broken: Path, tiny: Path) -> None:
    done = environment.octavo("plugins", "explain", tiny, "--json", extra=broken)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["decisions"]["attention"]["distribution"] in ("octavo", "octavo-ops-cpu")
    assert {p["distribution"] for p in told["catalog"]["problems"]} == {*BROKEN, "octavo-attention-sdpa"}


def test_an_unknown_option_of_the_plugin_is_an_error(environment: Environment, tiny: Path) -> None:
    done = environment.octavo("plugins", "explain", tiny, "--plugins", '{"attention": {"sdpa": {"row_at_once": 3}}}')
    assert done.returncode == 2 and "did you mean 'rows_at_once'" in done.stderr, done.stderr


def test_the_plugin_is_chosen_by_name_and_its_layout_and_block_size_are_used(environment: Environment, tiny: Path) -> None:
    done = environment.octavo(
        "plugins",
        "explain",
        tiny,
        "--attention-backend",
        "sdpa",
        "--plugins",
        '{"attention": {"sdpa": {"rows_at_once": 3}}}',
        "--json",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    decision = told["decisions"]["attention"]
    assert (decision["chosen"], decision["distribution"], decision["asked"]) == ("sdpa", "octavo-attention-sdpa", "sdpa")
    assert decision["options"] == {"rows_at_once": 3}
    assert {v["name"]: v["reason"] for v in decision["not_chosen"]}["torch"] == "'sdpa' was named; would accept"
    assert told["values"]["block_size"]["value"] == 32
    assert told["kv_cache"]["groups"][0]["page_shape"] == [32, 2, 32]


def test_the_plugin_generates_what_core_s_oracle_generates(environment: Environment, tiny: Path) -> None:
    """An engine of the wheels: greedy fp32 tokens of mixed prompts, chunked and batched, are equal."""
    code = dedent("""
        import sys, torch
        from octavo.config import EngineConfig
        from octavo.engine.build import build_engine
        from octavo.plugins import discover
        from octavo.request import Request, SamplingParams

        def serve(**config):
            engine = build_engine(EngineConfig(model=sys.argv[1], num_threads=1, max_num_batched_tokens=24, **config), discover())
            for i in range(6):
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                engine.add(Request(id=str(i), prompt=list(range(10 + i, 20 + 9 * i)), params=params))
            tokens = {}
            while engine.busy:
                for event in engine.step().events:
                    assert event.error is None, event.error
                    tokens.setdefault(event.request_id, []).extend(event.tokens)
            assert engine.explain["decisions"]["attention"]["chosen"] == config["attention_backend"]
            return tokens

        expected = serve(attention_backend="torch")
        rows = {"attention": {"sdpa": {"rows_at_once": 2}}}
        for config in ({}, {"block_size": 5}, {"plugins": rows}, {"num_gpu_blocks_override": 8, "block_size": 16}):
            assert serve(attention_backend="sdpa", **config) == expected, config
        print(sum(map(len, expected.values())))
    """)
    done = environment.run("-c", code, tiny)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["72"]


def test_the_plugin_passes_the_conformance_suite(environment: Environment) -> None:
    """The example's own tests, with the suite that the wheel of core carries."""
    done = environment.run("-m", "pytest", EXAMPLE / "tests", "-q", "-c", EXAMPLE / "pyproject.toml", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{2} passed", done.stdout)
