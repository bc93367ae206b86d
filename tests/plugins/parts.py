"""Classes that providers of the resolution tests load."""

from __future__ import annotations

from typing import Any


class Part:
    """Remembers what it was built from."""

    def __init__(self, options: Any, parts: Any) -> None:
        self.options, self.parts = options, parts


class Refusing:
    """Fails in its constructor."""

    def __init__(self, options: Any, parts: Any) -> None:
        raise ZeroDivisionError("no such device")


class OpsTorch(Part):
    """Two operators."""

    ops = {("norm", "plain"): lambda: "torch norm", ("rope", "plain"): lambda: "torch rope"}  # noqa: RUF012


class OpsFused(Part):
    """One of them faster, and one more format."""

    ops = {("norm", "plain"): lambda: "fused norm", ("norm", "fp8"): lambda: "fused norm fp8"}  # noqa: RUF012
