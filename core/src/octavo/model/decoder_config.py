"""What a decoder is, complete and checked: the numbers that `octavo.model.decoder` builds from.

Owns the vocabulary of differences between families. Layer code reads these fields and nothing else: it must never know
the name of a family. Pure Python; `octavo.model.families` fills it from a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.interfaces import AttentionLayer, ExpertsSpec, Routing
from octavo.model.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A mixture of experts in place of an MLP. module, router and experts are the checkpoint's names, such as "mlp",
    "gate" and "experts"; router_bias: the router has a bias."""

    experts_spec: ExpertsSpec
    routing: Routing
    module: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    router_bias: bool = False

    @property
    def weights(self) -> int:
        """Of all experts."""
        return 3 * self.experts_spec.count * self.experts_spec.hidden * self.experts_spec.inner

    @property
    def values(self) -> int:
        """Values that one token's experts hold during a step."""
        return self.experts_spec.top_k * (self.experts_spec.hidden + self.experts_spec.inner)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs between layers: the attention window in tokens (None sees everything), the RoPE, and the mixture of
    experts (None: a plain MLP)."""

    window: int | None
    rope: RopeConfig
    mixture: MixtureConfig | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder, complete: nothing is left to a default past this point.

    scale multiplies q.k, softcap bounds it (0: off) and logit_softcap the logits: cap * tanh(x / cap). norm_offset is
    added to every stored norm weight. sandwich: a norm after attention and after the MLP too, before they join the
    residual stream. embedding_scale multiplies the embedding. sinks: a learned logit per head that joins the softmax.
    fused_names: the checkpoint has qkv_proj and gate_up_proj, each one matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    scale: float
    softcap: float
    logit_softcap: float
    norm_offset: float
    sandwich: bool
    embedding_scale: float
    sinks: bool
    fused_names: bool
    layers: tuple[LayerConfig, ...]

    def attention_layer(self, index: int) -> AttentionLayer:
        """Layer `index` as the attention backend sees it, without the tensor of its sinks."""
        return AttentionLayer(
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            scale=self.scale,
            window=self.layers[index].window,
            softcap=self.softcap,
            has_sinks=self.sinks,
            module=f"model.layers.{index}.self_attn",
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Every RoPE once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def mlp_weights(self) -> int:
        """Weights of all MLPs and experts, biases and routers not counted."""
        dense = 3 * self.hidden_size * self.intermediate_size
        return sum(dense if layer.mixture is None else layer.mixture.weights for layer in self.layers)

    @property
    def mlp_values(self) -> int:
        """Values that one token's MLP or experts hold at most: gate, up and their product; of experts, the product and the
        result of each that it takes."""
        return max(3 * self.intermediate_size if layer.mixture is None else layer.mixture.values for layer in self.layers)
