"""Core's own parts, registered through the same door as everyone's.

Names and `accepts` only: nothing here may import torch, a kernel or a model. Priorities are 0 to 10,
so that a plugin for the hardware at hand comes before what runs anywhere; that of the model adapter `transformers` is below
everything, an author's default of 0 included.
"""

from __future__ import annotations

from typing import Any

from octavo.catalog import Accept, Needs, Provider, Reject
from octavo.first_party import readers
from octavo.hookspecs import hookimpl
from octavo.model.any_transformers import COST
from octavo.model.any_transformers import PATTERN as CAUSAL
from octavo.model.families import DECODER_ARCHITECTURES
from octavo.model.text_part import WRAPPED
from octavo.text.tool_templates import accepts_template


@hookimpl
def register_allocators() -> list[Provider]:
    return [
        Provider(
            "block",
            "allocator",
            "octavo.cache.allocator:BlockAllocator",
            priority=1,
            summary="Blocks with prefix cache, copy on write",
        )
    ]


@hookimpl
def register_schedulers() -> list[Provider]:
    from octavo.scheduling.scheduler import SchedulerOptions

    return [
        Provider(
            "continuous",
            "scheduler",
            "octavo.scheduling.scheduler:ContinuousScheduler",
            priority=1,
            options=SchedulerOptions,
            summary="Continuous batching under one token budget",
        )
    ]


@hookimpl
def register_attention_backends() -> list[Provider]:
    return [
        Provider(
            "torch",
            "attention",
            "octavo.attention.torch_backend:TorchAttention",
            priority=1,
            accepts=accepts_torch_attention,
            summary="Paged attention in plain torch: runs anywhere, and is the oracle",
        )
    ]


@hookimpl
def register_quantizers() -> list[Provider]:
    return [
        Provider(
            "none",
            "quantizer",
            "octavo.model.linear:PlainQuantizer",
            priority=1,
            accepts=accepts_plain_weights,
            summary="Weights as they are: float32, bfloat16 or float16",
        ),
        Provider(
            "mxfp4",
            "quantizer",
            "octavo.model.mxfp4:Mxfp4Quantizer",
            priority=1,
            accepts=accepts_mxfp4,
            summary="gpt-oss's MXFP4 experts, dequantised when they are loaded; the rest as it is",
        ),
    ]


@hookimpl
def register_model_adapters() -> list[Provider]:
    return [
        Provider(
            "decoder",
            "model",
            "octavo.model.adapters:DecoderAdapter",
            priority=1,
            accepts=accepts_decoder,
            summary="One config-driven decoder: " + ", ".join(DECODER_ARCHITECTURES),
        ),
        Provider(
            "transformers",
            "model",
            "octavo.model.any_transformers:TransformersAdapter",
            priority=-10,
            accepts=accepts_transformers,
            summary="Any other causal language model of the transformers library, through its own modules",
        ),
    ]


@hookimpl
def register_operators() -> list[Provider]:
    return [
        Provider(
            "torch",
            "operators",
            "octavo.model.operators:TorchOperators",
            priority=1,
            summary="Plain torch: every operator, and the oracle",
        )
    ]


@hookimpl
def register_executors() -> list[Provider]:
    return [
        Provider(
            "inline",
            "executor",
            "octavo.engine.executor:InlineExecutor",
            priority=1,
            summary="The model runs in the engine's own process",
        )
    ]


@hookimpl
def register_grammars() -> list[Provider]:
    return [
        Provider(
            "none",
            "grammar",
            "octavo.engine.grammars:NoGrammars",
            priority=0,
            summary="Refuses every grammar, and says what is missing",
        )
    ]


@hookimpl
def register_tool_parsers() -> list[Provider]:
    formats = {
        "hermes": ("Hermes", 5, "<tool_call> around JSON: Hermes, Qwen"),
        "llama3_json": ("Llama3Json", 4, "JSON with parameters: Llama 3.1 to 3.3"),
        "deepseek_v3": ("DeepSeekV3", 3, "DeepSeek V3 and R1"),
        "deepseek_v31": ("DeepSeekV31", 2, "DeepSeek V3.1 and later"),
    }
    plain = Provider(
        "json",
        "tool_parser",
        "octavo.text.tool_formats:Json",
        priority=1,
        summary="JSON with arguments, for models of no format of their own",
    )
    return [plain] + [
        Provider(
            name,
            "tool_parser",
            f"octavo.text.tool_formats:{load}",
            priority=priority,
            accepts=accepts_template(name),
            summary=summary,
        )
        for name, (load, priority, summary) in formats.items()
    ]


def accepts_torch_attention(needs: Needs, options: Any) -> Accept | Reject:
    """Any device, any shape, any block size; small blocks on a CPU, larger ones where launches cost more."""
    kinds = ("full", "window", "latent")
    other = next((spec.kind for spec in needs.facts.get("kv_specs", ()) if spec.kind not in kinds), None)
    if other:
        return Reject(f"a layer has a KV cache of kind {other!r}; this backend keeps full, window and latent caches")
    sizes = (16, 32, 64, 128, 8) if needs.device.type == "cpu" else (64, 32, 16, 128, 8)
    return Accept({"block_sizes": sizes}, "runs on any device, for any head shape and block size")


def accepts_plain_weights(needs: Needs, options: Any) -> Accept | Reject:
    method = needs.facts.get("method", "")
    if method:
        return Reject(f"the format {method!r} is wanted, and this provider keeps weights as they are; {readers(method)}")
    return Accept(reason="the weights are not quantised")


def accepts_mxfp4(needs: Needs, options: Any) -> Accept | Reject:
    """Checkpoints of quant_method "mxfp4". Their experts take four times the file's bytes, which the plan must know."""
    method = needs.facts.get("method", "")
    if method != "mxfp4":
        return Reject(f"the format is {method!r}, not 'mxfp4'" if method else "the weights are not quantised")
    return Accept(
        {"stored_values": {"_blocks": 2, "_scales": 0}}, f"experts are dequantised to {needs.dtype} when they are loaded"
    )


def accepts_decoder(needs: Needs, options: Any) -> Accept | Reject:
    architecture = needs.facts.get("architecture", "")
    if architecture in WRAPPED:
        return Accept(reason=f"{architecture}'s language model, {WRAPPED[architecture][0]}, is in its list: text only")
    if architecture not in DECODER_ARCHITECTURES:
        return Reject(f"architecture {architecture!r} is not one of {', '.join((*DECODER_ARCHITECTURES, *WRAPPED))}")
    return Accept(reason=f"{architecture} is in its list")


def accepts_transformers(needs: Needs, options: Any) -> Accept | Reject:
    """Any unquantised causal language model by its name; whether transformers has it is found out with its facts."""
    architecture, config = needs.facts.get("architecture", ""), needs.facts.get("config", {})
    if not CAUSAL.fullmatch(architecture):
        return Reject(f"architecture {architecture!r} is no causal language model by its name")
    if config.get("quantization_config"):
        return Reject("the weights are quantised, and this way serves unquantised ones only")
    return Accept(reason=COST)
