"""Flags of SamplingParams, one per field but `grammar`. Owns their help; names, types and checks are the struct's."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_type_hints

import msgspec
from pydantic import TypeAdapter, ValidationError

from octavo.cli.options import Option
from octavo.errors import ConfigError, RequestError
from octavo.request import SamplingParams

HELP = {
    "n": "Answers to return.",
    "best_of": "Answers to draw; the best n of them are returned.",
    "temperature": "0 always takes the most likely token; higher is more varied.",
    "top_p": "Draw from the smallest set of tokens with this probability.",
    "top_k": "Draw from the k most likely tokens; 0 is off.",
    "min_p": "Leave out tokens less likely than this share of the best one.",
    "presence_penalty": "Lower tokens that the answer has already used.",
    "frequency_penalty": "Lower tokens by how often the answer has used them.",
    "repetition_penalty": "Divide down tokens of prompt and answer; 1 is off.",
    "logit_bias": "Add to the logits of token ids: {\"ID\": -100 to 100, ...}.",
    "seed": "The same seed gives the same answer.",
    "max_tokens": "Longest answer, in tokens.",
    "min_tokens": "Shortest answer, in tokens.",
    "ignore_eos": "Go on after the model's end of sequence.",
    "stop": "End right before this text (repeatable).",
    "stop_token_ids": "End after this token id (repeatable).",
    "include_stop_str_in_output": "Keep the stop text in the answer.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "logprobs": "Log-probabilities of the chosen token and this many more.",
    "prompt_logprobs": "The same for the prompt.",
}  # fmt: skip

PREFIX = "sampling_"
"""Keeps `--seed` of an answer apart from the engine's field of that name in the namespace."""

_ANNOTATIONS: Mapping[str, Any] = {"stop": tuple[str, ...] | None, "stop_token_ids": tuple[int, ...] | None}


@cache
def sampling_options() -> tuple[Option, ...]:
    hints = get_type_hints(SamplingParams)
    return tuple(
        Option(f.name, _ANNOTATIONS.get(f.name, hints[f.name]), f.default, HELP[f.name], "sampling")
        for f in msgspec.structs.fields(SamplingParams)
        if f.name in HELP
    )


def add_sampling(parser: argparse.ArgumentParser, *, skip: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags but those of `skip`, which the command could not honour; `defaults` are its own where they differ from the
    struct's."""
    group = parser.add_argument_group("sampling options")
    for option in sampling_options():
        if option.name in skip:
            continue
        replace(option, default=defaults.get(option.name, option.default)).add_to(group, dest=PREFIX + option.name)


def read_sampling(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Raises ConfigError that names the flag, the value and what is allowed."""
    values = dict(defaults)
    for option in sampling_options():
        if hasattr(args, PREFIX + option.name):
            values[option.name] = _value(option, getattr(args, PREFIX + option.name))
    try:
        return SamplingParams(**values)
    except RequestError as error:
        flag = f"--{(error.param or '').replace('_', '-')}"
        raise ConfigError(f"{flag}: {error.message.removeprefix(f'{error.param}: ')}") from error


def _value(option: Option, given: Any) -> Any:
    try:
        return TypeAdapter(option.annotation).validate_python(option.parse(given))
    except ValidationError:
        raise ConfigError(f"{option.flag}: {option.complain(given)}") from None
    except ValueError as error:
        raise ConfigError(f"{option.flag}: {error}") from None
