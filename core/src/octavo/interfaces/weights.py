"""Weights: how layers declare them, and the formats they come in. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.catalog import Device

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.interfaces.models import ModelAdapter
    from octavo.model.export import CheckpointWriter
    from octavo.model.source import ModelSource


class Weights(Protocol):
    """Where layers declare the checkpoint tensors they want; nothing is allocated by declaring."""

    def declare(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        fill: Callable[[Tensor], None],
        *,
        optional: bool = False,
        dtypes: tuple[str, ...] = (),
    ) -> None:
        """The checkpoint tensor `name` of `shape` (None: any) goes to `fill`, exactly once. A missing tensor
        that is not optional, a wrong shape, an undeclared tensor: LoadError, before `fill` runs."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A quantised Linear input: value = data * scale. What an operator of a format other than "plain" returns in the
    place of a tensor, and a Linear of that format takes. (It may return a plain tensor where quantising so few rows would
    cost more than it saves: a Linear takes both.)

    data: [T, in], such as float8_e4m3fn, each row dense. scale: float32 [T, 1] (a scale a token) or [T, ceil(in / g)]
    (one for every g neighbouring channels of a token); the format's name says which, and its quantizer documents it.
    """

    data: Tensor
    scale: Tensor


class Linear(Protocol):
    """y = x W^T + b, in whatever format the quantizer keeps. `activation` names the input format
    it likes best ("plain" is a tensor of the model's dtype, others are an `Activation`): whoever makes its input
    resolves ("add_rms_norm", activation) and the like, so that the quantisation is fused. It takes plain input
    too. `finish` runs once after every part is filled."""

    activation: str
    out_features: int

    def __call__(self, x: Any) -> Tensor:
        """x [T, in_features], a Tensor or an Activation of the format `activation` -> [T, out_features] (the parts
        side by side)."""

    def finish(self) -> None: ...


class GatedLinear(Protocol):
    """What a Linear whose parts are a gate and a value, side by side, may also offer; asked after `finish`."""

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """In one kernel what the product and the operator `activation` + "_mul" do in two: x [T, in_features] ->
        act(gate) * value [T, out_features / 2], in the Linear's own input format. None: there is no such kernel for this activation."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How the two halves of a gated MLP become one: with g = min(gate, limit) and u = clamp(up, -limit, limit),
    g * sigmoid(alpha * g) * (u + offset). The defaults are SwiGLU (silu(gate) * up); gpt-oss has 1.702, 7 and 1."""

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits choose experts, and how much each counts.

    score makes s of the logits: "softmax" over all experts, "sigmoid", "sqrtsoftplus" (the root of softplus), or
    "softmax_chosen" (the logits choose, and the softmax is over those chosen). The choice is by s plus the layer's
    correction bias, if it has one: the top_k highest, among the `kept_groups` best of `groups` equal, consecutive
    groups of experts, ranked by group_score, the "max" of a group or the "sum2" of its two highest. An expert counts
    s without the bias, divided by the sum over those chosen where `renormalise`, times `scale`.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_chosen"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "sum2"] = "max"
    renormalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of one layer: `count` gated MLPs, hidden -> inner -> hidden, of which a token takes top_k.

    names are the checkpoint's (gate, up, down). A checkpoint has either each expert's matrices, as
    `prefix.E.gate_proj.weight` [inner, hidden] and so on, or, where `stacked`, gpt-oss's form: `prefix.gate_up_proj`
    [count, hidden, 2 * inner], gate and up columns alternating, and `prefix.down_proj` [count, inner, hidden], with
    `bias` also `prefix.gate_up_proj_bias` [count, 2 * inner] and `prefix.down_proj_bias` [count, hidden]."""

    count: int
    hidden: int
    inner: int
    top_k: int
    gate: Gate = Gate()
    bias: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False


class Experts(Protocol):
    """The routed experts of one layer, in whatever format the quantizer keeps. The input is in the model's dtype,
    because the router reads it too. `finish` runs once after every part is filled."""

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """Of x [T, hidden]: the sum over a token's experts ids int32 [T, top_k], each times its weight in weights
        float32 [T, top_k], plus base [T, hidden] (shared experts) if given: [T, hidden] in the model's dtype.
        Must not wait for the device: it runs inside captured graphs."""

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QuantizerParts:
    """Constructor parts of a quantizer. config is the checkpoint's quantization_config ({} if none). find
    gives an operator that nobody has to offer, such as "small_linear" or "matrix", or None."""

    device: Device
    dtype: str
    config: Mapping[str, Any]
    weights: Weights
    find: Callable[[str], Callable[..., Any] | None] = lambda name: None


class Quantizer(Protocol):
    """A weight format. Called as cls(options, QuantizerParts). Needs.facts for `accepts`: method
    (the name in quantization_config or the flag; "" for none), config, architecture, dummy (random
    weights, of which there is no config). One that dequantises says in
    Accept.preferences["stored_values"] how many values of the model's dtype an element of a quantised tensor becomes, by the end
    of the tensor's name (so does a model that dequantises a part by itself); one that quantises plain weights as they load, in
    ["linear_bytes"] how many bytes a weight of a Linear then has: the pool is sized by both. ["kv_cache_dtype"] is the KV dtype that the checkpoint has scales for, taken by
    `--kv-cache-dtype auto`."""

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        """A Linear made of parts (checkpoint module name, output features) side by side: for fused
        QKV {"q_proj": 576, ...} under prefix "model.layers.0.self_attn". It declares its weights.
        A head gives float32 logits, not rounded to the model's dtype on the way."""

    def tied(self, embedding: Callable[[], Tensor], out_features: int) -> Linear:
        """A head, as above, whose weight is the (already filled) input embedding [vocab, hidden]."""

    def experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        """The routed experts under prefix "model.layers.0.mlp.experts". It declares their weights. A format
        without this method serves dense models only; a mixture of experts is then refused by name."""


@dataclass(frozen=True, slots=True)
class QuantizeTask:
    """What `octavo quantize` hands to a provider's `Provider.quantize`.

    source: the model to quantise, unquantised (a folder or a GGUF file). adapter: its architecture. device and
    dtype: where, and in which torch dtype, the model runs while it is calibrated. calibration: a text, None where
    none was given. writer: takes every tensor of the new checkpoint (`writer.add(name, tensor)`); closing it,
    config.json and the tokenizer are the command's work. tell(stage, done, total) shows progress.
    `octavo.model.observe` runs the model over the text, `octavo.model.export.read_tensors` yields its tensors."""

    source: ModelSource
    adapter: ModelAdapter
    device: Device
    dtype: str
    calibration: str | None
    writer: CheckpointWriter
    tell: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What comes back: the `quantization_config` of the new config.json, and facts for the user by name."""

    config: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)


class Quantize(Protocol):
    """The function that `Provider.quantize` names. Raises QuantizeError or ConfigError for what it cannot do,
    before it adds a tensor where that can be known."""

    def __call__(self, options: Any, task: QuantizeTask) -> Quantized: ...
