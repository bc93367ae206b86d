"""Flags, environment and config file, all generated from the models in octavo.config.

Owns how a setting is spelt in each place and which place wins: flag > OCTAVO_<FLAG> > --config
file > default. Must never hold a setting's name, default or help of its own (those live in
config.py alone), nor import torch or FastAPI.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from octavo import strict_yaml
from octavo.cli.options import Option, closest, options_of
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.wording import not_served, on_one_line

M = TypeVar("M", bound=BaseModel)

MODELS: tuple[type[BaseModel], ...] = (EngineConfig, ServerConfig)
"""Every model whose fields may stand in the environment and in a config file, whichever command reads them."""

RESERVED_ENV = frozenset({"OCTAVO_CONFIG", "OCTAVO_TRACEBACK"})
KUBERNETES_ENV = re.compile(r"OCTAVO_(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
"""Variables that Kubernetes puts in every container of a namespace which has a Service named `octavo`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and the place that an error about it must name."""

    value: Any
    where: str


def add_flags(parser: argparse.ArgumentParser, *models: type[BaseModel], skip: Iterable[str] = ()) -> None:
    """Add `--config` and one flag per field of `models`, in the groups that the fields name.

    A flag that is not given leaves no trace in the namespace, so that lower places can speak.
    """
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file that holds the same settings as the flags.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for model in models:
        for option in options_of(model):
            if option.name in skip:
                continue
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(f"{option.group} options")
            option.add_to(groups[option.group])


def add_model(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the positional MODEL; where it is optional, --model, the environment and the file may name it."""
    text = next(o for o in options_of(EngineConfig) if o.name == "model").help
    parser.add_argument("positional_model", metavar="MODEL", nargs=None if required else "?", default=None, help=text)


def read(
    model: type[M],
    args: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> M:
    """Build `model` from the command line, the environment and the config file.

    `defaults` are a command's own, below all three and above the field's. Raises ConfigError that
    lists every wrong setting with the place it came from.
    """
    found = {name: Found(value, f"default of {name}") for name, value in (defaults or {}).items()}
    found |= _given(args, environ)
    known = {option.name: option for option in options_of(model)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, item in found.items():
        if name in known:
            try:
                values[name] = known[name].parse(item.value)
            except ValueError as wrong:
                problems.append(f"{item.where}: {wrong}")
    try:
        if not problems:
            return model(**values)
    except ValidationError as error:
        names = dict.fromkeys(str(detail["loc"][0]) if detail["loc"] else "" for detail in error.errors())
        for name in names:
            item = found.get(name, Found(None, name or model.__name__))
            reason = next(d["msg"] for d in error.errors() if not d["loc"] or str(d["loc"][0]) == name)
            problems.append(f"{item.where}: {known[name].complain(item.value, reason) if name in known else reason}")
    raise ConfigError("\n".join(problems))


def place(name: str, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> str:
    """Where a setting was given, as errors about it say: a flag, a variable, a file and its key. The flag where it was not."""
    found = _given(args, environ).get(name)
    return found.where if found else next(option.flag for option in _all() if option.name == name)


def _given(args: argparse.Namespace, environ: Mapping[str, str] | None) -> dict[str, Found]:
    """Every setting that somebody gave, from the place that wins."""
    env = os.environ if environ is None else environ
    flag = getattr(args, "config", None)
    path = flag or env.get("OCTAVO_CONFIG")
    found = _from_file(path, f"--config {path}" if flag else f"OCTAVO_CONFIG={path}") if path else {}
    return found | _from_environment(env) | _from_flags(args)


def _from_flags(args: argparse.Namespace) -> dict[str, Found]:
    found = {}
    for option in _all():
        if hasattr(args, option.name):
            found[option.name] = Found(getattr(args, option.name), option.flag)
    positional = getattr(args, "positional_model", None)
    if positional is not None:
        if "model" in found and found["model"].value != positional:
            raise ConfigError(f"MODEL is given twice: {positional!r}, and --model {found['model'].value!r}. Give one of them.")
        found["model"] = Found(positional, "MODEL")
    return found


def _from_environment(env: Mapping[str, str]) -> dict[str, Found]:
    known = {option.env: option for option in _all()}
    found, problems = {}, []
    for key, value in env.items():
        if not key.startswith("OCTAVO_") or key in RESERVED_ENV or KUBERNETES_ENV.match(key):
            continue
        if key == "OCTAVO_PORT" and re.match(r"(tcp|udp|sctp)://", value):
            continue  # Kubernetes again: the address of a Service named `octavo`, never a port number
        if key not in known:
            why = not_served(key.removeprefix("OCTAVO_").lower())
            problems.append(f"{key}{why}" if why else f"{key}: unknown environment variable{closest(key, known)}")
        elif value == "":
            problems.append(f"{key}: is set but empty; unset it or give it a value")
        else:
            found[known[key].name] = Found(known[key].from_env(value), key)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _from_file(path: str, where: str) -> dict[str, Found]:
    try:
        with open(path, encoding="utf-8") as file:
            content = strict_yaml.load(file)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid YAML: {on_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must hold `setting: value` lines, got a {type(content).__name__}")
    known = {option.key: option for option in _all()}
    found: dict[str, Found] = {}
    problems = []
    for key, value in content.items():
        option = known.get(str(key).replace("_", "-"))
        if option is None:
            why = not_served(str(key))
            problems.append(
                f"{path}: " + (f"{key}{why}" if why else f"unknown setting {key!r}{closest(str(key).replace('_', '-'), known)}")
            )
        elif option.name in found:
            problems.append(f"{path}: {option.key} is set twice")
        elif value is not None:
            found[option.name] = Found(value, f"{path}: {option.key}")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _all() -> list[Option]:
    return [option for model in MODELS for option in options_of(model)]


SHORT = {"-dp": "--data-parallel-size"}
"""vLLM's short flags that are not served."""


class Parser(argparse.ArgumentParser):
    """argparse with vLLM's habits and ours: `_` in a flag reads as `-`, no abbreviations, and an
    unknown flag is answered with the closest known one. Subcommands are of this class too. `rest`: the attribute
    that gets what follows a `--`, for commands that hand it on (argparse gives it to whoever comes first)."""

    rest: str | None = None

    def __init__(self, *args: Any, **kw: Any) -> None:
        kw.setdefault("allow_abbrev", False)
        kw.setdefault("formatter_class", Help)
        super().__init__(*args, **kw)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, without a screenful of usage; exit 2."""
        self.exit(2, "".join(f"{self.prog}: {line}\n" for line in [*message.splitlines(), f"see {self.prog} --help"]))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = [_dashes(a) for a in args] if args is not None else None
        after: list[str] = []
        if self.rest is not None and given is not None and "--" in given:
            at = given.index("--")
            given, after = given[:at], given[at + 1 :]
        space, extra = super().parse_known_args(given, namespace)
        if self.rest is not None:
            setattr(space, self.rest, after)
        if extra:
            self.error("\n".join(self._unknown(extra)))
        return space, extra

    def _unknown(self, extra: Sequence[str]) -> Iterable[str]:
        flags = [text for action in self._actions for text in action.option_strings]
        named = [text.split("=", 1)[0] for text in extra if text.startswith("-")]
        for flag in named:
            why = not_served(SHORT.get(flag, flag))
            yield f"{flag}{why}" if why else f"unknown flag {flag}{closest(flag, flags)}"
        if not named:
            yield f"too many arguments: {' '.join(map(json.dumps, extra))} (a flag that takes several values is repeated for each)"


class Help(argparse.HelpFormatter):
    """Wide enough that a flag and its help stand on one line."""

    def __init__(self, prog: str, **kw: Any) -> None:
        kw.setdefault("max_help_position", 34)
        super().__init__(prog, **kw)


def _dashes(argument: str) -> str:
    if not re.match(r"--[a-z][a-z_]*_", argument):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
