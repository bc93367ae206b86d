"""The architectures that core's decoder reads: names only, so that choosing an adapter loads no torch."""

from __future__ import annotations

DECODER_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Values of config.json's `architectures` that `octavo.model.decoder` builds."""
