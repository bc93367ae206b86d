"""DeepSeek in the engine: the plugin is found, its cache is paged and shared, and `explain` says what a token costs.

Oracle: transformers' greedy generation from the same folder, and the same engine without a cached prefix.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.plan import plan_engine
from octavo.plugins import discover
from octavo.testing.model import transformers_model

from tests.tiny import VOCAB, write_text_files

SOURCE = Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"
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
    """The plugin as pip leaves it: its package and its dist-info on the path."""
    site = tmp_path_factory.mktemp("site")
    info = site / "octavo_models_deepseek-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-models-deepseek\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[octavo]\nmodels_deepseek = octavo_models_deepseek\n")
    added = [str(site), str(SOURCE)]
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


def test_a_pool_that_is_too_small_for_all_changes_no_token(model: tuple[Path, Any]) -> None:
    folder, _ = model
    prompts = [[5 + (i * k) % 500 for i in range(40)] for k in (3, 5, 7, 11)]
    roomy = greedy(llm(folder), prompts, 24)
    assert greedy(llm(folder, num_gpu_blocks_override=12, block_size=8), prompts, 24) == roomy


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
