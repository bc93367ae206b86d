"""Which checkpoint an engine reads, and with which RoPE: MODEL, or what other flags put in its place.

Owns the meaning of --awq-ckpt-path, --load-format, --rope-scaling-factor and --rope-theta. Part of the plan: reads small files alone.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError
from octavo.model.rope import rope_parameters, stretched
from octavo.model.source import ModelSource, resolve_source

_GEOMETRY = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def planned_source(config: EngineConfig, why: dict[str, str]) -> ModelSource:
    """What the configuration says to read; `why` gets the reasons of what differs from MODEL. ConfigError for flags that contradict
    the checkpoint, LoadError where there is none."""
    there = config.load_format != "dummy" and not config.awq_ckpt_path
    source = _stretched(config, _checkpoint(config, resolve_source(config.model, config.revision, weights=there), why), why)
    _check_format(config, source)
    return source


def _checkpoint(config: EngineConfig, source: ModelSource, why: dict[str, str]) -> ModelSource:
    """The source of the weights: MODEL, or the AWQ checkpoint of it that --awq-ckpt-path names, with MODEL's name and ends of
    sequence. ConfigError if that is not AWQ, or not a checkpoint of this model."""
    if config.awq_ckpt_path is None:
        return source
    try:
        found = resolve_source(config.awq_ckpt_path)
    except LoadError as error:
        said = str(error).removeprefix(f"{config.awq_ckpt_path}: ")
        raise ConfigError(f"--awq-ckpt-path {config.awq_ckpt_path}: {said}") from error
    method = found.quantization_config.get("quant_method")
    if method != "awq":
        raise ConfigError(
            f"--awq-ckpt-path {config.awq_ckpt_path}: "
            + (f"its quant_method is {method!r}, not 'awq'" if method else "it is not quantised")
        )
    if config.quantization not in (None, "awq"):
        raise ConfigError(
            f"--awq-ckpt-path with --quantization {config.quantization}: the weights are AWQ; leave --quantization out"
        )
    keys = ("architectures", *_GEOMETRY)
    differ = [f"{key} {found.config.get(key)!r} instead of {source.config.get(key)!r}" for key in keys
              if found.config.get(key) != source.config.get(key)]  # fmt: skip
    if differ:
        raise ConfigError(f"--awq-ckpt-path {config.awq_ckpt_path}: is not a checkpoint of {source.name}: {', '.join(differ)}")
    why["weights"] = f"--awq-ckpt-path {config.awq_ckpt_path}"
    ends = {"eos_token_id": list(source.eos_token_ids())}
    return replace(found, name=source.name, generation_config={**source.generation_config, **ends}, text_path=source.path)


def _stretched(config: EngineConfig, source: ModelSource, why: dict[str, str]) -> ModelSource:
    """The source with the RoPE that the configuration asks for; `why` says so where it asks."""
    factor, theta = config.rope_scaling_factor, config.rope_theta
    if factor is None and theta is None:
        return source
    named = {"--rope-scaling-factor": factor, "--rope-theta": theta}
    flags = [f"{flag} {value:g}" for flag, value in named.items() if value is not None]
    try:
        changed = stretched(source.config, factor=factor, theta=theta)
    except LoadError as error:
        raise ConfigError(f"{' '.join(flags)}: {error}") from error
    why["rope"] = f"{' '.join(flags)}; the checkpoint has {dict(rope_parameters(source.config)) or 'a default RoPE'}"
    return replace(source, config=changed)


def _check_format(config: EngineConfig, source: ModelSource) -> None:
    wrong = {"gguf": "folder", "safetensors": "gguf"}.get(config.load_format)
    if source.kind == wrong:
        what = "a GGUF file" if source.kind == "gguf" else "a folder of safetensors"
        raise ConfigError(f"--load-format {config.load_format}: {source.path} is {what}; use --load-format auto")
