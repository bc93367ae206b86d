"""DeepSeek V4 computes what transformers computes: windows, compressed entries, hyper-connections, hashed experts.

Oracle: transformers' eager model of tiny random configs, float32, to 1e-4, from the checkpoint that it writes and from the
same tensors under DeepSeek's own names. The cache is NaN wherever nothing was written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.model.rotary import inverse_frequencies
from octavo.testing.model import BareModel, right_logits, transformers_model
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))

from octavo_models_deepseek.turn import PairRotary, pair_turn
from octavo_models_deepseek.v4_adapter import V4Adapter, accepts
from octavo_models_deepseek.v4_config import read_v4

TOKENS = [(7 * i + i // 3) % 64 for i in range(53)]
# Many index heads, for with few of them scores that relu makes exactly zero tie, and a tie may be broken either way.
V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 64, "hidden_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "q_lora_rank": 24, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 512, "sliding_window": 7, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 64, "index_head_dim": 16,
    "index_topk": 3, "partial_rotary_factor": 0.25, "swiglu_limit": 1.0, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
    "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "all kinds": V4,
    "a window alone": V4 | {"layer_types": ["sliding_attention"] * 4, "mlp_layer_types": ["moe"] * 4},
    "every entry": V4 | {"layer_types": ["heavily_compressed_attention"] * 4},
    "chosen entries, plain rope": V4 | {"layer_types": ["compressed_sparse_attention"] * 4, "rope_parameters": None},
}


def model_and_tensors(config: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Tensor]]:
    right = transformers_model(config)
    random = torch.Generator().manual_seed(1)
    for name, buffer in right.named_buffers():
        if name.endswith("tid2eid"):  # distinct experts for every token id
            buffer.copy_(torch.stack([torch.randperm(8, generator=random)[:3] for _ in range(64)]))
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=random))
    right.save_pretrained(folder)
    return right, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", params=CONFIGS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """A config, its checkpoint under canonical names, and transformers' logits of TOKENS."""
    config = CONFIGS[request.param]
    right, tensors = model_and_tensors(config, tmp_path_factory.mktemp("checkpoint"))
    return config, canonical(tensors), right_logits(right, TOKENS)


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    adapter = V4Adapter(None, None)
    return {adapter.canonical(name): tensor for name, tensor in tensors.items()}


def bare(config: dict[str, Any], tensors: dict[str, Tensor], **kw: Any) -> BareModel:
    return BareModel(V4Adapter(None, None), config, tensors, **kw)


def close(found: Tensor, right: Tensor) -> None:
    assert torch.isfinite(found).all()
    error = float((found - right).abs().max())
    assert error <= 1e-4 * max(1.0, float(right.abs().max())), f"off by {error:.1e}; logits reach {float(right.abs().max()):.1f}"


def test_logits_of_a_prompt_at_once_in_chunks_and_token_by_token(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    """Chunks end inside windows, on their last token and one past it: an entry does not depend on the steps of its tokens."""
    config, tensors, right = case
    model = bare(config, tensors)
    close(model.feed(0, TOKENS, [len(TOKENS)]), right)
    close(model.feed(1, TOKENS, [3, 1, 4, 9, 15, 1, 20]), right)
    close(model.feed(2, TOKENS, [8, 8, 5] + [1] * 32), right)


def test_rows_of_a_step_do_not_meet(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    config, tensors, right = case
    model = bare(config, tensors)
    model.run([(0, TOKENS[:47]), (1, TOKENS[:6])])
    first, second, third = model.run([(1, TOKENS[6:35]), (0, TOKENS[47:48]), (3, TOKENS[:2])])
    close(first, right[6:35])
    close(second, right[47:48])
    close(third, right[:2])


def test_weights_are_counted_as_the_checkpoint_has_them(case: tuple[dict[str, Any], dict[str, Tensor], Tensor]) -> None:
    """What a model of dummy weights is sized by."""
    config, tensors, _ = case
    facts = V4Adapter(None, None).facts(config, "float32", "auto")
    matrices = {name: tensor.numel() for name, tensor in tensors.items() if tensor.ndim == 2 and not name.endswith(".ape")}
    assert facts.attention_weights == sum(n for name, n in matrices.items() if ".attn." in name)
    assert facts.mlp_weights == sum(n for name, n in matrices.items() if ".ffn." in name and ".gate." not in name)


def test_both_kinds_of_names_are_read_and_nothing_is_left_over() -> None:
    adapter = V4Adapter(None, None)
    pairs = {
        "model.embed_tokens.weight": "embed.weight",
        "lm_head.weight": "head.weight",
        "model.norm.weight": "norm.weight",
        "model.hc_head.hc_fn": "hc_head_fn",
        "model.layers.3.attn.norm.weight": "layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.compressor.norm.weight": "layers.3.attn.compressor.norm.weight",
        "model.layers.3.ffn.experts.7.w2.weight": "layers.3.ffn.experts.7.w2.weight",
    }
    for theirs, own in pairs.items():
        assert adapter.canonical(theirs) == own and adapter.canonical(own) == own
    assert adapter.ignored("mtp.0.attn.wkv.weight") and not adapter.ignored("layers.0.attn.wkv.weight")


def test_deepseeks_own_config_keys_mean_what_transformers_makes_of_them() -> None:
    from transformers import AutoConfig

    own = {
        key: value
        for key, value in V4.items()
        if key not in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")
    }
    own |= {
        "compress_ratios": [0, 4, 128, 4, 4], "num_hash_layers": 1, "qk_rope_head_dim": 8, "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
    }  # fmt: skip
    read, theirs = read_v4(own), AutoConfig.for_model(**own)
    names = {"window": "sliding_attention", "sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
    assert [names[layer.kind] for layer in read.layers] == theirs.layer_types
    assert [layer.rate for layer in read.layers] == [1, 4, 128, 4]
    assert ["hash_moe" if layer.hashed else "moe" for layer in read.layers] == theirs.mlp_layer_types
    assert read.rotated == theirs.qk_rope_head_dim == 8
    main, other = read.ropes
    assert (main.type, main.theta) == ("default", 10000.0)
    assert (other.type, other.theta, other.factor, other.attention_factor) == ("yarn", 160000.0, 16.0, 1.0)


def test_a_table_of_experts_that_names_one_too_many_is_refused(tmp_path: Path) -> None:
    _, tensors = model_and_tensors(V4, tmp_path)
    wrong = canonical(tensors)
    name = next(name for name in wrong if name.endswith("tid2eid"))
    wrong[name] = wrong[name] + 1
    with pytest.raises(LoadError, match=r"tid2eid names experts 1 to 8, of which there are 8"):
        bare(V4, wrong)


@pytest.mark.parametrize("position", [1 << 17, (1 << 20) - 64])
def test_angles_at_positions_far_out_are_exact_and_turn_back(position: int) -> None:
    """Turns are counted in float64: against numpy, to float32's last places; and no two neighbours have the same."""
    found = read_v4(V4 | {"max_position_embeddings": 1 << 20})
    parts: Any = SimpleNamespace(device=Device())
    positions = position + torch.arange(64)
    x = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0))
    for rope in found.ropes:
        cos, sin = PairRotary(rope, parts).angles(positions)
        turns = np.outer(positions.double().numpy(), inverse_frequencies(rope).double().numpy())
        assert float((cos.double() - torch.from_numpy(np.cos(turns))).abs().max()) < 1e-7
        step = torch.hypot(cos[1:] - cos[:-1], sin[1:] - sin[:-1])
        assert float(step.amax(1).min()) > 0.5, "the fastest pair turns by nearly a radian a token"
        turned = pair_turn(x, cos, sin, torch.float32)
        assert float((pair_turn(turned, cos, sin, torch.float32, back=True) - x).abs().max()) < 1e-6


def test_what_a_token_costs_is_paged_by_use() -> None:
    facts = V4Adapter(None, None).facts(V4, "bfloat16", "float8_e4m3fn")
    found = [(s.kind, s.k_dim, s.window, s.tokens_per_entry, s.dtype) for s in facts.kv_specs]
    window = ("latent", 32, 7, 1, "float8_e4m3fn")
    sparse = [
        window,
        ("latent", 128, 8, 1, "bfloat16"),
        ("latent", 32, None, 4, "float8_e4m3fn"),
        ("latent", 64, 8, 1, "bfloat16"),
        ("latent", 16, None, 4, "float8_e4m3fn"),
    ]
    heavy = [window, ("latent", 64, 8, 1, "bfloat16"), ("latent", 32, None, 8, "float8_e4m3fn")]
    assert found == [window, *sparse, *heavy, *sparse]
    assert [layer.index for layer in facts.layers] == list(range(len(found)))


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"o_groups": 3}, "o_groups 3"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types"),
        ({"partial_rotary_factor": 0.04}, "partial_rotary_factor"),
        ({"index_head_dim": 4}, "index_head_dim 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "depends on the sequence's length"),
        ({"head_dim": 0}, "head_dim"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_key(over: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_v4(V4 | over)


def test_the_provider_says_what_the_layers_are() -> None:
    def answer(config: dict[str, Any]) -> Accept | Reject:
        return accepts(Needs("model", Device(), "float32", {"architecture": config["architectures"][0], "config": config}), None)

    assert answer(V4).reason == "4 layers with a window of 7, 1 of them over every compressed entry and 2 over the 3 best"
    assert isinstance(answer(V4 | {"o_groups": 3}), Reject)
    assert isinstance(answer(V4 | {"architectures": ["DeepseekV3ForCausalLM"]}), Reject)
