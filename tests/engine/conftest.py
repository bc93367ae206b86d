"""Every engine test runs with NaN in every block that nobody has written: whoever reads one shows it."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.cache.pool import Pool


@pytest.fixture(autouse=True)
def poisoned_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools start poisoned (in this process; engines in a process of their own are not reached)."""
    build = Pool.__init__

    def poisoned(self: Pool, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.poison()

    monkeypatch.setattr(Pool, "__init__", poisoned)
