"""The tenants' file: names, keys, weights and limits as an operator writes them.

Owns the format and its errors, which say where and what but never show a value: any of them may be a
key that slipped into the wrong line. Knows nothing of requests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from octavo import strict_yaml
from octavo.errors import ConfigError
from octavo.wording import hint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_WORD = re.compile(r"[a-z_]{1,40}")


def _listed(value: Any) -> Any:
    """One value stands for a list of one."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, (str, int, float)) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class Limits(_Entry):
    """What one tenant may ask for. None: no limit but the server's.

    max_tokens: tokens generated per sample. max_input_tokens: of one prompt. min_priority, max_priority:
    the range that its requests may ask for (lower runs first); min_priority replaces --min-priority.
    models: served names that it may use.
    """

    max_tokens: int | None = Field(None, ge=1)
    max_input_tokens: int | None = Field(None, ge=1)
    max_concurrent_requests: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    min_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    max_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    models: Strings | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _range(self) -> Limits:
        if self.min_priority is not None and self.max_priority is not None and self.min_priority > self.max_priority:
            raise ValueError("min_priority is more than max_priority (lower runs first)")
        return self


class TenantEntry(_Entry):
    """One tenant: a name for logs, metrics and fair share, its keys (or their SHA-256, in hex), and what it may do.

    weight: share of the engine, relative to the other tenants that have work at the same time.
    """

    name: str
    key: Strings = Field((), repr=False)
    key_sha256: Strings = Field((), repr=False)
    weight: float = Field(1.0, gt=0, le=1e6, allow_inf_nan=False)
    limits: Limits = Limits()

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit")
        return value

    @model_validator(mode="after")
    def _keys(self) -> TenantEntry:
        if not self.key and not self.key_sha256:
            raise ValueError("needs `key` or `key_sha256`")
        if any(not key or key != key.strip() or not key.isprintable() for key in self.key):
            raise ValueError("key: must be printable text without spaces around it")
        if any(not _HEX.fullmatch(digest) for digest in self.key_sha256):
            raise ValueError("key_sha256: must be 64 hexadecimal digits (printf %s KEY | sha256sum)")
        return self


class _TenantFile(_Entry):
    tenants: tuple[TenantEntry, ...]

    @model_validator(mode="before")
    @classmethod
    def _list(cls, data: Any) -> Any:
        if not isinstance(data, dict) or set(data) != {"tenants"} or not isinstance(data["tenants"], list) or not data["tenants"]:
            raise ValueError("must hold `tenants:` and a list of at least one, and nothing else")
        return {"tenants": tuple(data["tenants"])}


def read_tenants(path: str) -> tuple[TenantEntry, ...]:
    """The tenants of a YAML or JSON file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--api-keys-file {path}: cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-keys-file {path}: is not UTF-8 text") from None
    return parse_tenants(text, f"--api-keys-file {path}")


def parse_tenants(text: str, where: str) -> tuple[TenantEntry, ...]:
    """The tenants of a YAML or JSON text; `where` begins every error. Raises ConfigError."""
    try:
        return _TenantFile.model_validate(_load(text)).tenants
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{where}: not valid JSON: {exc.msg} in line {exc.lineno}, column {exc.colno}") from None
    except yaml.MarkedYAMLError as exc:  # its own text quotes the line, which may hold a key
        mark = exc.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = "a name is set twice" if isinstance(exc, strict_yaml.SetTwice) else "a mistake of syntax"
        raise ConfigError(f"{where}: not valid YAML: {problem}{place}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{where}: not valid YAML") from None
    except _SetTwice:
        raise ConfigError(f"{where}: a name is set twice in one object") from None
    except ValidationError as exc:
        raise ConfigError("; ".join(f"{where}: {_complaint(error)}" for error in exc.errors(include_input=False)[:5])) from None


class _SetTwice(ValueError):
    """A JSON object with a name that stands twice."""


def _load(text: str) -> Any:
    if text.lstrip().startswith(("{", "[")):  # YAML takes most JSON, but not tabs
        return json.loads(text, object_pairs_hook=_unique)
    return strict_yaml.load(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _SetTwice
    return found


def _complaint(error: Any) -> str:
    loc: list[Any] = ["", *error["loc"]]
    parents, last = loc[:-1], loc[-1]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" if part else "" for part in parents).lstrip(".")
    if error["type"] == "extra_forbidden":
        shown = repr(last) if _WORD.fullmatch(str(last)) else "a field (its name is not shown)"
        known = Limits.model_fields if "limits" in parents else TenantEntry.model_fields
        return f"{place}: {shown} is unknown{hint(str(last), known) if _WORD.fullmatch(str(last)) else ''}"
    field = f"[{last}]" if isinstance(last, int) else f".{last}" if last else ""
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return f"{(place + field).lstrip('.')}: {message}".removeprefix(": ")
