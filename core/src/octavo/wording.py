"""Wording of errors about names and options: the nearest known name, and pydantic's complaints with their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

ONE_DEVICE = "a model runs on one device (more devices: a server for each, behind a balancer)"
NOT_SERVED: Mapping[str, str] = {
    "data_parallel_size": ONE_DEVICE,
    "distributed_executor_backend": ONE_DEVICE,
    "structured_outputs_config": "--grammar-backend names what enforces schemas, and --plugins has its options",
    "guided_decoding_backend": "--grammar-backend names what enforces schemas",
    "reasoning_parser": "a model's reasoning is part of its text",
    "enable_lora": "there are no adapters (merge them into a checkpoint)",
    "speculative_config": "every token is drawn from the model itself",
    "cpu_offload_gb": "weights stay on the device (--swap-space is for the KV cache)",
    "generation_config": "what a client leaves out has the API's default, whatever the checkpoint recommends",
    "enable_log_requests": "every request is a line of the log already",
    "hf_token": "the hub's own variable HF_TOKEN has it",
    "download_dir": "the hub's own variable HF_HOME says where its cache lies",
}
"""vLLM's settings that scripts bring along and that mean nothing here, with the reason: unknown is not the word for them."""


def not_served(name: str) -> str:
    """The end of an error about a setting of vLLM's that is none here (in any spelling: flag or key), or "" for others."""
    reason = NOT_SERVED.get(name.lstrip("-").replace("-", "_"))
    return f" is not supported: {reason}; leave it out" if reason else ""


def normalise(distribution: str) -> str:
    """A distribution's name as indexes compare it: lower case, runs of - _ . as one dash."""
    return "-".join(part for part in distribution.lower().replace("_", "-").replace(".", "-").split("-") if part)


def hint(name: str, names: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all there are."""
    names = sorted(set(names))
    near = get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are: {', '.join(names)}" if names else "; there are none"


def on_one_line(error: Exception) -> str:
    """A parser's error that spreads over several lines, as one."""
    return " ".join(str(error).split())


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, without its path, which the error's own place has named."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error.reason} at byte {error.start}"
    return f"cannot be read: {error.strerror}"


def complaints(where: str, model: type[BaseModel], error: ValidationError, *, engine: bool = False) -> str:
    """One line for a pydantic error: where (in front of the option's name as it stands), what, the value seen, and the nearest
    option. engine: the options are an engine's, among which those of vLLM's may be."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if engine and item["type"] == "extra_forbidden" and (why := not_served(key)):
            lines.append(f"{where}{key}{why}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"{where}{key}: unknown option{hint(key, model.model_fields)}")
        else:
            said = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
            lines.append(f"{where}{key}: {said}, got {item['input']!r}")
    return "; ".join(lines)
