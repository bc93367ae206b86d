"""The OpenAPI document: what FastAPI sees of the routes, and what it cannot see.

Owns the description of bodies that routes read themselves, of errors, of keys and of headers. Bounds of
sampling parameters come from `octavo.request`, what is refused from each model's own table: nothing
here is a second opinion. Never runs during a request, but once for the first reader.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from octavo.request import INTEGERS, NUMBERS
from octavo.server.auth import ADMIN, OPEN
from octavo.server.wire import Wire

_REF = "#/components/schemas/{model}"
_STREAMING = {"ChatRequest", "CompletionRequest", "GenerateRequest", "ResponsesRequest"}
_ERROR = {
    "type": "object",
    "description": "Every error of every route.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that is wrong, or the limit that was reached"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_HEADERS = [
    ("x-octavo-priority", {"type": "integer"}, "Lower runs first; only with --scheduling-policy priority."),
    ("x-octavo-deadline", {"type": "number", "exclusiveMinimum": 0}, "Seconds that the whole answer may take."),
]


def body(model: type[Wire], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its own body as `model`, which may be left out unless it is required."""
    schema = model.model_json_schema(ref_template=_REF)
    if model.unsupported:
        refused = ", ".join(f"`{name}`" for name in model.unsupported)
        schema["description"] = (
            f"{schema.get('description', '')}\n\nRefused unless the value asks for nothing: {refused}.".strip()
        )
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _bound(schema: dict[str, Any]) -> None:
    """Add to the numbers of a body the bounds that SamplingParams has for their names."""
    for name, field in schema.get("properties", {}).items():
        for kind in field.get("anyOf", [field]):
            low, high = INTEGERS.get(name) or NUMBERS.get(name) or (-math.inf, math.inf)
            if kind.get("type") not in ("integer", "number"):
                continue
            if math.isfinite(low):
                kind.setdefault("minimum", low)
            if math.isfinite(high):
                kind.setdefault("maximum", high)


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A replacement for `app.openapi`, made on first use and kept."""
    plain = app.openapi
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_completed(copy.deepcopy(plain())))
        return made

    return document


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error shapes: no route has them
        schemas.pop(unused, None)
    schemas["Error"] = _ERROR
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation, schemas)
    return document


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path in OPEN:
        responses.update({"200": {"description": "Yes. No body."}, "503": {"description": "No. No body."}})
    else:
        responses["default"] = {"description": "An error.", "content": {"application/json": {"schema": {"$ref": _ref("Error")}}}}
        operation["security"] = [{"bearer": []}]
        operation["description"] = operation.get("description", "") + _who(path)
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = content["schema"]
    name = schema["title"]
    _bound(schema)  # not before: FastAPI makes floats of all bounds, and 64-bit integers are more than a float holds
    schemas.update(schema.pop("$defs", {}))
    schemas[name] = schema
    content["schema"] = {"$ref": _ref(name)}
    if name in _STREAMING:
        shapes = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
        words = "The answer; with `stream: true` server-sent events, each `data: {...}`, then `data: [DONE]`."
        responses["200"] = {"description": words, "content": shapes}
        headers = [{"in": "header", "name": n, "schema": s, "description": text, "required": False} for n, s, text in _HEADERS]
        operation["parameters"] = [*operation.get("parameters", []), *headers]


def _who(path: str) -> str:
    return "\n\nNeeds an admin key." if path.startswith(ADMIN) else "\n\nNeeds an API key, where the server has any."


def _ref(name: str) -> str:
    return _REF.format(model=name)
