"""GGUF files: the container, the config, the tensor names and row orders, and dequantisation.

The oracles are the `gguf` package (which writes the files and defines the arithmetic), transformers'
own GGUF loading of the demo model, and transformers' RoPE tables.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from octavo.errors import LoadError
from octavo.model.gguf import gguf_config, row_order
from octavo.model.gguf_file import read_gguf
from octavo.model.loader import WeightTable, load_weights
from octavo.model.source import resolve_source

from tests.model.checkpoints import family_config, interleaved, load, write_gguf
from tests.tiny import tiny_shapes, tiny_weights

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def config_of(path: Path) -> dict[str, Any]:
    return resolve_source(str(path)).config


# ---------------------------------------------------------------- config


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_the_config_of_a_converted_model_is_the_config_it_was_made_from(tmp_path: Path, model_type: str, tie: bool) -> None:
    config = family_config(model_type, tie=tie, sliding_window=64 if model_type == "mistral" else ...)
    extra = {"llama.attention.sliding_window": 64} if model_type == "mistral" else {}
    got = config_of(write_gguf(tmp_path / "m.gguf", config, extra=extra))
    same = [
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    ]  # fmt: skip
    assert {k: got[k] for k in same} == {k: config[k] for k in same}
    assert got["rms_norm_eps"] == pytest.approx(config["rms_norm_eps"], rel=1e-6)
    assert got["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert got.get("sliding_window") == (64 if model_type == "mistral" else None)


def test_transformers_builds_the_same_parameters_from_our_config(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for model_type in FAMILIES:
        config = config_of(write_gguf(tmp_path / f"{model_type}.gguf", family_config(model_type)))
        values = {k: v for k, v in config.items() if k != "model_type"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
        assert {n: tuple(p.shape) for n, p in model.named_parameters()} == tiny_shapes(family_config(model_type))


def test_head_dim_may_differ_from_hidden_by_heads(tmp_path: Path) -> None:
    got = config_of(write_gguf(tmp_path / "m.gguf", family_config("llama", head_dim=32)))
    assert got["head_dim"] == 32
    assert load(tmp_path / "m.gguf", family_config("llama", head_dim=32))[1].tensors > 0


def test_biases_of_a_llama_are_seen_and_put_in_order(tmp_path: Path) -> None:
    config = family_config("llama", attention_bias=True)
    got = config_of(write_gguf(tmp_path / "m.gguf", config))
    assert got["attention_bias"] is True and got["mlp_bias"] is False
    places, _ = load(tmp_path / "m.gguf", config)
    for name, tensor in tiny_weights(config).items():
        assert torch.equal(places[name], tensor), name


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 16.0,
                "llama.rope.scaling.original_context_length": 4096,
            },
            {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
        ),
        ({"llama.rope.scaling.type": "none", "llama.rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"llama.rope.dimension_count": 8}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_rope_keys_become_rope_parameters(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = config_of(write_gguf(tmp_path / "m.gguf", family_config("llama"), extra=extra))["rope_parameters"]
    assert rope == {"rope_theta": 10000.0} | expected


def test_llama3_frequency_divisors_give_the_frequencies_of_llama3_scaling(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    base = family_config("llama", head_dim=64, max_position_embeddings=131072, rope_theta=5e5)
    shape = {k: base[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
    theirs = LlamaConfig(**shape, rope_parameters=scaling | {"original_max_position_embeddings": 8192})
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    path = write_gguf(tmp_path / "m.gguf", base, tensors={"rope_freqs.weight": (plain / wanted).numpy()})

    config = config_of(path)
    ours = LlamaConfig(**shape, rope_parameters=config["rope_parameters"])
    for length in (100, 10_000):
        got, factor = ROPE_INIT_FUNCTIONS["longrope"](ours, "cpu", seq_len=length)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
        assert factor == 1.0
    assert load(path, base)[1].skipped == ()  # it is part of the config, not a weight


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"general.architecture": "gemma9"}, "gemma9"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "magic"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor"),
        ({"llama.attention.some_new_thing": 1.5}, "llama.attention.some_new_thing"),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"split.count": 3}, "3 GGUF files"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama"), extra=extra)
    with pytest.raises(LoadError) as caught:
        resolve_source(str(path))
    assert named in str(caught.value) and "m.gguf" in str(caught.value)


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_returns_under_its_checkpoint_name_and_row_order(tmp_path: Path, model_type: str) -> None:
    config = family_config(model_type)
    weights = tiny_weights(config)
    places, report = load(write_gguf(tmp_path / "m.gguf", config, weights), config)
    assert report.tensors == len(weights)
    for name, tensor in weights.items():
        assert torch.equal(places[name], tensor), name


def test_row_order_undoes_the_interleaving_for_any_head_count(tmp_path: Path) -> None:
    for heads, kv, dim in [(4, 2, 16), (9, 3, 64), (7, 7, 2), (2, 1, 128)]:
        config = family_config("llama", num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, hidden_size=64)
        file = read_gguf(write_gguf(tmp_path / f"{heads}.gguf", config))
        for name, count in (("attn_q", heads), ("attn_k", kv)):
            tensor = next(t for t in file.tensors if t.name == f"blk.0.{name}.weight")
            stored = interleaved(np.arange(count * dim)[:, None], count)
            order = row_order(file, tensor)
            assert order is not None
            assert np.array_equal(order, stored[:, 0])  # stored row i came from checkpoint row order[i]


KINDS = [GGMLQuantizationType[n] for n in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_every_block_format_is_dequantised_as_the_gguf_package_does(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    config = family_config("qwen3", layers=1)
    weights = tiny_weights(config)
    places, _ = load(write_gguf(tmp_path / "m.gguf", config, weights, kind=kind), config)
    for name, tensor in weights.items():
        expected = tensor if tensor.ndim == 1 else torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        assert torch.equal(places[name], expected), name


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.IQ4_XS], ids=lambda k: k.name
)
def test_formats_of_super_blocks_are_dequantised_as_the_gguf_package_does(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    # The package cannot quantise these, so random bits stand for the stored blocks; scales are kept finite.
    from gguf import GGML_QUANT_SIZES, GGUFWriter

    config = family_config("qwen3", layers=1, hidden_size=256, num_attention_heads=4, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", config)
    file = read_gguf(path)
    tensor = next(t for t in file.tensors if t.name == "blk.0.ffn_gate.weight")
    block, stored = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (tensor.shape[0], tensor.shape[1] // block * stored), dtype=np.uint8)

    second = tmp_path / "one.gguf"
    writer = GGUFWriter(second, "qwen3")
    for key, value in file.metadata.items():
        if key.startswith("qwen3.") and isinstance(value, int):
            writer.add_uint32(key, value)
        elif key.startswith("qwen3."):
            writer.add_float32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), np.float32))
    writer.add_tensor("blk.0.ffn_gate.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    table, seen = WeightTable(), {}
    table.declare("model.layers.0.mlp.gate_proj.weight", tensor.shape, lambda t: seen.__setitem__("w", t))
    load_weights(resolve_source(str(second)), table, "float32", ignored=lambda n: "embed" in n)
    assert torch.equal(seen["w"], torch.from_numpy(dequantize(raw, kind)))
    assert torch.isfinite(seen["w"]).all() and seen["w"].unique().numel() > 10


def test_dequantised_tensors_are_rounded_once_to_the_dtype_asked_for(tmp_path: Path) -> None:
    config = family_config("llama", layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, kind=GGMLQuantizationType.Q8_0)
    exact, _ = load(path, config)
    table, seen = WeightTable(), {}
    for name, shape in tiny_shapes(config).items():
        table.declare(name, shape, lambda t, n=name: seen.__setitem__(n, t))
    load_weights(resolve_source(str(path)), table, "bfloat16")
    for name, tensor in seen.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].bfloat16()), name


def test_an_unknown_tensor_is_unexpected_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    config = family_config("llama", layers=1)
    extra = write_gguf(tmp_path / "a.gguf", config, tensors={"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)})
    with pytest.raises(LoadError, match=r"unexpected: blk\.0\.ffn_gate_inp\.weight"):
        load(extra, config)
    lacking = write_gguf(tmp_path / "b.gguf", config, without=("blk.0.ffn_norm.weight",))
    with pytest.raises(LoadError, match=r"missing: model\.layers\.0\.post_attention_layernorm\.weight"):
        load(lacking, config)


def test_the_vocabulary_is_as_large_as_the_embedding_whatever_the_tokenizer_has(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama", vocab_size=500))
    assert config_of(path)["vocab_size"] == 500


# ---------------------------------------------------------------- damaged files


def test_a_gguf_cut_anywhere_is_refused_with_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama", layers=1))
    whole = path.read_bytes()
    header = min(t.offset for t in read_gguf(path).tensors)
    sizes = [0, 1, 3, 4, 5, 8, 23, 24, header - 1, header, header + 1, len(whole) // 2, len(whole) - 64]
    for size in [*sizes, *random.Random(0).sample(range(header), 60)]:
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"m\.gguf"):
            load(path, family_config("llama", layers=1))


@pytest.mark.parametrize("offset", [1, 33, 1 << 40, (1 << 64) - 32])
def test_a_tensor_that_lies_outside_the_file_or_unaligned_is_refused_by_name(tmp_path: Path, offset: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama", layers=1))
    data, name = bytearray(path.read_bytes()), b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8 + 4  # after the number of dimensions, one dimension and the type
    data[at : at + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"m\.gguf.*output_norm\.weight"):
        read_gguf(path)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama", layers=1))
    whole = bytearray(path.read_bytes())
    header = min(t.offset for t in read_gguf(path).tensors)
    chance = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(4, header)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        path.write_bytes(damaged)
        try:
            gguf_config(read_gguf(path))
        except LoadError as error:
            assert "m.gguf" in str(error)


@pytest.mark.parametrize("data", [b"", b"GGU", b"\x80\x04K.", b"PK\x03\x04 a zip", b"version https://git-lfs.github.com/spec/v1"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"m\.gguf: not a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize(("version", "named"), [(1, "version 1"), (99, "version 99"), (0x03000000, "big-endian")])
def test_another_version_or_byte_order_is_refused(tmp_path: Path, version: int, named: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
    with pytest.raises(LoadError, match=named):
        read_gguf(path)


# ---------------------------------------------------------------- the demo model


def test_the_demo_config_is_that_of_smollm2_135m(demo_path: Path) -> None:
    config = config_of(demo_path)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["tie_word_embeddings"] is True and config["rope_parameters"]["rope_theta"] == 100000.0


@pytest.mark.slow
def test_the_demo_weights_are_bit_equal_to_those_that_transformers_dequantises(demo_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(demo_path.parent, gguf_file=demo_path.name, dtype=torch.float32)
    expected = dict(reference.named_parameters())
    table, different = WeightTable(), []

    def compare(name: str, tensor: torch.Tensor) -> None:
        if not torch.equal(tensor, expected[name].detach()):
            different.append(name)

    for name, parameter in expected.items():
        table.declare(name, tuple(parameter.shape), lambda t, n=name: compare(n, t))
    report = load_weights(resolve_source("demo"), table, "float32", tied=True)
    assert different == [] and report.tensors == len(expected) == 272


def test_loading_the_demo_imports_no_transformers_and_peaks_near_the_final_size(demo_path: Path) -> None:
    code = r"""
import re, resource, sys, torch
torch.set_num_threads(1)
from octavo.model.checkpoint import checkpoint_headers
from octavo.model.loader import WeightTable, load_weights
from octavo.model.source import resolve_source
source, table, keep = resolve_source("demo"), WeightTable(), []
for header in checkpoint_headers(source).values():
    place = torch.empty(header.shape, dtype=torch.bfloat16)
    keep.append(place)
    table.declare(header.name, header.shape, place.copy_)
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
report = load_weights(source, table, "bfloat16", tied=True)
peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024 - before
assert "transformers" not in sys.modules
assert report.nbytes == source.weight_bytes("bfloat16")
assert peak < 1.2 * report.nbytes, (peak, report.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- Gemma 3


def test_a_gemma3_file_is_the_model_it_was_made_from(tmp_path: Path) -> None:
    """Its norms are stored plus one, its second norm of a layer is another one than Llama's, and every sixth layer sees
    everything with a RoPE of its own: logits equal transformers' of the model that was written."""
    from octavo.model.adapters import DecoderAdapter
    from octavo.testing.model import BareModel, checkpoint, right_logits, transformers_model

    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "query_pre_attn_scalar": 32, "sliding_window": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }  # fmt: skip
    right = transformers_model({key: value for key, value in config.items() if key != "rope_theta"}, spread=0.2)
    stored = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }  # fmt: skip
    tensors = {}
    for name, tensor in checkpoint(right, {"tie_word_embeddings": True}).items():
        parts = name.removesuffix(".weight").split(".")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.get(".".join(parts))
        place = top or f"blk.{parts[2]}.{stored['.'.join(parts[3:])]}"
        tensors[f"{place}.weight"] = (tensor + 1 if "norm" in place else tensor).numpy()
    path = write_gguf(
        tmp_path / "m.gguf",
        config | {"model_type": "gemma3"},
        {},
        extra={"gemma3.attention.sliding_window": 16, "gemma3.rope.freq_base": 1e6},
        tensors=tensors,
    )
    source = resolve_source(str(path))
    assert source.config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    table, places = WeightTable(), {}
    for name, tensor in checkpoint(right, {"tie_word_embeddings": True}).items():
        table.declare(name, tuple(tensor.shape), lambda t, name=name: places.update({name: t}))  # type: ignore[misc]
    load_weights(source, table, "float32", tied=True)
    prompt = [3 + (7 * i) % 500 for i in range(40)]
    found = BareModel(DecoderAdapter(None, None), source.config, places).feed(0, prompt, [25, 15])
    assert float((found - right_logits(right, prompt)).abs().max()) <= 1e-4


def test_a_header_is_parsed_once_while_a_source_holds_it_and_again_when_the_file_is_another(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama"))
    source = resolve_source(str(path))
    assert source.file is not None and read_gguf(path) is read_gguf(path) is source.file
    write_gguf(path, family_config("llama"))
    os.utime(path, ns=(1, 1))
    assert read_gguf(path) is not source.file
