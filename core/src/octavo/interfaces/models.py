"""Operators and model architectures. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.catalog import Device
from octavo.interfaces.attention import AttentionLayer
from octavo.interfaces.geometry import KVSpec, Limits
from octavo.interfaces.step import Step
from octavo.interfaces.weights import Experts, ExpertsSpec, Linear, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.model.rope import RopeConfig


class Operators(Protocol):
    """A set of fused operators. Called as cls(options, OperatorParts); `ops` maps (name, format)
    to a callable. Each (name, format) is served by the highest-priority provider that has it;
    signatures are those of core's torch operators in `octavo.model.operators`, the oracle."""

    ops: Mapping[tuple[str, str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class OperatorParts:
    device: Device
    dtype: str


class Attention(Protocol):
    """A model's attention layer, bound to a backend (octavo.attention.layer.PagedAttention)."""

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim], attend with q [T, heads, k_dim]: [T, heads, v_dim]."""

    def turned(self, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """The same of a packed qkv [T, heads + 2 kv_heads, D] that is still to be normalised and turned, as the
        operator "qk_norm_rope" does it; may overwrite qkv."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is built from. `attention` registers a layer and returns what writes its cache and attends;
    `op` resolves a fused operator, `find` one that nobody has to offer (None: nobody does)."""

    device: Device
    dtype: str
    limits: Limits
    weights: Weights
    linear: Callable[..., Linear]
    tied: Callable[..., Linear]
    attention: Callable[[AttentionLayer], Attention]
    op: Callable[..., Callable[..., Any]]
    experts: Callable[[str, ExpertsSpec], Experts]
    find: Callable[[str], Callable[..., Any] | None] = lambda name: None


class Model(Protocol):
    """A built model. Stateless between steps: the cache belongs to the pool. An attribute `capturable` that is False keeps
    its steps out of CUDA graphs."""

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, hidden] after the final norm. A model with an attribute `selects` that is True
        returns those of step.wanted alone, [S, hidden] in that order, where that is not None."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, hidden]."""

    def finish(self) -> None:
        """Called once, after every weight is filled."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine reads off a model config: geometry for pool, limits and attention. ropes are every RoPE of the
    model once: where one depends on a sequence's length, its variant is part of the prefix-cache key. mlp_weights: the
    weights of all MLPs and experts; mlp_values: the values that a token's MLP or experts hold at most during a step; 0: those of
    one dense gated MLP a layer, of the config's intermediate_size. attention_weights: the weights of all attention blocks;
    0: those of layers' heads projected from the hidden state and back."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int  # the longest context the checkpoint claims
    layers: tuple[AttentionLayer, ...]
    kv_specs: tuple[KVSpec, ...]  # one per attention layer
    tied_head: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    mlp_weights: int = 0
    mlp_values: int = 0
    attention_weights: int = 0


class ModelAdapter(Protocol):
    """Architectures. Called as cls(options, None). Needs.facts for `accepts`: architecture, config."""

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Read config.json (a dict). Raises LoadError naming the key that is wrong or unknown."""

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model: ...

    def ignored(self, name: str) -> bool:
        """Checkpoint tensors that are known and unused (such as rotary_emb.inv_freq)."""

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Preferences with reasons, such as {"block_size": 16}; may be empty."""


class CanonicalNames(Protocol):
    """What a ModelAdapter may also offer, where checkpoints of one architecture go by several names."""

    def canonical(self, name: str) -> str:
        """The name that the model declares for the checkpoint tensor `name`; the name itself for any other."""
