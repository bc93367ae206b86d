"""DeepSeek V2, V3 and V3.2 compute what transformers computes, from the checkpoints that transformers writes.

Oracle: transformers' eager models of tiny random configs, float32, to 1e-4. The cache is NaN wherever nothing was written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.testing.model import BareModel, right_logits, transformers_model
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))

from octavo_models_deepseek.adapter import DeepseekAdapter
from octavo_models_deepseek.config import read_deepseek
from octavo_models_deepseek.provider import accepts

TOKENS = [7, 3, 11, 60, 2, 45, 23, 9, 31, 17, 5, 5, 8, 50, 1, 62, 40, 33, 21, 19, 4, 38, 59, 0, 13, 44, 28, 16, 36, 51]
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 32,
}  # fmt: skip

V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "topk_method": "greedy", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
del V3["topk_method"]

# Many index heads, for with few of them scores that relu makes exactly zero tie, and a tie may be broken either way.
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 16, "index_topk": 6,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "v2 lite": V2 | {"q_lora_rank": None},
    "v2, groups and yarn": V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
                                 "routed_scaling_factor": 16.0},
    "v2, biases and a tied head": V2 | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "v2 lite, biases": V2 | {"q_lora_rank": None, "attention_bias": True},
    "v3": V3,
    "v3, yarn": V3 | {"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
    "v3, half-split rope, plain weights": V3 | {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "v3, all dense": V3 | {"first_k_dense_replace": 3},
    "v3.2": V32,
    "v3.2, yarn": V32 | {"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
}  # fmt: skip


def model_and_tensors(config: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model, and the checkpoint that it writes: names are what a user's folder has."""
    right = transformers_model(config)
    random = torch.Generator().manual_seed(1)
    for name, buffer in right.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=random))
    right.save_pretrained(folder)
    return right, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", params=CONFIGS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """A config, its checkpoint, and transformers' logits of TOKENS."""
    config = CONFIGS[request.param]
    right, tensors = model_and_tensors(config, tmp_path_factory.mktemp("checkpoint"))
    return config, tensors, right_logits(right, TOKENS)


def bare(config: dict[str, Any], tensors: dict[str, Tensor], **kw: Any) -> BareModel:
    return BareModel(DeepseekAdapter(None, None), config, tensors, **kw)


def close(found: Tensor, right: Tensor) -> None:
    assert torch.isfinite(found).all()
    error = float((found - right).abs().max())
    assert error <= 1e-4 * max(1.0, float(right.abs().max())), f"off by {error:.1e}; logits reach {float(right.abs().max()):.1f}"


def test_logits_of_a_prompt_at_once_in_chunks_and_token_by_token(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    config, tensors, right = case
    model = bare(config, tensors)
    close(model.feed(0, TOKENS, [len(TOKENS)]), right)
    close(model.feed(1, TOKENS, [5, 9, 1, 15]), right)
    close(model.feed(2, TOKENS, [3] + [1] * (len(TOKENS) - 3)), right)


def test_a_long_prompt_is_expanded_and_short_ones_beside_it_are_not(
    case: tuple[dict[str, Any], dict[str, Tensor], Tensor],
) -> None:
    """Either way of attending, in one step, at the beginning of a row and behind a cached prefix."""
    config, tensors, right = case
    expands = read_deepseek(config).expands
    model = bare(config, tensors)
    assert expands == 0 if "index_topk" in config else 1 < expands <= len(TOKENS) - 3
    model.run([(0, TOKENS[:3]), (1, TOKENS[:18]), (2, TOKENS[:20])])
    first, second, third, fourth = model.run([(1, TOKENS[18:21]), (0, TOKENS[3:]), (2, TOKENS[20:21]), (3, TOKENS)])
    close(first, right[18:21])
    close(second, right[3:])
    close(third, right[20:21])
    close(fourth, right)


def test_rows_of_a_step_do_not_meet(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    """A row that decodes, one in the middle of its prompt and one at its start, in one step."""
    config, tensors, right = case
    model = bare(config, tensors, block_size=4)
    model.run([(0, TOKENS[:20]), (1, TOKENS[:6])])
    first, second, third = model.run([(1, TOKENS[6:15]), (0, TOKENS[20:21]), (3, TOKENS[:4])])
    close(first, right[6:15])
    close(second, right[20:21])
    close(third, right[:4])


def test_an_index_that_chooses_every_key_is_full_attention(tmp_path: Path) -> None:
    """And one that chooses fewer is not: the comparison above would hold of a model that ignores its index."""
    _, tensors = model_and_tensors(V32, tmp_path)
    every, few = (bare(V32 | {"index_topk": top}, tensors).feed(0, TOKENS, [len(TOKENS)]) for top in (len(TOKENS) + 1, 6))
    full = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    close(every, bare(V3, full).feed(0, TOKENS, [len(TOKENS)]))
    assert float((few[7:] - every[7:]).abs().max()) > 0.1


def test_layers_past_the_last_are_skipped_by_name(tmp_path: Path) -> None:
    """The checkpoint of V3 holds a layer that predicts further ahead; nothing else may be left over."""
    _, tensors = model_and_tensors(V3, tmp_path)
    tensors |= {
        "model.layers.3.eh_proj.weight": torch.zeros(2, 2),
        "model.layers.3.mlp.experts.0.gate_proj.weight": torch.zeros(2),
    }
    bare(V3, tensors)
    with pytest.raises(AssertionError, match=r"model\.layers\.2\.eh_proj"):
        bare(V3, tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)})


def test_a_token_takes_one_latent_entry_in_each_layer() -> None:
    facts = DeepseekAdapter(None, None).facts(V3, "bfloat16", "auto")
    assert {(s.kind, s.heads, s.k_dim, s.v_dim, s.dtype) for s in facts.kv_specs} == {("latent", 1, 40, 32, "bfloat16")}
    assert len(facts.kv_specs) == 3
    sparse = DeepseekAdapter(None, None).facts(V32, "bfloat16", "auto")
    assert [(s.kind, s.k_dim, s.v_dim) for s in sparse.kv_specs] == [("latent", 40, 32)] * 3 + [("latent", 16, 16)] * 3


def test_weights_are_counted_as_the_checkpoint_has_them(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    """What a model of dummy weights is sized by."""
    config, tensors, _ = case
    facts = DeepseekAdapter(None, None).facts(config, "float32", "auto")
    matrices = {name: tensor.numel() for name, tensor in tensors.items() if tensor.ndim == 2}
    assert facts.attention_weights == sum(n for name, n in matrices.items() if ".self_attn." in name)
    assert facts.mlp_weights == sum(n for name, n in matrices.items() if ".mlp." in name and ".gate.weight" not in name)


# transformers 5.24: factor 40 with mscale_all_dim 1 and 0.707 (formats page)
@pytest.mark.parametrize(("every", "times"), [(1.0, 1.87385), (0.707, 1.58963), (0.0, 1.0)])
def test_yarn_stretches_the_softmax_scale_too(every: float, times: float) -> None:
    made = read_deepseek(V3 | {"rope_parameters": YARN | {"factor": 40.0, "mscale_all_dim": every}})
    assert made.scale == pytest.approx(24**-0.5 * times, rel=1e-5)
    assert read_deepseek(V3).scale == pytest.approx(24**-0.5)


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": "1536"}, "q_lora_rank"),
        ({"n_group": 3}, "n_group 3"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"n_group": 8, "topk_group": 8}, "needs two"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_key(over: dict[str, Any], named: str) -> None:
    config = {key: value for key, value in (V3 | over).items() if value is not ...}
    with pytest.raises(LoadError, match=named):
        read_deepseek(config)


def test_a_v2_without_a_way_to_choose_experts_is_refused() -> None:
    with pytest.raises(LoadError, match="topk_method 'noaux_tc'"):
        read_deepseek(V2 | {"topk_method": "noaux_tc"})


def answer(config: dict[str, Any]) -> Accept | Reject:
    return accepts(Needs("model", Device(), "float32", {"architecture": config["architectures"][0], "config": config}), None)


def test_the_provider_says_what_it_builds_and_refuses_the_rest_with_a_reason() -> None:
    assert "latent cache of 40 values" in answer(V3).reason
    assert isinstance(answer(V2), Accept)
    for config, words in (
        (V3 | {"architectures": ["LlamaForCausalLM"]}, "is not one of"),
        (V3 | {"architectures": ["DeepseekV4ForCausalLM"]}, "is not one of"),
        (V3 | {"n_group": 3}, "n_group 3"),
    ):
        refused = answer(config)
        assert isinstance(refused, Reject) and words in refused.reason


def test_reading_a_config_loads_no_torch() -> None:
    import subprocess

    path = [str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src")]
    script = (
        f"import sys; sys.path[:0] = {path!r}; from octavo_models_deepseek import register_model_adapters as r;"
        f"from octavo_models_deepseek.adapter import DeepseekAdapter as A; r(); A(None, None).facts({V3!r}, 'float32', 'auto');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
