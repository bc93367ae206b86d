"""The roofline plot says what the record says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octavo.bench.kernel import DECODE, PREFILL
from octavo.bench.roofline import draw

pytest.importorskip("matplotlib")


def result(backend: str, shape: Any, us: float) -> dict[str, Any]:
    return {"backend": backend, "kv_dtype": "bfloat16", "us": us, "bytes": shape.bytes(2), "flops": shape.flops()}


def test_every_backend_is_a_series_and_rejections_are_left_out(tmp_path: Path) -> None:
    record = {
        "device": {"name": "A GPU"},
        "ceilings": {"copy_gbps": 4000.0, "matmul_tflops": 700.0},
        "results": [result("one", DECODE[0], 6.0), result("two", PREFILL[0], 300.0), {"backend": "three", "rejected": "no"}],
    }
    draw(record, tmp_path / "roof.svg")
    drawn = (tmp_path / "roof.svg").read_text()
    for text in ("A GPU", "4.00 TB/s, 700 TFLOP/s", "one, bfloat16 cache", "two, bfloat16 cache"):
        assert f"<!-- {text} -->" in drawn
    assert "three" not in drawn
