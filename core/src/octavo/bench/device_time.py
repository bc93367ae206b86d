"""Times on a CUDA device, by its own events: regions of calls, and replays of captured graphs.

Owns how a span is taken; what runs in it is the caller's. Imports torch when it is first used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any


def time_region(work: Callable[[], Any], count: int, repeats: int, *, warm: int = 1) -> float:
    """Microseconds of one call: the median over `repeats` regions of `count` back-to-back calls, after `warm` calls."""
    import torch

    for _ in range(warm):
        work()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / count)
    return float(statistics.median(spans))


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """Capture `work` (warmed up first) and return its replay."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def graph_time(op: Callable[[int], Any], count: int, repeats: int) -> float:
    """Microseconds of one of op(0), ..., op(count - 1) in a captured graph of them all, which costs what it does in a step, the gap
    before it included: the median over `repeats` replays."""

    def work() -> None:
        for i in range(count):
            op(i)

    return time_region(graphed(work), 1, repeats, warm=3) / count
