"""The scale signal: whether another replica would help, as numbers that an autoscaler can read.

Owns the rule. Reports what it was computed from, so that an operator can see why.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from fastapi import APIRouter

from octavo.server.gpu import Gpu
from octavo.server.service import State

router = APIRouter()

QUEUE = 50
"""Waiting requests above which a replica is short of room."""
BUSY = 0.70
"""GPU utilisation below which computing is not what is short: the queue waits for memory or slots, which another
replica brings. Above it the queue is worked off at full speed, and another replica helps as well once it is long."""
LONG = 4 * QUEUE


@router.get("/scale", tags=["state"])
async def scale(state: State) -> dict[str, Any]:
    """Queue, memory and GPU use with the verdict `scale_out` (0 or 1) and its reason."""
    load = state.load()
    gpus = await asyncio.to_thread(state.gpus.read)
    return signal(int(load["waiting"]), int(load["running"]), load["kv_cache_usage"], gpus)


def signal(waiting: int, running: int, kv_usage: float, gpus: list[Gpu]) -> dict[str, Any]:
    """scale_out: 1 when over QUEUE requests wait and no GPU is BUSY (or none can be seen), or over LONG wait anyhow."""
    known = [gpu.utilization for gpu in gpus if not math.isnan(gpu.utilization)]
    busiest = max(known, default=None)
    if waiting <= QUEUE:
        verdict, reason = 0, f"{waiting} waiting, at most {QUEUE} are fine"
    elif waiting > LONG:
        verdict, reason = 1, f"{waiting} waiting, over {LONG}"
    elif busiest is None:
        verdict, reason = 1, f"{waiting} waiting, over {QUEUE}"
    elif busiest < BUSY:
        verdict, reason = 1, f"{waiting} waiting, over {QUEUE}, with the GPU at {busiest:.0%}: memory or slots are short"
    else:
        verdict, reason = 0, f"{waiting} waiting, but the GPU is at {busiest:.0%} and works them off"
    return {
        "scale_out": verdict,
        "reason": reason,
        "queue_length": waiting,
        "running": running,
        "kv_cache_usage": kv_usage,
        "gpu_utilization": busiest,
    }
