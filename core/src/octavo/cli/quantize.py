"""`octavo quantize METHOD MODEL --out DIR`: a quantised checkpoint, made by the quantizer plugin of that name.

Owns the command line, the new folder and the progress that is shown; the arithmetic is the provider's
(`Provider.quantize`, see `octavo.interfaces.QuantizeTask`). Core knows no method.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError

from octavo.catalog import Catalog, Entry, Needs, Options
from octavo.cli.console import Stages
from octavo.cli.flags import add_flags, read
from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError, PluginError
from octavo.first_party import owner
from octavo.interfaces import Quantize, QuantizeTask
from octavo.wording import complaints, hint, unreadable

FLAGS = ("revision", "device", "num_threads", "dtype", "model_adapter", "plugins")
"""The engine's settings that matter here."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        usage="octavo quantize METHOD MODEL --out DIR [--calibrate FILE] [--set KEY=VALUE ...] [options]",
        description="Make a quantised checkpoint that Octavo and transformers load. `octavo quantize METHOD --show` lists "
        "what --set takes.",
    )
    parser.add_argument("method", metavar="METHOD", help="The quantizer, such as fp8 or awq.")
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="Folder, GGUF file, hub id, or `demo`.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="The new folder; it must not be there yet.")
    parser.add_argument("--calibrate", "--data", type=Path, metavar="FILE", help="A text (UTF-8) like those the model will see.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="An option of METHOD (repeatable).")
    for flag, metavar in (("--group-size", "N"), ("--skip", "MODULES")):
        key = flag.removeprefix("--").replace("-", "_")
        parser.add_argument(
            flag, dest="set", action="append", type=f"{key}={{}}".format, metavar=metavar, help=f"--set {key}={metavar}"
        )
    parser.add_argument(
        "--no-zero-point", dest="set", action="append_const", const="zero_point=false", help="--set zero_point=false"
    )
    parser.add_argument("--show", action="store_true", help="List the options of METHOD and exit.")
    parser.add_argument("--json", action="store_true", help="Print what was made as JSON.")
    add_flags(parser, EngineConfig, skip=set(EngineConfig.model_fields) - set(FLAGS))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from octavo.plugins import discover

    config = read(EngineConfig, args)
    catalog = discover(config.plugins)
    entry, function = maker(catalog, args.method)
    assert entry.provider is not None
    if args.show:
        _show(args.method, entry.provider.quantize_options)
        return 0
    missing = [name for name, value in (("MODEL", args.positional_model), ("--out", args.out)) if value is None]
    if missing:
        raise ConfigError(f"octavo quantize {args.method}: {' and '.join(missing)} must be given")
    options = parse_options(args.method, entry.provider.quantize_options, args.set)
    text = _text(args.calibrate)
    with Stages() as stages:
        made = quantize(config, catalog, function, options, args.out, text, stages.tell)
    if args.json:
        json.dump(made, sys.stdout, indent=2)
        print()
    else:
        print(f"{made['out']}: {made['bytes'] / 2**20:,.1f} MiB of weights")
        for name, value in made["report"].items():
            print(f"  {name}: {value}")
    return 0


def quantize(
    config: EngineConfig,
    catalog: Catalog,
    function: Quantize,
    options: Options,
    out: Path,
    text: str | None,
    tell: Any = lambda stage, done=0, total=0: None,
) -> dict[str, Any]:
    """Make the checkpoint: {"out", "bytes", "quantization_config", "report"}. Nothing is left at `out` if it fails."""
    import torch

    from octavo.engine.device import choose_device, spare_threads
    from octavo.engine.precision import model_dtype
    from octavo.model.export import CheckpointWriter
    from octavo.model.source import resolve_source

    catalog = catalog.configured(config.plugins)
    source = resolve_source(config.model, config.revision)
    if source.quantization_config:
        method = source.quantization_config.get("quant_method")
        raise ConfigError(f"{source.path}: is quantised already ({method}); give the checkpoint that it was made from")
    device = choose_device(config.device).device
    if device.type == "cpu":
        torch.set_num_threads(spare_threads(config.num_threads).count)
    dtype, _ = model_dtype(config.dtype, source, device)
    facts = {"architecture": source.architecture, "config": source.config}
    adapter = catalog.resolve("model", Needs("model", device, dtype, facts), config.model_adapter).create(None)
    with CheckpointWriter(out, source) as writer:
        try:
            done = function(options, QuantizeTask(source, adapter, device, dtype, text, writer, tell))
        except LoadError as error:  # of an adapter, which knows no file
            raise error if str(source.path) in str(error) else LoadError(f"{source.path}: {error}") from error
        tell("writing")
        writer.finish(done.config, dtype=dtype)
    return {
        "out": str(out),
        "bytes": writer.total_bytes,
        "quantization_config": dict(done.config),
        "report": dict(done.report),
    }


def maker(catalog: Catalog, method: str) -> tuple[Entry, Quantize]:
    """The provider of this name and its function. ConfigError names those that there are; PluginError if it is broken."""
    found = [entry for entry in catalog.entries if entry.kind == "quantizer" and entry.provider and entry.provider.quantize]
    named = [entry for entry in found if entry.name == method]
    if not named:
        raise ConfigError(
            f"METHOD {method!r}: no installed quantizer of this name makes checkpoints"
            f"{owner('quantizer', method) or hint(method, [e.name for e in found])}"
        )
    entry = named[0]
    if entry.state != "ok":
        raise PluginError(f"METHOD {method!r}: {entry.origin} has it, but it is {entry.state}: {entry.reason}")
    assert entry.provider is not None
    module, _, attribute = entry.provider.quantize.partition(":")
    try:
        return entry, cast("Quantize", getattr(import_module(module), attribute))
    except Exception as error:
        raise PluginError(
            f"METHOD {method!r} of {entry.origin} cannot be loaded from {entry.provider.quantize!r}: {type(error).__name__}: {error}"
        ) from error


def parse_options(method: str, model: type[Options], pairs: Sequence[str]) -> Options:
    """--set pairs as the provider's options. ConfigError for a pair without `=`, an unknown key or a wrong value."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: must be KEY=VALUE")
        values[key.replace("-", "_")] = value
    try:
        return model.model_validate_strings(values)
    except ValidationError as error:
        raise ConfigError(complaints("--set ", model, error)) from error


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibrate {path}: {unreadable(error)}") from error
    if not text.strip():
        raise ConfigError(f"--calibrate {path}: the file is empty")
    return text


def _show(method: str, model: type[Options]) -> None:
    fields: Mapping[str, Any] = model.model_fields
    print(f"octavo quantize {method} takes" + (":" if fields else " no options."))
    for name, field in fields.items():
        print(f"  --set {name}={_values(field.annotation)}  {field.description or ''} [default: {_spelt(field.default)}]")


def _values(annotation: Any) -> str:
    """What --set takes for a field: its words where it has some, else the kind of value, as other flags show it."""
    if annotation is bool:
        return "true|false"
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    return {int: "N", float: "X"}.get(annotation, "TEXT")


def _spelt(value: Any) -> str:
    """A default as --set would be given it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return str(value)
