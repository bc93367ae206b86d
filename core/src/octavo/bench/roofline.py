"""The roofline plot of `octavo bench kernel`: what each backend reached, under what the device allows.

Owns the drawing only. A point is one shape of one backend: arithmetic intensity (operations a byte of KV that must
be read) against TFLOP/s. The roof is the measured copy rate, then the measured matmul rate (Williams, Waterman
and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

MARKERS = "osD^vPX*"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the record of octavo.bench.kernel.run as an SVG. ConfigError without matplotlib (octavo[bench])."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'octavo[bench]'") from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"  # the same figures give the same file
    from matplotlib import pyplot

    copy, peak = record["ceilings"]["copy_gbps"] / 1e3, record["ceilings"]["matmul_tflops"]
    measured = [r for r in record["results"] if "us" in r]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [r["flops"] / r["bytes"] for r in measured] or [1.0]
    low, high = min(*intensities, 1.0) / 2, max(*intensities, peak / copy) * 2
    axes.plot(
        [low, peak / copy, high],
        [low * copy, peak, peak],
        color="black",
        linewidth=1,
        label=f"{copy:.2f} TB/s, {peak:.0f} TFLOP/s",
    )
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for result in measured:
        point = result["flops"] / result["bytes"], result["flops"] / result["us"] / 1e6
        series.setdefault((result["backend"], result["kv_dtype"]), []).append(point)
    for marker, ((backend, kv_dtype), points) in zip(MARKERS * len(series), series.items(), strict=False):
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, s=18, marker=marker, label=f"{backend}, {kv_dtype} cache", alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=record["device"]["name"])
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
