"""The decoder gives transformers' logits for every family, in any portions, and refuses what it does not know.

Head shapes of configs, and the per-family rules of windows, biases and tied heads.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from octavo.errors import LoadError
from octavo.interfaces import ModelFacts
from octavo.model.adapters import DecoderAdapter
from octavo.testing.model import BareModel, ModelSuite, ModelTarget, checkpoint, right_logits, transformers_model

TOLERANCE = 1e-4


ARCHITECTURES = {"gemma3_text": "Gemma3", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}


def config(family: str, **over: Any) -> dict[str, Any]:
    """A tiny config.json of a family; a value of `...` removes the key."""
    made: dict[str, Any] = {
        "architectures": [f"{ARCHITECTURES.get(family, family.capitalize())}ForCausalLM"],
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **over,
    }
    return {key: value for key, value in made.items() if value is not ...}


def tokens(count: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, (count,), generator=random).tolist()  # type: ignore[no-any-return]


def facts(config: dict[str, Any]) -> ModelFacts:
    return DecoderAdapter(None, None).facts(config, "float32", "auto")


VARIANTS = {
    "llama": config("llama"),
    "llama, tied": config("llama", tie_word_embeddings=True),
    "llama, biases": config("llama", attention_bias=True, mlp_bias=True),
    "llama, wide heads": config("llama", head_dim=16),
    "llama, head_dim null": config("llama", head_dim=None),
    "llama, no kv heads given": config("llama", num_key_value_heads=...),
    "llama, one kv head": config("llama", num_key_value_heads=1),
    "mistral, no window": config("mistral", sliding_window=None),
    "mistral, window": config("mistral", sliding_window=7),
    "mistral, head_dim": config("mistral", sliding_window=5, head_dim=12),
    "qwen2": config("qwen2"),
    "qwen2, window off": config("qwen2", use_sliding_window=False, sliding_window=5, max_window_layers=1),
    "qwen2, late windows": config("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen2, layer types": config(
        "qwen2",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2, tied": config("qwen2", tie_word_embeddings=True),
    "qwen3": config("qwen3", head_dim=16),
    "qwen3, biases": config("qwen3", head_dim=10, attention_bias=True),
    "qwen3, late windows": config("qwen3", head_dim=8, use_sliding_window=True, sliding_window=9, max_window_layers=2),
}

GEMMA = {"hidden_act": ..., "tie_word_embeddings": ..., "rope_theta": ..., "head_dim": 16}
GEMMA3 = GEMMA | {"query_pre_attn_scalar": 20, "sliding_window": 7}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "rope_theta": ...,
    "rms_norm_eps": ...,
}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}

VARIANTS |= {
    "gemma": config("gemma", **GEMMA),
    "gemma2": config("gemma2", **GEMMA3),
    "gemma2, no softcaps": config("gemma2", **GEMMA3, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": config("gemma3_text", **GEMMA3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "gemma3, as transformers 4 wrote it": config(
        "gemma3_text",
        **GEMMA3 | {"rope_theta": 500000.0},
        rope_local_base_freq=5000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    ),
    "gemma3, capped logits": config("gemma3_text", **GEMMA3, final_logit_softcapping=9.0, attention_bias=True),
    "phi3": config("phi3", pad_token_id=0),
    "phi3, window": config("phi3", pad_token_id=0, sliding_window=9),
    "phi3, long factors": config("phi3", pad_token_id=0, rope_scaling=LONG_ROPE, original_max_position_embeddings=32),
    "phi3, short factors": config("phi3", pad_token_id=0, rope_scaling=LONG_ROPE, original_max_position_embeddings=64),
    "phi3, a part of each head turns": config("phi3", pad_token_id=0, partial_rotary_factor=0.5, head_dim=8),
    "qwen3 moe": config("qwen3_moe", **MOE),
    "qwen3 moe, some layers dense": config("qwen3_moe", **MOE, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3 moe, every second layer, window": config(
        "qwen3_moe", **MOE, decoder_sparse_step=2, use_sliding_window=True, sliding_window=6
    ),
    "mixtral": config("mixtral", num_local_experts=6, num_experts_per_tok=2, rope_theta=...),
    "gpt-oss": config("gpt_oss", **OSS, max_position_embeddings=131072),
    "gpt-oss, its own yarn": config(
        "gpt_oss",
        **OSS,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        swiglu_limit=0.5,
    ),
}


class TestFamilies(ModelSuite):
    target = ModelTarget(DecoderAdapter, VARIANTS)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_language_model_of_a_multimodal_checkpoint(kind: str) -> None:
    """Its text_config, its tensors under their longer names, the towers left unread; logits of text are transformers'."""
    import transformers

    text = config("gemma3_text", **GEMMA3) if kind == "gemma3" else config("mistral", head_dim=8, sliding_window=7)
    del text["architectures"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    vision |= {"patch_size": 14, "model_type": "siglip_vision_model" if kind == "gemma3" else "pixtral"}
    name = f"{kind.capitalize()}ForConditionalGeneration"
    extra = {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
    made = {"architectures": [name], "model_type": kind, "text_config": text, "vision_config": vision, **extra}
    parsed = transformers.AutoConfig.for_model(**deepcopy(made))
    oracle = getattr(transformers, name)._from_config(parsed, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    tensors = checkpoint(oracle, {})
    assert any(key.startswith("vision_tower.") for key in tensors) and "language_model.model.norm.weight" in tensors
    if oracle.config.get_text_config().tie_word_embeddings:
        del tensors["language_model.lm_head.weight"]
    prompt = tokens(40)
    adapter = DecoderAdapter(None, None)
    found = BareModel(adapter, made, tensors).feed(0, prompt, [30, 1, 9])
    assert float((found - right_logits(oracle, prompt)).abs().max()) <= TOLERANCE
    assert not adapter.ignored("model.layers.0.vision.weight")
    assert not DecoderAdapter(None, None).ignored("vision_tower.weight"), "a model of text has no towers to ignore"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_full_one(dtype: str) -> None:
    made = config("qwen3", head_dim=16)
    oracle = transformers_model(made, spread=0.15)
    prompt = tokens(30)
    right = right_logits(oracle, prompt)
    found = BareModel(DecoderAdapter(None, None), made, checkpoint(oracle, made), dtype=dtype).feed(0, prompt, [20, 1, 9])
    assert found.dtype == torch.float32
    assert float((found - right).abs().max()) <= 0.05 * float(right.abs().max())


def test_a_head_beside_a_tied_embedding_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = config("llama", tie_word_embeddings=True)
    oracle = transformers_model(made)
    tensors = checkpoint(oracle, made) | {"lm_head.weight": torch.randn(96, 48)}
    with caplog.at_level(logging.WARNING):
        bare = BareModel(DecoderAdapter(None, None), made, tensors)
    assert "lm_head.weight" in caplog.text
    prompt = tokens(9)
    right = right_logits(oracle, prompt)
    assert float((bare.feed(0, prompt, [9]) - right).abs().max()) <= TOLERANCE


# ---------------------------------------------------------------- what a config means


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, (16, 8, 128)),
        ({"hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 128}, (24, 24, 128)),
        ({"hidden_size": 1792, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": None}, (28, 4, 64)),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": ...}, (4, 4, 16)),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": None}, (4, 4, 16)),
    ],
)
def test_head_shapes(over: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """An explicit head_dim wins; null and absent mean hidden / heads; kv heads default to heads."""
    layer = facts(config("llama", **over)).layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.k_dim) == expected
    assert layer.scale == pytest.approx(layer.k_dim**-0.5)


def test_a_qwen3_that_does_not_say_has_heads_of_128() -> None:
    assert facts(config("qwen3")).layers[0].k_dim == 128


@pytest.mark.parametrize(
    ("made", "windows"),
    [
        (config("llama", sliding_window=5), [None, None, None]),
        (config("phi3"), [None, None, None]),
        (config("phi3", sliding_window=64), [64, 64, 64]),
        (config("mixtral", **MOE | {"num_local_experts": 4}), [None, None, None]),
        (config("qwen3_moe", **MOE, sliding_window=64), [None, None, None]),
        (config("qwen3_moe", **MOE, sliding_window=64, use_sliding_window=True), [64, 64, 64]),
        (config("gemma2", **GEMMA3), [7, None, 7]),
        (config("gemma3_text", **GEMMA3, num_hidden_layers=7), [7, 7, 7, 7, 7, None, 7]),
        (config("gemma3_text", **GEMMA3 | {"sliding_window": ...}), [4096, 4096, 4096]),
        (config("gpt_oss", **OSS | {"sliding_window": ...}), [128, None, 128]),
        (config("mistral"), [4096, 4096, 4096]),
        (config("mistral", sliding_window=None), [None, None, None]),
        (config("mistral", sliding_window=64), [64, 64, 64]),
        (config("qwen2", sliding_window=64), [None, None, None]),
        (config("qwen2", sliding_window=64, use_sliding_window=True), [None, None, None]),
        (config("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1), [None, 64, 64]),
        (config("qwen2", sliding_window=None, use_sliding_window=True, max_window_layers=0), [None, None, None]),
        (config("qwen3", use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "attention", "full_attention"]),
         [8, None, None]),
    ],
)  # fmt: skip
def test_windows_by_family(made: dict[str, Any], windows: list[int | None]) -> None:
    found = facts(made)
    assert [layer.window for layer in found.layers] == windows
    assert [spec.window for spec in found.kv_specs] == windows
    assert [spec.kind for spec in found.kv_specs] == ["window" if w else "full" for w in windows]


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": ["BertModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_key(over: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        facts(config("llama", **over))


@pytest.mark.parametrize(
    ("family", "over", "named"),
    [
        ("qwen3_moe", {**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("qwen3_moe", {**MOE, "num_experts": ...}, "num_experts is missing"),
        ("qwen3_moe", {**MOE, "mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("gemma3_text", {**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {**GEMMA3, "hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("gemma3_text", {**GEMMA3, "query_pre_attn_scalar": "20"}, "query_pre_attn_scalar"),
        ("gemma2", {**GEMMA3, "final_logit_softcapping": -1}, "final_logit_softcapping"),
        ("gpt_oss", {**OSS, "swiglu_limit": "seven"}, "swiglu_limit"),
    ],
)
def test_what_a_family_alone_has_is_checked_too(family: str, over: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        facts(config(family, **over))


def test_the_experts_weights_are_counted_for_the_plan() -> None:
    """A model of dummy weights has no file to measure: all experts are there, whatever a token takes."""
    found = facts(config("qwen3_moe", **MOE, mlp_only_layers=[1]))
    assert found.mlp_weights == 3 * 48 * (2 * 8 * 24 + 80)
    assert found.mlp_values == max(3 * 80, 3 * (24 + 48))
    assert facts(config("llama")).mlp_weights == 3 * 3 * 48 * 80


def test_sinks_are_known_before_there_is_a_model() -> None:
    """An attention backend that has none must be able to refuse."""
    from octavo.engine.plan import attention_facts

    found = facts(config("gpt_oss", **OSS))
    assert all(layer.has_sinks and layer.sinks is None for layer in found.layers)
    assert attention_facts(found, "float32", None)["sinks"] is True
    assert attention_facts(facts(config("llama")), "float32", None)["sinks"] is False


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, r"layer_types\[1\]"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_a_wrong_window_is_refused_by_the_name_of_its_key(over: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        facts(config("qwen2", **over))


def test_reading_a_config_loads_no_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys; from octavo.model.adapters import DecoderAdapter as A;"
        f"A(None, None).facts({config('qwen3')!r}, 'float32', 'auto'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
def test_saved_rope_frequencies_are_known_and_unused(name: str) -> None:
    adapter = DecoderAdapter(None, None)
    assert adapter.ignored(name)
    assert not adapter.ignored("model.layers.0.self_attn.q_proj.weight")
    assert not adapter.ignored("model.layers.0.self_attn.q_proj.bias")
