"""/admin/prefix-cache: what the prefix cache holds; warm, pin and unpin prefixes; forget everything. Guarded by admin keys.

Owns the shape of these routes. Must never show a prompt, or a token of one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field

from octavo.engine.prefixes import MAX_PREFIXES, parse_prefixes
from octavo.errors import ConfigError
from octavo.server import openapi
from octavo.server.errors import ApiError
from octavo.server.runs import body_of
from octavo.server.service import State
from octavo.server.wire import Wire

router = APIRouter(prefix="/admin", tags=["admin"])


class PrefixOrder(Wire):
    """action: `warm` computes the prefixes once, for everybody to share (and pins those with `pin: true`); `pin` does
    the same and pins all of them; `unpin` lets go. prefixes: texts, lists of messages, or objects with `prompt`
    or `messages`. model: a served name, the default's without one."""

    action: Literal["warm", "pin", "unpin"]
    prefixes: list[Any] = Field(min_length=1, max_length=MAX_PREFIXES)
    model: str | None = None


@router.get("/prefix-cache")
async def state(state: State, model: str | None = None) -> dict[str, Any]:
    """Blocks that are cached and pinned, host memory, hits and look-ups in tokens, of one engine (the default's)."""
    return await state.engine(model).prefix_cache()


@router.post("/prefix-cache", openapi_extra=openapi.body(PrefixOrder))
async def order(request: Request, state: State) -> dict[str, Any]:
    """Warm, pin or unpin; answers when it is done, with one result for each prefix."""
    body = await body_of(request, state, PrefixOrder)
    try:
        prefixes = parse_prefixes(body.prefixes, "prefixes")
    except ConfigError as error:
        raise ApiError(400, str(error), param="prefixes", code="invalid_value") from error
    llm = state.open(body.model)
    results = await (llm.unpin_prefixes(prefixes) if body.action == "unpin" else llm.warm(prefixes, pin=body.action == "pin"))
    return {"model": state.model(body.model), "action": body.action, "results": [msgspec.to_builtins(r) for r in results]}


@router.delete("/prefix-cache")
async def reset(state: State, model: str | None = None, pins: bool = False) -> dict[str, Any]:
    """Forget every cached prefix, in host memory too; what is pinned is computed again, unless `pins` says to forget
    that as well. Running requests go on."""
    llm = state.engine(model)
    llm.reset_prefix_cache(pins=pins)
    return await llm.prefix_cache()
