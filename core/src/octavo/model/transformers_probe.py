"""What a model of transformers asks of attention: one pass over it on the meta device, with Octavo's functions taking notes.

Owns the two functions that are registered with transformers under the name NAME. The attention function hands every call to whoever is
attached to the module that calls (`attach`): here a recorder, in a served model its paged layer. The mask function makes no mask; it
works out which keys the mask would show and returns that as a Visible, which transformers carries to the attention function in the
mask's place. A model that does anything else with its mask fails here, in the plan, and not in a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import LoadError

NAME = "octavo_paged"
_HANDLER = "octavo_attention"
_PLAIN = frozenset({"position_ids", "cache_position"})
"""Tensors that calls carry and that change nothing: positions are the step's."""


@dataclass(frozen=True, slots=True)
class Visible:
    """Keys that a query at position t sees: the last `window` up to t, all if None. problem: not that, and why."""

    window: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention: the module's name within the causal model, and its numbers as in interfaces.AttentionLayer."""

    module: str
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    softcap: float
    sinks: bool


def attach(module: nn.Module, handler: Callable[..., Tensor]) -> None:
    """Let `handler(module, query, key, value, mask, **kwargs)` attend for a module: q, k and v [1, heads, T, dim] -> [1, T, heads, v_dim]."""
    object.__setattr__(module, _HANDLER, handler)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *rest: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return getattr(module, _HANDLER)(module, query, key, value, attention_mask, **kwargs), None


def _mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any) -> Visible:
    """The window of a mask, found by asking its function about single pairs of positions."""

    def sees(query: int, key: int) -> bool:
        zero = torch.zeros((), dtype=torch.long)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    at = 3 * (local_size or 64)
    first = at - local_size + 1 if local_size else 0
    keys = [key for key in (0, first - 1, first, at - 1, at, at + 1) if key >= 0]
    try:
        wrong = [key for key in keys if sees(at, key) is not (first <= key <= at)]
    except Exception as error:
        return Visible(problem=f"its mask cannot be asked about single positions ({type(error).__name__}: {error})")
    if wrong:
        return Visible(problem="its mask is neither causal nor a causal window")
    return Visible(local_size)


def register() -> None:
    """Make the two functions known to transformers. May be called more than once."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def parse(config: Mapping[str, Any]) -> Any:
    """transformers' config object of a config.json. LoadError where transformers has no such causal model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kind, wanted = config.get("model_type"), (config.get("architectures") or [None])[0]
    if kind not in NAMES:
        raise LoadError(f"model_type {kind!r}: transformers has no causal language model of this type")
    has = NAMES[kind] if isinstance(NAMES[kind], str) else NAMES[kind][0]
    if wanted != has:
        raise LoadError(f"architectures {wanted!r}: transformers' causal language model of model_type {kind!r} is {has!r}")
    try:
        return AutoConfig.for_model(kind, **{key: value for key, value in deepcopy(dict(config)).items() if key != "model_type"})
    except Exception as error:  # transformers validates in many ways
        raise LoadError(f"transformers does not read this config: {error}") from error


def create(parsed: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' causal model, its parameters without values."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register()
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(parsed, dtype=dtype, attn_implementation=NAME)
    model.tie_weights()  # which goes with the initialisation that is left out
    return model.eval().requires_grad_(False)


def base(model: Any) -> nn.Module:
    """The part of a causal model that ends with hidden states."""
    found = getattr(model, model.base_model_prefix, None)
    if not isinstance(found, nn.Module):
        raise LoadError(f"{type(model).__name__} has no base model named {model.base_model_prefix!r}")
    return found


def probe(parsed: Any) -> list[Call]:
    """Every call of attention in order, one a layer. LoadError for a model whose attention is more than that."""
    name = type(parsed).__name__
    try:
        model = create(deepcopy(parsed), torch.bfloat16, torch.device("meta"))
    except Exception as error:
        raise LoadError(f"{name}: transformers does not build it with its attention interface ({_first_line(error)})") from error
    body, takes = base(model), {"input_ids", "position_ids", "attention_mask"}
    missing = sorted(takes - set(inspect.signature(body.forward).parameters))
    if getattr(model, "_is_stateful", False):
        raise LoadError(f"{name}: it keeps a state besides keys and values")
    if missing:
        raise LoadError(f"{name}: its forward takes no {', '.join(missing)}, so rows of several sequences cannot share a step")
    calls: list[Call] = []
    problems: list[str] = []

    def recorder(place: str) -> Callable[..., Tensor]:
        def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
            calls.append(_call(place, module, query, key, value, mask, kwargs, problems))
            return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

        return record

    for place, module in model.named_modules():
        attach(module, recorder(place))
    row = torch.zeros(1, 3, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            body(input_ids=row, position_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
    except Exception as error:
        raise LoadError(
            f"{name}: it does not run through transformers' attention interface and mask functions alone ({_first_line(error)})"
        ) from error
    layers = int(getattr(parsed, "num_hidden_layers", len(calls)))
    if len({call.module for call in calls}) != len(calls) or len(calls) != layers:
        problems.append(f"{len(calls)} calls of attention for {layers} layers: each layer must attend once")
    if problems:
        raise LoadError(f"{name}: {problems[0]}")
    return calls


def _call(
    place: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
    problems: list[str],
) -> Call:
    scale, cap, sinks = kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")
    known = _PLAIN | {"s_aux"}
    extra = sorted(key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in known)
    if extra:
        problems.append(f"{place} gives attention {', '.join(extra)}, which paged attention here does not know")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        problems.append(f"{place} does not attend causally")
    if not isinstance(mask, Visible):
        problems.append(f"{place} attends with no mask of transformers' mask functions, so what it may see is not known")
        mask = Visible()
    if mask.problem:
        problems.append(f"{place}: {mask.problem}")
    window = kwargs.get("sliding_window")
    if window is not None and window != mask.window:
        problems.append(f"{place} says a window of {window}, its mask {mask.window}")
    if not (query.shape[0] == key.shape[0] == value.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2] == 3):
        problems.append(f"{place} attends with queries {list(query.shape)} over keys {list(key.shape)}: not one row of tokens")
    return Call(
        module=place,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        k_dim=query.shape[-1],
        v_dim=value.shape[-1],
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=mask.window,
        softcap=float(cap or 0.0),
        sinks=sinks is not None,
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
