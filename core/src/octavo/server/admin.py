"""The /admin routes: what runs, what was loaded, and why it was chosen. Guarded by admin keys.

Owns views only. Must never show a key, a prompt, or anything of a client's request.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter

import octavo
from octavo.server.service import State

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/plugins")
async def plugins(state: State, model: str | None = None) -> dict[str, Any]:
    """Every provider with its state, and every decision of the build of `model` (the default's) with its reasons."""
    llm = state.engine(model)
    return {"providers": llm.inventory, "decisions": llm.explain}


@router.get("/status")
async def status(state: State, model: str | None = None) -> dict[str, Any]:
    """The state of one engine (the default's) and of the server: limits, load, how long it has been up."""
    llm = state.engine(model)
    return {
        "version": octavo.__version__,
        "models": state.names,
        "uptime_seconds": round(time.time() - state.started, 1),
        "alive": llm.alive,
        "draining": state.draining,
        "dead_reason": llm.dead_reason,
        "http_requests_in_flight": int(state.load()["server_load"]),
        "engine": {**msgspec.to_builtins(llm.info), "eos_token_ids": list(llm.info.eos_token_ids)},
        "stats": {field: getattr(llm.stats, field) for field in llm.stats.__struct_fields__},
    }
