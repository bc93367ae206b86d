"""The decoder gives transformers' logits for every family, in any portions, and refuses what it does not know.

S21 (head shapes of configs), and the per-family rules of windows, biases and tied heads.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from octavo.errors import LoadError
from octavo.interfaces import ModelFacts
from octavo.model.adapters import DecoderAdapter
from octavo.testing.model import BareModel, checkpoint, right_logits, transformers_model

TOLERANCE = 1e-4


def config(family: str, **over: Any) -> dict[str, Any]:
    """A tiny config.json of a family; a value of `...` removes the key."""
    made: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
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


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_in_any_portions(name: str) -> None:
    made = VARIANTS[name]
    oracle = transformers_model(made)
    prompt = tokens(40)
    right = right_logits(oracle, prompt)
    bare = BareModel(DecoderAdapter(None, None), made, checkpoint(oracle, made))
    for row, portions in enumerate(([40], [1] * 40, [17, 1, 22], [5, 16, 16, 3])):
        found = bare.feed(row, prompt, portions)
        error = float((found - right).abs().max())
        assert error <= TOLERANCE, f"{name}: off by {error:.1e} in portions {portions[:5]}"


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, late windows", "qwen3"])
def test_rows_that_share_a_step_do_not_disturb_each_other(name: str) -> None:
    """A prompt, a chunk and two decodes in one step, each as if it were alone."""
    made = VARIANTS[name]
    oracle = transformers_model(made)
    bare = BareModel(DecoderAdapter(None, None), made, checkpoint(oracle, made))
    prompts = [tokens(n, seed=n) for n in (30, 21, 1, 50)]
    done = [12, 20, 0, 0]
    bare.run([(row, prompt[:n]) for row, (prompt, n) in enumerate(zip(prompts, done, strict=True)) if n])
    found = bare.run([(row, prompts[row][done[row] :]) for row in (2, 0, 3, 1)])
    for row, logits in zip((2, 0, 3, 1), found, strict=True):
        right = right_logits(oracle, prompts[row])[done[row] :]
        assert float((logits - right).abs().max()) <= TOLERANCE


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
    """S21: an explicit head_dim wins; null and absent mean hidden / heads; kv heads default to heads."""
    layer = facts(config("llama", **over)).layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.k_dim) == expected
    assert layer.scale == pytest.approx(layer.k_dim**-0.5)


def test_a_qwen3_that_does_not_say_has_heads_of_128() -> None:
    assert facts(config("qwen3")).layers[0].k_dim == 128


@pytest.mark.parametrize(
    ("made", "windows"),
    [
        (config("llama", sliding_window=5), [None, None, None]),
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
