"""DeepSeek in the engine: the plugin is found, its cache is paged and shared, and `explain` says what a token costs.

Oracle: transformers' greedy generation from the same folder, and the same engine without a cached prefix.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.plan import plan_engine
from octavo.errors import LoadError, PluginError
from octavo.plugins import discover
from octavo.testing.model import transformers_model
from safetensors.torch import load_file, save_file

from tests.plugins.fp8 import by_block
from tests.tiny import VOCAB, write_text_files

PLUGINS = Path(__file__).parents[2] / "plugins"
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 48,
    "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
V32 = CONFIG | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 16, "index_topk": 24,
}  # fmt: skip
PROMPT = [5 + (7 * i) % 500 for i in range(70)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugins as pip leaves them: their packages and their dist-infos on the path."""
    added: list[str] = []
    for name in ("models_deepseek", "quant_fp8"):
        site = tmp_path_factory.mktemp(name)
        info = site / f"octavo_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo-{name.replace('_', '-')}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[octavo]\n{name} = octavo_{name}\n")
        added += [str(site), str(PLUGINS / name / "src")]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)


@pytest.fixture(scope="module", params=[CONFIG, V32], ids=["v3", "v3.2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, installed: None) -> tuple[Path, Any]:
    """A folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("deepseek")
    right = transformers_model(request.param)
    right.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(request.param))
    write_text_files(folder)
    return folder, right


def llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_threads=1, max_model_len=160, **options)


def greedy(engine: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in engine.generate([{"prompt_token_ids": p} for p in prompts], params)]


def test_greedy_tokens_are_transformers_tokens_with_and_without_a_cached_prefix(model: tuple[Path, Any]) -> None:
    folder, right = model
    prompts = [PROMPT, [*PROMPT[:64], 9, 8, 7], PROMPT[:3]]
    with torch.inference_mode():
        expected = [
            right.generate(torch.tensor([p]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(p) :].tolist()
            for p in prompts
        ]
    engine = llm(folder)
    assert greedy(engine, prompts[:1], 12) == expected[:1]
    assert greedy(engine, prompts, 12) == expected, "after the first prompt's blocks can be hit"
    assert greedy(llm(folder, enable_prefix_caching=False, max_num_batched_tokens=16), prompts, 12) == expected, "in chunks of 16"


def test_samples_of_one_prompt_are_those_of_requests_of_their_own(model: tuple[Path, Any]) -> None:
    """They share the prompt's blocks until they write: whatever a layer keeps is copied first."""
    engine = llm(model[0])
    ask: Any = [{"prompt_token_ids": PROMPT[:61]}]
    common: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    together = engine.generate(ask, SamplingParams(n=3, seed=7, **common))[0].outputs
    alone = [engine.generate(ask, SamplingParams(seed=7 + i, **common))[0].outputs[0] for i in range(3)]
    assert [list(one.token_ids) for one in together] == [list(one.token_ids) for one in alone]


def test_a_pool_that_is_too_small_for_all_changes_no_token(model: tuple[Path, Any]) -> None:
    folder, _ = model
    prompts = [[5 + (i * k) % 500 for i in range(40)] for k in (3, 5, 7, 11)]
    roomy = greedy(llm(folder), prompts, 24)
    assert greedy(llm(folder, num_gpu_blocks_override=12, block_size=8), prompts, 24) == roomy


V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": VOCAB, "hidden_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "q_lora_rank": 24, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 1, "max_position_embeddings": 512,
    "sliding_window": 7, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 64, "index_head_dim": 16, "index_topk": 10,
    "partial_rotary_factor": 0.25, "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LINEARS = re.compile(
    r"((?<!weights)_proj|_proj_with_mqa|attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|experts\.(\d+\.)?w[123])\.weight$"
)


def fp8_and_plain(config: dict[str, Any], folder: Path, scale: str, exponent: bool) -> tuple[Path, Path]:
    """A checkpoint whose Linears and experts are FP8 in blocks, and one of what they stand for."""
    transformers_model(config).save_pretrained(folder / "stored")
    plain: dict[str, torch.Tensor] = {}
    quantised: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "stored" / "model.safetensors").items():
        if LINEARS.search(name):
            packed = config.get("expert_dtype") == "fp4" and re.search(r"experts\.\d", name)
            parts, stands_for = by_nibble(tensor) if packed else by_block(tensor, scale, exponent)
            plain[name] = stands_for.float()
            quantised |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
        else:
            quantised[name] = plain[name] = tensor
    assert len(quantised) > len(plain) + 20
    unpacked = {key: value for key, value in config.items() if key != "expert_dtype"}
    for kind, tensors, made in (("fp8", quantised, config | {"quantization_config": BLOCK_FP8}), ("plain", plain, unpacked)):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(made))
        write_text_files(folder / kind)
    return folder / "fp8", folder / "plain"


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def by_nibble(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix as FP4 with a power-of-two scale for 32 values, as DeepSeek V4 stores its experts, and what it stands for."""
    blocks = weight.view(len(weight), -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6))
    places = (blocks.abs() / torch.exp2(exponent)).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    stands_for = E2M1[places] * blocks.sign() * torch.exp2(exponent)
    bits = (places + 8 * (blocks < 0)).view(len(weight), -1)
    packed = (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scale = (exponent[..., 0] + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": packed, "scale": scale}, stands_for.view(weight.shape)


@pytest.mark.parametrize("version", ["v3", "v4", "v4, FP4 experts"])
def test_block_fp8_weights_give_the_tokens_of_what_they_stand_for(tmp_path: Path, installed: None, version: str) -> None:
    """Absorbed and block-diagonal matrices too, which no product takes as they are: they are what their Linear makes of unit
    vectors. V4's scales are powers of two under a name of their own, and its experts may be FP4."""
    config, scale, exponent = (CONFIG, "weight_scale_inv", False) if version == "v3" else (V4, "scale", True)
    if version == "v4, FP4 experts":
        config = V4 | {"expert_dtype": "fp4", "hidden_size": 64, "moe_intermediate_size": 32}
    fp8, plain = fp8_and_plain(config, tmp_path, scale, exponent)
    exact = {"quantizer": {"fp8": {"activations": "none"}}}
    assert greedy(llm(fp8, plugins=exact), [PROMPT], 12) == greedy(llm(plain), [PROMPT], 12)


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_fp8_inputs_are_as_near_as_their_rounding(tmp_path: Path, installed: None, version: str) -> None:
    """As checkpoints ask for them: norms write FP8, which every use of what they wrote must take. Tiny matrices average little of the
    rounding, and a few tokens change their experts."""
    config, scale, exponent = (CONFIG, "weight_scale_inv", False) if version == "v3" else (V4, "scale", True)
    fp8, plain = fp8_and_plain(config, tmp_path, scale, exponent)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found, right = (llm(path).generate([{"prompt_token_ids": PROMPT}], params)[0].prompt_logprobs for path in (fp8, plain))
    pairs = [(a[token].logprob, b[token].logprob) for a, b, token in zip(found[1:], right[1:], PROMPT[1:], strict=True)]
    correlation = float(torch.corrcoef(torch.tensor(pairs).T)[0, 1])
    assert 0.9 < correlation < 1, correlation


def test_fp4_experts_are_refused_where_the_config_does_not_name_them_and_planned_as_what_they_become(
    tmp_path: Path, installed: None
) -> None:
    config = V4 | {"expert_dtype": "fp4", "hidden_size": 64, "moe_intermediate_size": 32}
    fp8, _ = fp8_and_plain(config, tmp_path, "scale", True)

    def weight_bytes(folder: Path) -> int:
        asked = EngineConfig(model=str(folder), dtype="bfloat16", max_model_len=160, device="cpu")
        found: int = plan_engine(asked, discover()).explain()["model"]["weight_bytes"]
        return found

    experts = 3 * 8 * 3 * 64 * 32  # layers, experts, matrices
    stored = sum(t.numel() * t.itemsize for t in load_file(fp8 / "model.safetensors").values() if t.dtype != torch.float32)
    assert weight_bytes(fp8) > stored + 1.4 * experts, "half a byte each in the file, two bytes each once they are loaded"
    unnamed = {key: value for key, value in config.items() if key != "expert_dtype"}
    (fp8 / "config.json").write_text(json.dumps(unnamed | {"quantization_config": BLOCK_FP8}))
    with pytest.raises(LoadError, match=r"experts\.0\.w1\.weight"):
        llm(fp8)
    (fp8 / "config.json").write_text(json.dumps(config | {"expert_dtype": "int3", "quantization_config": BLOCK_FP8}))
    with pytest.raises(PluginError, match="expert_dtype 'int3'"):
        llm(fp8)


def test_v4_finds_a_prefix_again_with_everything_that_its_layers_kept_of_it(tmp_path: Path, installed: None) -> None:
    """Windows, entries, and the projections of windows that were open: and gives them back, and computes them again."""
    right = transformers_model(V4)
    right.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(V4))
    write_text_files(tmp_path)
    common = [5 + (7 * i) % 500 for i in range(300)]
    prompts = [common, [*common[:290], 9, 8, 7], common[:3]]
    with torch.inference_mode():
        expected = [
            right.generate(torch.tensor([p]), max_new_tokens=10, min_new_tokens=10, do_sample=False)[0, len(p) :].tolist()
            for p in prompts
        ]
    common_options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 400}
    engine = LLM(str(tmp_path), **common_options)
    assert greedy(engine, prompts[:1], 10) == expected[:1]
    assert greedy(engine, prompts, 10) == expected
    assert engine.engine.stats().prefix_hits >= 256, "the second prompt's first blocks were found"
    small = LLM(str(tmp_path), **common_options, num_gpu_blocks_override=110, max_num_batched_tokens=50)
    assert greedy(small, prompts, 10) == expected


def test_explain_names_the_latent_group_and_what_a_token_costs(model: tuple[Path, Any]) -> None:
    folder, _ = model
    plan = plan_engine(EngineConfig(model=str(folder), dtype="bfloat16", max_model_len=160, device="cpu"), discover())
    told = plan.explain()
    assert told["decisions"]["model"]["chosen"] == "deepseek"
    main, *index = told["kv_cache"]["groups"]
    assert main["kind"] == "latent" and main["layers"] == [0, 1, 2]
    assert main["bytes_per_token"] == 3 * 40 * 2
    assert [group["bytes_per_token"] for group in index] == ([3 * 16 * 2] if "v32" in plan.source.config["model_type"] else [])
    assert told["kv_cache"]["bytes_per_token"] == sum(group["bytes_per_token"] for group in told["kv_cache"]["groups"])


def test_explain_names_v4s_groups_by_what_an_entry_stands_for(tmp_path: Path, installed: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4))
    write_text_files(tmp_path)
    asked = EngineConfig(model=str(tmp_path), dtype="bfloat16", max_model_len=160, device="cpu", load_format="dummy")
    told = plan_engine(asked, discover()).explain()
    assert told["decisions"]["model"]["chosen"] == "deepseek_v4"
    groups = told["kv_cache"]["groups"]
    found = {(group["window"], group["block_size"] // group["page_shape"][0]): group for group in groups}
    assert set(found) == {(7, 1), (8, 1), (None, 4), (None, 8)}, "windows, and tokens that an entry stands for"
    assert "[slot of 8 tokens, entry]" in found[None, 8]["order"]
    assert found[None, 8]["bytes_per_token"] == 32 * 2 // 8 and found[7, 1]["bytes_per_token"] == 32 * 2 * len(
        found[7, 1]["layers"]
    )
