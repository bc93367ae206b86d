"""Parsing of request bodies: bytes to a checked model, and every failure to one 400.

Owns the step from JSON to the models of `protocol`, with errors that name the field. Must never let a
body cost much more than reading it: JSON depth is bounded by the parser, the number of its values is
bounded before it is parsed, and validation stops at the first thing wrong.
"""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from octavo.server.errors import ApiError, unsupported


class Wire(BaseModel):
    """A JSON object from a client: exact types, no unknown fields.

    `unsupported` lists the fields that the protocol has and this server does not honour: field ->
    (values that ask for nothing, why). null always asks for nothing. Any other value is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    names: ClassVar[dict[str, None]] = {}  # of the fields, in JSON

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.names = dict.fromkeys(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        # Before pydantic's own check, which collects an error per unknown field: a body has room for a million.
        if isinstance(data, dict):
            for name in data:
                if name not in cls.names and name not in cls.unsupported:
                    near = difflib.get_close_matches(name[:64], [*cls.names, *cls.unsupported], n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise PydanticCustomError(
                        "unknown_field", "{message}", {"message": f"unknown field{hint}", "name": name[:64]}
                    )
            asked = {name: value for name, value in data.items() if name in cls.unsupported}
            if asked:
                cls.refuse(asked)
                data = {name: value for name, value in data.items() if name not in asked}
        return data

    @classmethod
    def refuse(cls, asked: dict[str, Any]) -> None:
        for name, value in asked.items():
            neutral, why = cls.unsupported[name]
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
                raise PydanticCustomError("unsupported", "{message}", {"message": why, "name": name})


M = TypeVar("M", bound=Wire)

SMALL = 64 << 10  # bytes: so little is never worth counting, nor a thread
MAX_STRINGS = 40_000
MAX_CONTAINERS = 20_000
MAX_VALUES = 1 << 19
_CODES = {"missing": "missing_required_parameter", "unknown_field": "unknown_parameter", "unsupported": "unsupported"}
_NOT_PATH = {"str", "int", "float", "bool", "none", "function-after", "function-before"}


def parse(model: type[M], body: bytes) -> M:
    """`body` as `model`. Raises ApiError 400 with the field in `param`."""
    if not body.strip():
        raise ApiError(400, "The request body is empty; a JSON object is needed.", code="invalid_json")
    if len(body) > SMALL:
        _check_shape(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        raise _explain(exc) from None


def _check_shape(body: bytes) -> None:
    """Raises ApiError for a body of so many values that parsing it would hold everybody up: a parser keeps the
    interpreter to itself from its first byte to its last, in whatever thread. Counting is a few passes over the
    bytes, and what is inside strings does not count, so that a long text may hold any characters."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = body.count(b'"') // 2
    if strings <= MAX_STRINGS:
        body = b"".join(body.split(b'"')[::2])
        containers = body.count(b"[") + body.count(b"{")
        if containers <= MAX_CONTAINERS and body.count(b",") + containers <= MAX_VALUES:
            return
    raise ApiError(
        400,
        f"The request body has too many parts: at most {MAX_STRINGS} strings, {MAX_CONTAINERS} lists and objects, "
        f"and {MAX_VALUES} values in all.",
        code="body_too_complex",
    )


def _explain(exc: ValidationError) -> ApiError:
    error: Any = exc.errors(include_url=False)[0]
    kind, message = error["type"], error["msg"]
    if kind == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {error['ctx']['error']}.", code="invalid_json")
    if kind == "model_type" and not error["loc"]:
        return ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    loc = error["loc"]
    if kind in ("unknown_field", "unsupported"):
        loc = (*loc, error["ctx"]["name"])
    param = path(loc)
    if kind == "unsupported":
        return unsupported(param, message)
    if kind in ("too_short", "too_long"):
        return ApiError(400, f"{param}: {_length(error['ctx'])}", param=param, code="invalid_value")
    message = message.removeprefix("Value error, ")
    text = "this field is required" if kind == "missing" else message[:1].lower() + message[1:]
    if kind not in ("missing", "unknown_field"):
        seen = error["input"]
        shown = (
            repr(seen)
            if isinstance(seen, (int, float, bool, type(None)))
            else f"{seen[:60]!r:.60}"
            if isinstance(seen, str)
            else None
        )
        text += f", got {shown}" if shown else f", got {_json_type(seen)}"
    return ApiError(400, f"{param}: {text}", param=param, code=_CODES.get(kind, "invalid_value"))


def _length(told: dict[str, Any]) -> str:
    """What is wrong with the number of a list's or an object's entries."""
    if not told["actual_length"]:
        return "must not be empty"
    bound = f"at least {told['min_length']}" if "min_length" in told else f"at most {told['max_length']}"
    return f"must have {bound} entries, got {told['actual_length']}"


def path(loc: tuple[int | str, ...]) -> str:
    """A location in the client's own terms: ("messages", 0, "role") is `messages[0].role`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in _NOT_PATH and "[" not in part:
            text += f".{part}" if text else part
    return text


def _json_type(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else type(value).__name__
