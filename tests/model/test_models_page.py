"""docs/models.md tells the truth: the table of costs is what the adapter says of public configs, and lists every architecture."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from octavo.interfaces import KVSpec, ModelAdapter
from octavo.model.adapters import DecoderAdapter
from octavo.model.families import DECODER_ARCHITECTURES

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CONTEXT = 32768


def shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 32000, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
DEEPSEEK = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
}  # fmt: skip
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("Llama 3.1 8B", shape(32, 4096, 14336, 32, 8, 128)),
    "MistralForCausalLM": ("Mistral 7B v0.1", shape(32, 4096, 14336, 32, 8, 128, sliding_window=4096)),
    "MixtralForCausalLM": ("Mixtral 8x7B", shape(32, 4096, 14336, 32, 8, 128, num_local_experts=8, num_experts_per_tok=2)),
    "Qwen2ForCausalLM": ("Qwen 2.5 7B", shape(28, 3584, 18944, 28, 4, 128)),
    "Qwen3ForCausalLM": ("Qwen3 8B", shape(36, 4096, 12288, 32, 8, 128)),
    "Qwen3MoeForCausalLM": ("Qwen3 30B A3B", shape(48, 2048, 6144, 32, 4, 128, **MOE)),
    "Phi3ForCausalLM": ("Phi-3 mini 4k", shape(32, 3072, 8192, 32, 32, 96, sliding_window=2047)),
    "GemmaForCausalLM": ("Gemma 7B", shape(28, 3072, 24576, 16, 16, 256)),
    "Gemma2ForCausalLM": ("Gemma 2 9B", shape(42, 3584, 14336, 16, 8, 256, sliding_window=4096)),
    "Gemma3ForCausalLM": ("Gemma 3 1B", shape(26, 1152, 6912, 4, 1, 256, sliding_window=512)),
    "GptOssForCausalLM": ("gpt-oss 20B", shape(24, 2880, 2880, 64, 8, 64, num_local_experts=32, num_experts_per_tok=4)),
}
V3 = shape(61, 7168, 18432, 128, 128, 192, **DEEPSEEK)
V2 = shape(60, 5120, 12288, 128, 128, 192, **DEEPSEEK) | {
    "n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536, "topk_group": 3,
    "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
}  # fmt: skip
OF_PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": ("DeepSeek V2", V2),
    "DeepseekV3ForCausalLM": ("DeepSeek V3", V3),
    "DeepseekV32ForCausalLM": ("DeepSeek V3.2", V3 | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}),
    "DeepseekV4ForCausalLM": ("DeepSeek V4 Flash", {"num_hidden_layers": 43}),
    "DeepseekForCausalLM": (
        "a 7B shape, window 4K",
        {k: v for k, v in shape(32, 4096, 11008, 32, 8, 128).items() if k[:3] != "max"},
    ),
}


def of_a_token(spec: KVSpec) -> float:
    """bfloat16; a latent cache's values are the front of its keys, and one of its entries may stand for several tokens."""
    return spec.heads * (spec.k_dim + (0 if spec.kind == "latent" else spec.v_dim)) * 2 / spec.tokens_per_entry


def adapter(architecture: str) -> ModelAdapter:
    if architecture in EXAMPLES:
        return DecoderAdapter(None, None)
    from octavo_models_deepseek.adapter import DeepseekAdapter
    from octavo_models_deepseek.v4_adapter import V4Adapter
    from octavo_models_deepseek.windowed import WindowedAdapter

    other = {"DeepseekV4ForCausalLM": V4Adapter, "DeepseekForCausalLM": WindowedAdapter}
    made: ModelAdapter = other.get(architecture, DeepseekAdapter)(None, None)
    return made


def row(architecture: str) -> str:
    name, config = (EXAMPLES | OF_PLUGINS)[architecture]
    facts = adapter(architecture).facts({**config, "architectures": [architecture]}, "bfloat16", "auto")
    kinds = Counter((spec.window or 0, spec.tokens_per_entry, spec.kind) for spec in facts.kv_specs)
    layers = " + ".join(
        f"{count} {'window' if window else kind} {window or ''}{f'1 of {every}' if every > 1 else ''}".strip()
        for (window, every, kind), count in sorted(kinds.items())
    )
    first = facts.layers[0]
    token = sum(map(of_a_token, facts.kv_specs))
    kept = sum(of_a_token(spec) * min(CONTEXT, spec.window or CONTEXT) for spec in facts.kv_specs)
    heads = f"{first.num_heads} ({facts.kv_specs[0].heads}), {first.k_dim}"
    size = f"{kept / 2**20:,.0f} MiB"
    return f"| `{architecture}` | {name} | {layers} | {heads} | {token:,.0f} | {size} |"


def table() -> list[str]:
    found = re.search(r"<!-- costs: checked by .*? -->\n(.*?)<!-- costs: end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].strip().splitlines()[2:]


def test_the_table_has_every_architecture_once() -> None:
    assert tuple(EXAMPLES) == DECODER_ARCHITECTURES
    assert len(table()) == len(EXAMPLES | OF_PLUGINS)


@pytest.mark.parametrize("architecture", EXAMPLES | OF_PLUGINS)
def test_a_row_is_what_the_adapter_says(architecture: str) -> None:
    assert row(architecture) in table(), f"docs/models.md should have: {row(architecture)}"


def test_the_example_of_groups_is_what_the_pool_does() -> None:
    from octavo.attention.torch_backend import TorchAttention
    from octavo.cache.pool import plan_groups
    from octavo.catalog import Device
    from octavo.interfaces import AttentionParts

    config = {**EXAMPLES["Gemma3ForCausalLM"][1], "architectures": ["Gemma3ForCausalLM"]}
    facts = DecoderAdapter(None, None).facts(config, "bfloat16", "auto")
    backend = TorchAttention(None, AttentionParts(Device(), "bfloat16"))
    groups = plan_groups(facts.kv_specs, backend.layout, 16)
    assert sorted(len(group.layers) for group in groups) == [2, 4, 4, 4, 4, 4, 4]
