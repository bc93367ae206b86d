"""GGUF metadata as a Hugging Face config, and GGUF tensor names as checkpoint names.

Owns which GGUF architectures are understood and how their keys, names and row orders translate.
Every key that shapes the computation is either translated or refused; none is skipped in silence.
Imports neither torch nor the `gguf` package: the server process reads configs with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.model.gguf_file import GGUFFile, GGUFTensor


@dataclass(frozen=True, slots=True)
class Family:
    """A GGUF architecture. permuted: q and k rows are interleaved per head (llama.cpp's "norm" RoPE)
    and must be put back into the half-split order that checkpoints use. names: tensors of a layer whose names
    differ from _LAYER's. norm_offset: llama.cpp stores norm weights with this added."""

    architecture: str
    model_type: str
    permuted: bool = False
    qkv_bias: bool = False  # the Hugging Face class always has q, k, v biases
    names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0


_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", permuted=True),  # Mistral checkpoints are converted to "llama" too
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", names=_SANDWICH, norm_offset=1.0),
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")

ROPE_FREQS = "rope_freqs.weight"
"""Per-frequency divisors that llama.cpp writes for Llama 3's RoPE; part of the config, not a weight."""

# Keys under "<architecture>." that change nothing in the computation, or that are read below.
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear",
    "tensor_data_layout", "expert_count", "expert_used_count", "use_parallel_residual",
}  # fmt: skip
_NEUTRAL = {
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
    "rope.scale_linear": 1.0, "use_parallel_residual": False,
}  # fmt: skip


def family(file: GGUFFile) -> Family:
    """The architecture of a file; LoadError with the list of those understood."""
    name = file.require("general.architecture", str)
    if name not in FAMILIES:
        raise LoadError(
            f"{file.path}: GGUF architecture {name!r} is not supported (supported: {', '.join(sorted(FAMILIES))}). "
            "Load the safetensors checkpoint of this model instead."
        )
    if file.get("split.count", 1, int) > 1:
        raise LoadError(f"{file.path}: the model is split over {file.get('split.count')} GGUF files; merge them into one first")
    return FAMILIES[name]


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this model would have: keys as Hugging Face writes them."""
    kind = family(file)
    prefix = file.require("general.architecture", str) + "."
    _refuse_unknown(file, prefix)

    def need(key: str, types: type | tuple[type, ...] = int) -> Any:
        return file.require(prefix + key, types)

    shapes = {t.name: t.shape for t in file.tensors}
    if "token_embd.weight" not in shapes:
        raise LoadError(f"{file.path}: the tensor 'token_embd.weight' is missing")
    vocab, hidden = shapes["token_embd.weight"][0], need("embedding_length")
    heads = need("attention.head_count")
    kv_heads = file.get(prefix + "attention.head_count_kv", heads, (int, list))
    if isinstance(kv_heads, list):
        if len(set(kv_heads)) != 1:
            raise LoadError(f"{file.path}: {prefix}attention.head_count_kv differs between layers ({kv_heads}): not supported")
        kv_heads = kv_heads[0]
    if heads < 1 or kv_heads < 1 or hidden < 1:
        raise LoadError(f"{file.path}: {heads} heads, {kv_heads} kv heads and hidden size {hidden} must all be positive")
    head_dim = file.get(prefix + "attention.key_length", hidden // heads, int)
    if file.get(prefix + "attention.value_length", head_dim, int) != head_dim:
        raise LoadError(f"{file.path}: {prefix}attention.value_length differs from key_length {head_dim}: not supported")
    config: dict[str, Any] = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon", (int, float))),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(file, prefix, head_dim),
    }
    for part in ("bos", "eos", "padding"):
        token = file.get(f"tokenizer.ggml.{part}_token_id", None, int)
        config["pad_token_id" if part == "padding" else f"{part}_token_id"] = token
    if not kind.qkv_bias:
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if kind.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    window = file.get(prefix + "attention.sliding_window", 0, int)
    if kind.model_type == "gemma3_text":
        config.update(_gemma3(file, config, window))
    elif window:
        if kind.model_type != "llama":
            raise LoadError(f"{file.path}: {prefix}attention.sliding_window = {window}: not supported for {kind.model_type}")
        config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)
        del config["attention_bias"], config["mlp_bias"]
    return config


def _gemma3(file: GGUFFile, config: Mapping[str, Any], window: int) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without a key: every sixth layer sees everything, the others have a RoPE of their own
    with base 1e4 and no scaling, and the 27B model (62 layers) scales queries by hidden_size / heads."""
    if not window:
        raise LoadError(f"{file.path}: gemma3.attention.sliding_window is missing")
    heads, wide = config["num_attention_heads"], config["num_hidden_layers"] == 62
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": config["hidden_size"] // heads if wide else config["head_dim"],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }


def _refuse_unknown(file: GGUFFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        if not key.startswith(prefix):
            continue
        short = key.removeprefix(prefix)
        if short not in _KNOWN or (short in _NEUTRAL and value != _NEUTRAL[short]):
            raise LoadError(
                f"{file.path}: the GGUF key {key!r} (= {str(value)[:40]}) asks for something that is not supported here; "
                "load the safetensors checkpoint of this model instead"
            )


def _rope(file: GGUFFile, prefix: str, head_dim: int) -> dict[str, Any]:
    """rope_parameters as transformers 5 writes them, from the rope.* keys and the rope_freqs tensor."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get(prefix + "rope.freq_base", 10000.0, (int, float))),
    }
    rotated = file.get(prefix + "rope.dimension_count", head_dim, int)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = file.get(prefix + "rope.scaling.type", "none", str)
    factor = float(file.get(prefix + "rope.scaling.factor", 1.0, (int, float)))
    original = file.get(prefix + "rope.scaling.original_context_length", None, int)
    if kind == "linear":
        rope.update(rope_type="linear", factor=factor)
    elif kind == "yarn":
        rope.update(rope_type="yarn", factor=factor)
        if original is not None:
            rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            value = file.get(f"{prefix}rope.scaling.yarn_{name}", None, float)
            if value is not None:
                rope[name] = value
    elif kind != "none":
        raise LoadError(f"{file.path}: {prefix}rope.scaling.type is {kind!r}; none, linear and yarn are supported")
    divisors = next((t for t in file.tensors if t.name == ROPE_FREQS), None)
    if divisors is not None:
        if kind != "none":
            raise LoadError(f"{file.path}: {ROPE_FREQS} together with {prefix}rope.scaling.type = {kind!r}: not supported")
        rope.update(_divided(file, divisors, rotated))
    return rope


def _divided(file: GGUFFile, tensor: GGUFTensor, rotated: int) -> dict[str, Any]:
    # Llama 3's scaling arrives as one divisor a frequency instead of the four numbers it was made
    # from. LongRoPE divides frequencies in the same way, so with equal lists for short and long
    # contexts and an attention factor of one it is the same function.
    if tensor.type != 0 or tensor.shape != (rotated // 2,):
        raise LoadError(
            f"{file.path}: {ROPE_FREQS} is {tensor.shape} of type {tensor.type}; float32 ({rotated // 2},) is expected"
        )
    with file.path.open("rb") as raw:
        raw.seek(tensor.offset)
        data = raw.read(4 * tensor.shape[0])
    if len(data) != 4 * tensor.shape[0]:
        raise LoadError(f"{file.path}: {ROPE_FREQS} is cut off")
    values = [float(v) for v in np.frombuffer(data, "<f4")]
    if all(v == 1.0 for v in values):
        return {}
    if not all(np.isfinite(v) and v > 0 for v in values):
        raise LoadError(f"{file.path}: {ROPE_FREQS} holds values that are not positive and finite")
    context = file.require(file.require("general.architecture", str) + ".context_length", int)
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def checkpoint_name(name: str, kind: Family) -> str | None:
    """The Hugging Face name of a tensor of such a file; None if there is none (the caller decides whether that is an error)."""
    if name in _TOP:
        return _TOP[name]
    match = _IN_LAYER.fullmatch(name)
    part = (_LAYER | dict(kind.names)).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else None


def stored_offset(name: str, kind: Family) -> float:
    """What a file of this kind adds to every value of the checkpoint tensor `name`."""
    return kind.norm_offset if "norm" in name else 0.0


def row_order(file: GGUFFile, tensor: GGUFTensor) -> np.ndarray | None:
    """Where each stored row goes: int64 [rows], or None if rows are in checkpoint order already.

    llama.cpp stores q and k of the llama family with each head's rows interleaved (j, j + d/2), so
    that stored row 2j + s of a head is checkpoint row s * d/2 + j. It holds for biases too.
    """
    if not family(file).permuted or (".attn_q." not in tensor.name and ".attn_k." not in tensor.name):
        return None
    prefix = file.require("general.architecture", str) + "."
    heads: Any = file.require(prefix + "attention.head_count", int)
    if ".attn_k." in tensor.name:
        heads = file.get(prefix + "attention.head_count_kv", heads, (int, list))
        heads = heads[0] if isinstance(heads, list) else heads
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise LoadError(f"{file.path}: tensor {tensor.name!r} has {rows} rows, which {heads} heads of an even size cannot share")
    order: np.ndarray = np.arange(rows, dtype=np.int64).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
    return order
