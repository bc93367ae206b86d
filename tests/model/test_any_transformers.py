"""Any causal language model of transformers over Octavo's pages: the conformance suite on architectures that core has no
layers for, and the refusal, by name, of those that cannot be served this way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.builtin import accepts_transformers
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.model.any_transformers import TransformersAdapter
from octavo.testing.model import BareModel, ModelSuite, ModelTarget, transformers_oracle

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2}


def config(kind: str, architecture: str, **over: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, **over}


MODELS = {
    "gpt2": config("gpt2", "GPT2LMHeadModel", **GPT2),
    "gpt-neox": config("gpt_neox", "GPTNeoXForCausalLM", **SIZES, rotary_pct=0.5),
    "olmo2": config("olmo2", "Olmo2ForCausalLM", **SIZES),
    "smollm3, layers without rope": config("smollm3", "SmolLM3ForCausalLM", **SIZES, no_rope_layers=[1, 0]),
    "cohere2, windows and scaled logits": config(
        "cohere2", "Cohere2ForCausalLM", **SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmoe, experts": config("olmoe", "OlmoeForCausalLM", **SIZES, num_experts=6, num_experts_per_tok=2),
    "gpt-oss, sinks": config(
        "gpt_oss", "GptOssForCausalLM", **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    ),
}


class TestTransformers(ModelSuite):
    target = ModelTarget(TransformersAdapter, MODELS)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (config("bloom", "BloomForCausalLM", hidden_size=48, n_layer=2, n_head=6), "ALiBi"),
        (config("mpt", "MptForCausalLM", d_model=48, n_layers=2, n_heads=6), "ALiBi"),
        (config("falcon", "FalconForCausalLM", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=True), "ALiBi"),
        (
            config("falcon", "FalconForCausalLM", hidden_size=48, num_hidden_layers=2, num_attention_heads=6),
            "attention interface",
        ),
        (config("mamba", "MambaForCausalLM", hidden_size=48, num_hidden_layers=2, vocab_size=96), "state|layers"),
        (config("bart", "BartForCausalLM", d_model=48, decoder_layers=2), "encoder-decoder"),
        (config("bert", "BertLMHeadModel", **SIZES), "causal"),
        (config("llama", "LlamaForCausalLM", **SIZES, rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (config("qwen3_next", "Qwen3NextForCausalLM", **SIZES), "linear_attention"),
        (config("diffllama", "DiffLlamaForCausalLM", **SIZES), "calls of attention"),
        (config("gpt2", "LlamaForCausalLM", **GPT2), "GPT2LMHeadModel"),
        (config("nobody", "NobodyForCausalLM"), "nobody"),
    ],
)
def test_what_cannot_be_served_this_way_is_refused_by_name(made: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        TransformersAdapter(None, None).facts(made, "float32", "auto")


def test_a_window_that_only_the_mask_knows_is_found() -> None:
    """Layers that do not say their window to attention: the cache must not keep, nor the kernel see, more."""
    found = TransformersAdapter(None, None).facts(MODELS["cohere2, windows and scaled logits"], "float32", "auto")
    assert [layer.window for layer in found.layers] == [7, None]
    assert [spec.kind for spec in found.kv_specs] == ["window", "full"]


def test_names_without_the_base_models_prefix_are_known() -> None:
    """GPT-2's published file says h.0, a saved one transformer.h.0."""
    made = MODELS["gpt2"]
    right = transformers_oracle(made)
    short = {name.removeprefix("transformer."): tensor for name, tensor in right.tensors.items()}
    assert any(name.startswith("h.0.") for name in short)
    prompt = list(range(20))
    found = BareModel(TransformersAdapter(None, None), made, short | {"h.0.attn.bias": torch.zeros(1)}).feed(0, prompt, [12, 8])
    assert float((found - right.logits(prompt)).abs().max()) <= 1e-4


def test_the_speed_cost_is_stated_and_quantised_weights_are_refused() -> None:
    def ask(**config: Any) -> Accept | Reject:
        return accepts_transformers(
            Needs("model", Device(), "float32", {"architecture": "GPT2LMHeadModel", "config": config}), None
        )

    answer = ask()
    assert isinstance(answer, Accept) and re.search("nothing is fused.*CUDA graphs", answer.reason)
    assert isinstance(ask(quantization_config={"quant_method": "fp8"}), Reject)


def test_it_is_taken_where_nothing_better_is(tmp_path: Path) -> None:
    """Lower priority than the decoder, which has layers of its own for Llama; `transformers` may still be named."""
    from octavo.config import EngineConfig
    from octavo.engine.plan import plan_engine
    from octavo.plugins import discover

    from tests.tiny import tiny_llama

    tiny_llama(tmp_path / "llama")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(MODELS["gpt2"]))

    def chosen(folder: str, **options: Any) -> str:
        config = EngineConfig(model=str(tmp_path / folder), load_format="dummy", max_model_len=64, **options)
        return plan_engine(config, discover({})).model.name

    assert chosen("llama") == "decoder"
    assert chosen("llama", model_adapter="transformers") == "transformers"
    assert chosen("gpt2") == "transformers"
