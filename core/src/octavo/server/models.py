"""The models that a server is told to serve: which names, with which configuration, in which order.

Owns the spelling of `--models`: NAME=PATH,SETTING=VALUE... as a flag, {name, model, setting: value} in a
file. Starts nothing; the table of running models is `octavo.engine.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.cli.options import closest, options_of
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.models import beside
from octavo.errors import ConfigError

_FLAG = "--models"
_OPTIONS = {option.name: option for option in options_of(EngineConfig) if option.name != "model"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A model to load at start: the name that clients use, and its engine's configuration."""

    name: str
    config: EngineConfig


def planned(engine: EngineConfig, server: ServerConfig, where: str = _FLAG) -> list[Planned]:
    """The models of a start, the default first. MODEL is left out where only `models` names any. where: what errors call the
    place that `models` came from.

    Raises ConfigError for an entry that is not understood, for a name that stands twice, and for priorities that no model heeds.
    """
    found: list[Planned] = []
    if "model" in engine.model_fields_set or not server.models:
        found.append(Planned(server.served_model_name[0] if server.served_model_name else engine.model, engine))
    for place, entry in enumerate(server.models):
        found.append(_one(entry, f"{_FLAG} {entry}" if where == _FLAG else f"{where}[{place}]", engine))
    names = [model.name for model in found] + list(server.served_model_name[1:])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}: a name belongs to one (--served-model-name names the first model)")
    if server.min_priority and all(model.config.scheduling_policy != "priority" for model in found):
        raise ConfigError(
            f"--min-priority {server.min_priority}: the server runs first come, first served; add --scheduling-policy priority, or leave it out"
        )
    return found


def _one(entry: str | Mapping[str, Any], where: str, base: EngineConfig) -> Planned:
    raw = _split(entry, where) if isinstance(entry, str) else dict(entry)
    name, model = raw.pop("name", None), raw.pop("model", None)
    if not isinstance(name, str) or not name.strip() or not isinstance(model, str) or not model.strip():
        raise ConfigError(f"{where}: a model needs a name and a path: NAME=PATH, or {{name: NAME, model: PATH}}")
    try:
        return Planned(name, beside(base, model, settings(raw, where)))
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def _split(text: str, where: str) -> dict[str, Any]:
    """NAME=PATH,SETTING=VALUE,... as a mapping."""
    head, *rest = text.split(",")
    name, equals, model = head.partition("=")
    if not equals or name.replace("-", "_") in _OPTIONS:
        raise ConfigError(
            f"{where}: must be NAME=PATH[,SETTING=VALUE...]"
            + (f"; {name!r} is a setting (OCTAVO_MODELS takes a JSON list)" if equals else "")
        )
    found: dict[str, Any] = {"name": name.strip(), "model": model.strip()}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{where}: {part!r} must be SETTING=VALUE")
        found[key.strip()] = value.strip()
    return found


def settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of one model, as text or as JSON values, ready for EngineConfig. Raises ConfigError."""
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        option = _OPTIONS.get(name)
        if option is None:
            raise ConfigError(f"{where}: unknown setting {key!r}{closest(name, _OPTIONS)}")
        try:
            values[name] = option.parse(value)
        except ValueError as wrong:
            raise ConfigError(f"{where}: {key}: {wrong}") from wrong
    return values
