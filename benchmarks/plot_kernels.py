"""Draw what `octavo bench kernel ... --json` measured: GB/s of every backend on every decode shape, one panel a KV dtype.

    octavo bench kernel triton cupy --shapes decode --shapes ragged --kv-dtype bfloat16 --kv-dtype float8_e4m3fn --json > record.json
    python benchmarks/plot_kernels.py record.json docs/decode-kernels.svg

The line is the same run's device-to-device copy. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"triton": "#7a8ca3", "cupy": "#c2410c"}


def draw(record: dict[str, Any], target: Path) -> None:
    """Write an SVG of the record's decode results. Raises ValueError if there are none."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = [r for r in record["results"] if r["phase"] == "decode" and "gbps" in r]
    if not results:
        raise ValueError("the record holds no decode results")
    shapes = list(dict.fromkeys(r["shape"] for r in results))
    backends = list(dict.fromkeys(r["backend"] for r in results))
    dtypes = list(dict.fromkeys(r["kv_dtype"] for r in results))
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "octavo", "svg.fonttype": "none"})
    figure, axes = plt.subplots(len(dtypes), 1, figsize=(10, 3.2 * len(dtypes)), sharex=True, squeeze=False)
    for axis, dtype in zip(axes[:, 0], dtypes, strict=True):
        width = 0.8 / len(backends)
        for i, backend in enumerate(backends):
            rates = {r["shape"]: r["gbps"] for r in results if r["backend"] == backend and r["kv_dtype"] == dtype}
            places = [x + (i - (len(backends) - 1) / 2) * width for x in range(len(shapes))]
            axis.bar(places, [rates.get(s, 0) for s in shapes], width, label=backend, color=COLOURS.get(backend))
        copy = record["ceilings"]["copy_gbps"]
        axis.axhline(copy, color="black", linewidth=0.8, linestyle="--", label=f"copy, {copy:.0f} GB/s")
        axis.set_ylabel("GB/s of K and V")
        axis.set_title(f"decode, {dtype} cache")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, ncols=len(backends) + 1, loc="upper left", bbox_to_anchor=(0, 1.0))
        axis.set_ylim(0, copy * 1.25)
    axes[-1, 0].set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: plot_kernels.py RECORD.json TARGET.svg")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
