"""Building blocks of the loading tests: weight tables, shards, refusals, GGUF writing, and a record of opened files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from octavo.errors import LoadError
from octavo.model.loader import LoadReport, WeightTable, load_weights
from octavo.model.source import resolve_source
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_config, tiny_shapes, tiny_tokenizer, tiny_weights


def wishes(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[WeightTable, dict[str, torch.Tensor]]:
    """A table that wants exactly the tensors of `config`, and where they go. Unfilled places are NaN."""
    table, places = WeightTable(), {}
    for name, shape in tiny_shapes(config).items():
        place = places[name] = torch.full(shape, float("nan"), dtype=dtype)
        table.declare(name, shape, place.copy_)
    return table, places


def load(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """Load a folder or GGUF file into fresh tensors, as a model of `config` (default: its own) would."""
    source = resolve_source(str(folder))
    config = source.config if config is None else config
    table, places = wishes(config)
    options.setdefault("tied", bool(config.get("tie_word_embeddings")))
    report = load_weights(source, table, "float32", **options)
    return places, report


def shard(folder: Path, parts: int = 2) -> dict[str, str]:
    """Replace model.safetensors by `parts` shards and an index; returns the weight map."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        save_file({n: weights[n] for n in names[i::parts]}, folder / file)
        weight_map.update(dict.fromkeys(names[i::parts], file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(folder: Path, *parts: str, config: dict[str, Any] | None = None, **options: Any) -> str:
    """Loading fails with an error that contains every one of `parts`, before anything is filled."""
    source = resolve_source(str(folder))
    config = source.config if config is None else config
    table, places = wishes(config)
    options.setdefault("tied", bool(config.get("tie_word_embeddings")))
    with pytest.raises(LoadError) as caught:
        load_weights(source, table, "float32", **options)
    for part in parts:
        assert part in str(caught.value)
    assert all(torch.isnan(p).all() for p in places.values()), "something was filled before the refusal"
    return str(caught.value)


def assert_equal(places: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    for name, place in places.items():
        assert torch.equal(place, weights[name].to(place.dtype)), name


_opened: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], (str, bytes, Path)):
        _opened.append(Path(str(args[0])).name)


sys.addaudithook(_audit)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Names of all files that Python opens inside the block (an audit hook sees every open)."""
    global _opened
    _opened = names = []
    try:
        yield names
    finally:
        _opened = None


# ---------------------------------------------------------------- GGUF

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores q and k of Llama: row j and row j + d/2 of a head become neighbours."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        base = head * 2 * half
        for j in range(half):
            out[base + 2 * j], out[base + 2 * j + 1] = rows[base + j], rows[base + half + j]
    return out


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor] | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    tokenizer: bool = True,
) -> Path:
    """A GGUF file of a Hugging Face config, as llama.cpp's converter would lay it out (matrices in `kind`).

    extra: metadata to add or replace; tensors: extra tensors under their GGUF names; without: tensors to leave out.
    """
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    values: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv,
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.rope.dimension_count": config["head_dim"],
    }
    if tokenizer:
        words = tiny_tokenizer()
        vocab = sorted(words.get_vocab(), key=words.token_to_id)
        special = {i for i, t in words.get_added_tokens_decoder().items() if t.special}
        import json

        merges = json.loads(words.to_str())["model"]["merges"]
        values |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": vocab,
            "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(vocab))],
            "tokenizer.ggml.merges": [" ".join(m) for m in merges],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
        }
    for key, value in (values | (extra or {})).items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in (tiny_weights(config) if weights is None else weights).items():
        array = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            array = interleaved(array, heads)
        if arch == "llama" and ".k_proj." in name:
            array = interleaved(array, kv)
        if gguf_name(name) in without:
            continue
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def family_config(model_type: str, **over: Any) -> dict[str, Any]:
    """A tiny config of one of the four decoder families."""
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type] + "ForCausalLM"
    return tiny_config(model_type=model_type, architectures=[architecture], **over)
