"""Which distribution has what, for errors: the table says what the plugins of this repository register."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from octavo.catalog import Device, Needs
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.engine.plan import plan_engine
from octavo.errors import PluginError
from octavo.first_party import FORMATS, PARTS
from octavo.plugins import discover

from tests.tiny import tiny_llama

PLUGINS = sorted(p.parent for p in (Path(__file__).parents[2] / "plugins").glob("*/pyproject.toml"))


def test_every_plugin_of_this_repository_is_known() -> None:
    assert set(PARTS) == {"octavo", *(f"octavo-{path.name.replace('_', '-')}" for path in PLUGINS)}
    assert {name for readers in FORMATS.values() for name in readers} <= set(PARTS)


@pytest.mark.parametrize("source", PLUGINS, ids=lambda path: path.name)
def test_the_table_has_what_a_plugin_registers(source: Path) -> None:
    package = f"octavo_{source.name}"
    code = (
        f"from octavo.plugins import discover; found = discover(extra_modules=[{package!r}]).entries; "
        f"print(*(f'{{e.kind}}:{{e.name}}' for e in found if e.origin.module == {package!r} and e.kind != 'operators'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(source / "src")}
    )
    assert done.returncode == 0, done.stderr
    known = PARTS[package.replace("_", "-")]
    assert set(done.stdout.split()) == {f"{kind}:{name}" for kind, names in known.items() for name in names}


def test_a_part_that_is_not_installed_is_told_with_its_distribution() -> None:
    catalog = discover()
    for distribution, kinds in PARTS.items():
        for kind, names in kinds.items():
            for name in set(names) - set(catalog.names(kind)):
                with pytest.raises(PluginError, match=f"{distribution} has one of this name, and is not installed"):
                    catalog.resolve(kind, Needs(kind, Device()), name)  # type: ignore[arg-type]


@pytest.mark.skipif("fp8" in discover().names("quantizer"), reason="octavo-quant-fp8 is installed")
def test_a_weight_format_that_nobody_reads_is_told_with_its_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginError, match=r"it is for octavo-quant-fp8, which is not installed$"):
        plan_engine(EngineConfig(model=str(tiny_llama(tmp_path)), quantization="fp8"), discover())
    assert main(["quantize", "fp8", str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    assert "octavo-quant-fp8 has one of this name, and is not installed" in capsys.readouterr().err
