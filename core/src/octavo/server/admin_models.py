"""/admin/models and /admin/aliases: models come, take over, and go while the server serves. Guarded by admin keys.

Owns the shape of these routes; what they do is the table's (`octavo.engine.models`). A load that fails
changes nothing, and its reason is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse

from octavo.config import EngineConfig
from octavo.engine.models import ModelTable, beside, successor
from octavo.engine.served import Served
from octavo.errors import AdmissionRefused, ConfigError, EngineDead, LoadError, PluginError
from octavo.server import openapi
from octavo.server.errors import ApiError
from octavo.server.models import settings
from octavo.server.runs import body_of
from octavo.server.service import Service, State
from octavo.server.wire import Wire

log = logging.getLogger("octavo.server")
router = APIRouter(prefix="/admin", tags=["admin"])

_TIMEOUT = 30.0
_MAX_WARM = 256


class NewModel(Wire):
    """name: what clients will ask for. model: folder, GGUF file or hub id. settings: fields of EngineConfig.

    warm: run a prompt through it before it gets its name (default true). default: make it the default.
    replace: take the name over from the model that has it, which ends when its requests have, or after
    `timeout` seconds; make_room: with its KV cache given up first, and the new one's growing in the end. wait: answer when it serves (default true), or at once.
    """

    name: str = Field(min_length=1, max_length=256)
    model: str = Field(min_length=1)
    settings: dict[str, Any] | None = None
    warm: bool | None = None
    default: bool | None = None
    replace: bool | None = None
    make_room: bool | None = None
    timeout: float | None = Field(None, ge=0, le=86400)
    wait: bool | None = None


class Warm(Wire):
    """prompts: texts to run through the model; one word where there are none."""

    prompts: list[str] | None = Field(None, min_length=1, max_length=_MAX_WARM)


class Weights(Wire):
    """models: name -> weight. One model is a plain alias, several share the requests in proportion."""

    models: dict[str, float] = Field(min_length=1, max_length=16)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the table refuses is the administrator's to mend: 409, in the table's own words."""
    try:
        yield
    except ConfigError as error:
        raise ApiError(409, str(error), code="refused") from error


@router.get("/models")
async def models(state: State) -> dict[str, Any]:
    """Every model with its engine's state and memory, the aliases, and what each device was promised."""
    table = state.models
    rows = await asyncio.to_thread(lambda: [_row(model, table) for model in [*table.models, *table.leaving]])
    return {
        "default": table.default if table.names else None,
        "models": [row for row in rows if not row["leaving"]],
        "leaving": [row for row in rows if row["leaving"]],
        "aliases": table.aliases,
        "devices": _devices(rows),
    }


@router.post(
    "/models",
    status_code=201,
    responses={202: {"description": "It is being loaded.", "content": {"application/json": {"schema": {"type": "object"}}}}},
    openapi_extra=openapi.body(NewModel),
)
async def add(request: Request, state: State) -> JSONResponse:
    """Load a model beside the others. 201 when it serves; 202 at once with `wait: false`."""
    body = await body_of(request, state, NewModel)
    config = _config(state, body)
    table = state.models
    with _told():
        if body.replace is not True and body.name in table.names:
            raise ConfigError(f"the name {body.name!r} is taken; `replace: true` gives it to the new model")
    work = asyncio.create_task(_load(table, body, config))
    state.keep(work)  # goes on if the administrator's connection is lost
    if body.wait is False:
        work.add_done_callback(_say_failure)
        return JSONResponse({"name": body.name, "state": "loading"}, 202)
    model = await asyncio.shield(work)
    return JSONResponse(await asyncio.to_thread(_row, model, table), 201)


@router.post("/models/{name:path}/warm", openapi_extra=openapi.body(Warm, required=False))
async def warm(name: str, request: Request, state: State) -> dict[str, Any]:
    """Run prompts through a model, so that what happens once has happened."""
    body = await body_of(request, state, Warm, optional=True)
    state.models.get(name)
    return {"name": name, "computed_tokens": await state.models.warm(name, body.prompts)}


@router.post("/models/{name:path}/default")
async def default(name: str, state: State) -> dict[str, Any]:
    """Requests that name no model go here from now on. A model or an alias."""
    with _told():
        state.models.set_default(name)
    return {"default": name}


@router.post("/models/{name:path}/drain")
async def drain(name: str, state: State, timeout: float = _TIMEOUT) -> dict[str, Any]:
    """Take no new requests; answers when the running ones have ended, or after `timeout` seconds."""
    with _told():
        done = await state.models.drain(name, _bounded(timeout))
    return {"name": name, "idle": done, "requests": state.models.get(name).requests}


@router.post("/models/{name:path}/resume")
async def resume(name: str, state: State) -> dict[str, Any]:
    """Take requests again after a drain."""
    with _told():
        state.models.resume(name)
    return {"name": name, "state": state.models.get(name).state}


@router.delete("/models/{name:path}")
async def remove(name: str, state: State, timeout: float = _TIMEOUT) -> dict[str, Any]:
    """Forget a model: its running requests have `timeout` seconds, then its engine ends and its memory is free."""
    with _told():
        work = asyncio.create_task(state.models.remove(name, _bounded(timeout)))
        state.keep(work)
        await asyncio.shield(work)
    return {"name": name, "removed": True}


@router.put("/aliases/{alias:path}", openapi_extra=openapi.body(Weights))
async def set_alias(alias: str, request: Request, state: State) -> dict[str, Any]:
    """Let a name stand for one model, or for several by weight."""
    body = await body_of(request, state, Weights)
    with _told():
        state.models.set_alias(alias, body.models)
    return {"alias": alias, "models": state.models.aliases[alias]}


@router.delete("/aliases/{alias:path}")
async def drop_alias(alias: str, state: State) -> dict[str, Any]:
    """Forget an alias; the models behind it stay."""
    with _told():
        state.models.drop_alias(alias)
    return {"alias": alias, "removed": True}


def _config(state: Service, body: NewModel) -> EngineConfig:
    try:
        given = settings(body.settings or {}, "settings")
        if body.replace is True and body.name in (model.name for model in state.models.models):
            return successor(state.models.get(body.name).config, body.model, given)
        return beside(state.models.find(None).config, body.model, given)
    except ConfigError as error:
        raise ApiError(400, str(error), param="settings", code="invalid_value") from error


async def _load(table: ModelTable, body: NewModel, config: EngineConfig) -> Served:
    """Add or replace, then the default. Raises ApiError; what served before still serves then."""
    warm, timeout = body.warm is not False, _TIMEOUT if body.timeout is None else body.timeout
    there = any(model.name == body.name for model in table.models)
    try:
        if body.replace is True and there:
            room = body.make_room is True
            model = await table.replace(body.name, config, warm=warm, timeout=timeout, make_room=room)
        else:
            model = await table.add(body.name, config, warm=warm)
    except (ConfigError, LoadError, PluginError, AdmissionRefused) as error:
        raise ApiError(409, f"The model was not loaded, and nothing has changed: {error}", code="load_failed") from error
    except EngineDead as error:
        raise ApiError(500, f"The model's engine crashed, and nothing has changed: {error}", code="load_failed") from error
    if body.default is True:
        table.set_default(body.name)
    return model


def _say_failure(work: asyncio.Task[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("a model that nobody waited for was not loaded: %s", error)


def _bounded(timeout: float) -> float:
    if not 0 <= timeout <= 86400:  # also what is not a number
        raise ApiError(400, f"timeout: must be in [0, 86400] seconds, got {timeout}", param="timeout", code="invalid_value")
    return timeout


def _row(model: Served, table: ModelTable) -> dict[str, Any]:
    llm = model.llm if model.present else None
    return {
        "name": model.name,
        "model": model.config.model,
        "state": model.state,
        "error": model.error,
        "generation": model.generation,
        "default": table.names != [] and model.name == table.default,
        "leaving": model in table.leaving,
        "pid": llm.pid if llm else None,
        "since": round(model.since, 3),
        "restarts": model.restarts,
        "requests": model.requests,
        "running": llm.stats.running if llm else 0,
        "waiting": llm.stats.waiting if llm else 0,
        "free_blocks": llm.stats.free_blocks if llm else 0,
        "blocks": (llm.stats.total_blocks or llm.info.num_blocks) if llm else 0,
        "max_model_len": llm.info.max_model_len if llm else None,
        "device": llm.explain.get("device", {}).get("name") if llm else None,
        "device_bytes": llm.explain.get("device", {}).get("memory") if llm else None,
        "planned_bytes": model.planned_bytes(),
        "resident_bytes": model.resident_bytes(),
    }


def _devices(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The ledger: what every device has, and what its models were promised of it (weights and caches)."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["device"] is not None:
            entry = found.setdefault(row["device"], {"bytes": row["device_bytes"] or 0, "planned_bytes": 0})
            entry["planned_bytes"] += row["planned_bytes"]
    return found
