"""A mixture of experts gives transformers' output for every way of routing that Octavo knows, and its weights come
from every form of checkpoint.

Oracles: the routers and blocks of transformers' DeepSeek V2, V3 and V4, Qwen3-MoE and gpt-oss, eager, float32.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from octavo.catalog import Device
from octavo.decision import OperatorSet
from octavo.errors import PluginError
from octavo.interfaces import ExpertsSpec, Gate, Limits, ModelParts, OperatorParts, QuantizerParts, Routing
from octavo.model import operators
from octavo.model.linear import PlainQuantizer
from octavo.model.moe import MoE, Router
from octavo.testing.model import DictWeights
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, TOP = 24, 10, 16, 3
TOLERANCE = 1e-5

GREEDY_V2 = {"topk_method": "greedy", "routed_scaling_factor": 1.5, "n_group": None, "topk_group": None}
GROUPS_V2 = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 0.7, "n_group": 4, "topk_group": 2}
GROUPS_V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

WAYS: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "deepseek v2, greedy": ("deepseek_v2", "TopkRouter", GREEDY_V2, Routing(TOP, scale=1.5)),
    "deepseek v2, groups": ("deepseek_v2", "TopkRouter", GROUPS_V2, Routing(TOP, groups=4, kept_groups=2, scale=0.7)),
    "deepseek v3": (
        "deepseek_v3", "TopkRouter", GROUPS_V3 | {"norm_topk_prob": True},
        Routing(TOP, "sigmoid", groups=4, kept_groups=2, group_score="sum2", renormalise=True, scale=2.5),
    ),
    "deepseek v3, not renormalised": (
        "deepseek_v3", "TopkRouter", GROUPS_V3 | {"norm_topk_prob": False},
        Routing(TOP, "sigmoid", groups=4, kept_groups=2, group_score="sum2", scale=2.5),
    ),
    "deepseek v4": (
        "deepseek_v4", "TopKRouter", {"routed_scaling_factor": 1.5},
        Routing(TOP, "sqrtsoftplus", renormalise=True, scale=1.5),
    ),
    "qwen3 moe": ("qwen3_moe", "TopKRouter", {"norm_topk_prob": False}, Routing(TOP)),
    "qwen3 moe, renormalised": ("qwen3_moe", "TopKRouter", {"norm_topk_prob": True}, Routing(TOP, renormalise=True)),
    "gpt-oss": ("gpt_oss", "TopKRouter", {}, Routing(TOP, "softmax_chosen")),
}  # fmt: skip


def theirs(kind: str, part: str, over: dict[str, Any], seed: int = 0) -> nn.Module:
    """A part of transformers' model of this kind with random weights, biases and corrections."""
    from transformers import AutoConfig

    names = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP, "intermediate_size": INNER, "moe_intermediate_size": INNER}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, **dict.fromkeys(names, EXPERTS), **over)
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    (name,) = [name for name in vars(module) if name.endswith(part) and name != part]
    made: nn.Module = getattr(module, name)(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=random))
    return made


def parts(weights: DictWeights) -> ModelParts:
    """Plain float32 parts on the CPU, without attention."""
    device = Device()
    ops = OperatorSet(operators.TorchOperators(None, OperatorParts(device, "float32")).ops, {})
    quantizer = PlainQuantizer(None, QuantizerParts(device, "float32", {}, weights, ops.find))

    def attention(layer: Any) -> Any:
        raise AssertionError("no attention here")

    limits = Limits(4, 64, 64)
    return ModelParts(device, "float32", limits, weights, quantizer.linear, quantizer.tied, attention, ops, quantizer.experts)


def dense(weights: Tensor, ids: Tensor) -> Tensor:
    """[T, experts]: what each expert counts, whatever the order of the choice."""
    return torch.zeros(len(ids), EXPERTS).scatter_add_(1, ids.long(), weights.float())


def inputs(count: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_routing_equals_transformers(way: str) -> None:
    kind, part, over, routing = WAYS[way]
    oracle, x = theirs(kind, part, over), inputs()
    _, right, chosen = oracle(x)
    state = dict(oracle.state_dict())
    correction = state.pop("e_score_correction_bias", None)
    weights = DictWeights()
    router = Router(
        "gate",
        HIDDEN,
        EXPERTS,
        routing,
        parts(weights),
        bias="bias" in state,
        correction="gate.shift" if correction is not None else "",
    )
    tensors = {f"gate.{name}": tensor for name, tensor in state.items()}
    weights.fill(tensors | ({} if correction is None else {"gate.shift": correction}), lambda name: False)
    router.finish()
    found, ids = router(x)
    assert found.dtype == torch.float32 and ids.dtype == torch.int32 and ids.shape == (40, TOP)
    assert float((dense(found, ids) - dense(right, chosen)).abs().max()) <= TOLERANCE


@torch.inference_mode()
def test_a_given_choice_is_only_weighted() -> None:
    """DeepSeek V4's hash layers: the token id chooses, the router weighs."""
    oracle, x = theirs("deepseek_v4", "HashRouter", {"vocab_size": 50, "routed_scaling_factor": 1.5}), inputs()
    table = torch.randint(0, EXPERTS, (50, TOP), generator=torch.Generator().manual_seed(3))
    oracle.tid2eid.copy_(table)
    tokens = torch.arange(40)
    _, right, chosen = oracle(x, tokens)
    routing = Routing(TOP, "sqrtsoftplus", renormalise=True, scale=1.5)
    logits = x @ oracle.weight.T
    found, ids = operators.route(logits, routing, None, table[tokens].int())
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@torch.inference_mode()
def test_the_block_of_deepseek_v3_with_its_shared_expert(tokens: int) -> None:
    oracle, x = theirs("deepseek_v3", "MoE", GROUPS_V3 | {"n_shared_experts": 1}), inputs(tokens)
    weights, state = DictWeights(), oracle.state_dict()
    tensors = split_experts(state, "mlp.experts") | {
        f"mlp.{name}": tensor for name, tensor in state.items() if not name.startswith("experts.")
    }
    made = parts(weights)
    routing = Routing(TOP, "sigmoid", groups=4, kept_groups=2, group_score="sum2", renormalise=True, scale=2.5)
    router = Router("mlp.gate", HIDDEN, EXPERTS, routing, made, correction="mlp.gate.e_score_correction_bias")

    class Shared:
        def __init__(self) -> None:
            self.up = made.linear("mlp.shared_experts", HIDDEN, {"gate_proj": INNER, "up_proj": INNER})
            self.down = made.linear("mlp.shared_experts", INNER, {"down_proj": HIDDEN})

        def finish(self) -> None:
            self.up.finish()
            self.down.finish()

        def __call__(self, x: Tensor) -> Tensor:
            return self.down(operators.silu_mul(self.up(x)))

    block = MoE(router, "mlp.experts", ExpertsSpec(EXPERTS, HIDDEN, INNER, TOP), made, Shared())
    weights.fill(tensors, lambda name: False)
    block.finish()
    torch.testing.assert_close(block(x), oracle(x[None])[0], atol=TOLERANCE, rtol=1e-4)


def split_experts(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """transformers keeps experts stacked in memory; checkpoints have a matrix each."""
    out = {}
    for e, (both, down) in enumerate(zip(state["experts.gate_up_proj"], state["experts.down_proj"], strict=True)):
        gate, up = both.chunk(2)
        out |= {f"{prefix}.{e}.{name}_proj.weight": t for name, t in (("gate", gate), ("up", up), ("down", down))}
    return out


@torch.inference_mode()
def test_the_stacked_experts_of_gpt_oss_with_their_biases_and_clamped_gate() -> None:
    oracle, x = theirs("gpt_oss", "Experts", {}), 4 * inputs()  # large, so that the clamp matters
    spec = ExpertsSpec(EXPERTS, HIDDEN, INNER, TOP, Gate(1.702, 7.0, 1.0), bias=True, stacked=True)
    weights = DictWeights()
    made = parts(weights).experts("mlp.experts", spec)
    weights.fill({f"mlp.experts.{name}": t for name, t in oracle.state_dict().items()}, lambda name: False)
    made.finish()
    ids = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(t))[:TOP] for t in range(len(x))])
    shares = torch.rand(len(x), TOP, generator=torch.Generator().manual_seed(9))
    right = oracle(x, ids, shares)
    inside = x @ oracle.gate_up_proj[0]
    assert float(inside.abs().max()) > 7, "nothing is clamped: the test would not see it"
    torch.testing.assert_close(made(x, shares, ids.int()), right, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_experts_equal_their_definition_in_float64() -> None:
    """Every token, every expert, one by one; a token may even take an expert twice, as a hash table could say."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(7, HIDDEN, generator=random)
    gate_up, down = (
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random),
        torch.randn(EXPERTS, HIDDEN, INNER, generator=random),
    )
    ids = torch.randint(0, EXPERTS, (7, TOP), generator=random).int()
    ids[0] = 3
    shares, base = torch.rand(7, TOP, generator=random), torch.randn(7, HIDDEN, generator=random)
    right = base.double()
    for t in range(7):
        for j in range(TOP):
            gate, up = (gate_up[ids[t, j]].double() @ x[t].double()).chunk(2)
            right[t] += shares[t, j].double() * (down[ids[t, j]].double() @ (gate * gate.sigmoid() * up))
    found = operators.experts(x, shares, ids, gate_up, down, Gate(), base=base)
    torch.testing.assert_close(found.double(), right, atol=1e-4, rtol=1e-5)


def test_experts_without_their_operator_are_refused_by_name() -> None:
    quantizer = PlainQuantizer(None, QuantizerParts(Device(), "float32", {}, DictWeights()))
    with pytest.raises(PluginError, match=r'model\.layers\.0\.mlp\.experts: .*"experts"'):
        quantizer.experts("model.layers.0.mlp.experts", ExpertsSpec(4, 8, 8, 2))


def test_experts_that_miss_a_tensor_say_which() -> None:
    weights = DictWeights()
    made = parts(weights).experts("e", ExpertsSpec(2, 4, 4, 1))
    for name, (shape, fill, _) in weights.declared.items():
        if name != "e.1.up_proj.weight":
            fill(torch.zeros(shape or ()))
    with pytest.raises(RuntimeError, match=r"e\.1\.up_proj\.weight"):
        made.finish()
