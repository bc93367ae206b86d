"""A way to install small distributions for one test: a module and its dist-info on the path, as pip leaves them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]

HEADER = "from octavo import hookimpl\nfrom octavo.catalog import Accept, Options, Provider, Reject\n\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(distribution, source, version="1.0", module=None, entry_point=None): what discovery then finds."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: list[str] = []

    def add(
        distribution: str, source: str, *, version: str = "1.0", module: str | None = None, entry_point: str = "main"
    ) -> None:
        name = module or distribution.replace("-", "_")
        (site / f"{name}.py").write_text(HEADER + dedent(source))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[octavo]\n{entry_point} = {name}\n")
        modules.append(name)

    yield add
    for name in modules:
        sys.modules.pop(name, None)


def provider(kind: str, name: str, hook: str, extra: str = "") -> str:
    """Source of a plugin module with one provider."""
    return f"@hookimpl\ndef {hook}():\n    return [Provider({name!r}, {kind!r}, 'nowhere:Nothing'{extra})]\n"
