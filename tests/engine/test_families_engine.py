"""Families in the engine: greedy tokens are transformers', whole or chunked, after a prefix hit, past the edge of a window,
and `explain` says what a token of each costs.

Oracle: transformers' greedy generation from the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.engine.engine import Engine
from octavo.testing.model import checkpoint, transformers_model
from safetensors.torch import save_file

from tests.engine.harness import make_engine, request, run
from tests.tiny import BOS, EOS, VOCAB, write_text_files

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS,
    "pad_token_id": 0,
}  # fmt: skip
WINDOW = 24
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": WINDOW, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": WINDOW},
    "gpt-neox": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "rotary_pct": 0.5},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
PROMPT = [BOS, *[8 + (37 * i) % 500 for i in range(69)]]
COUNT = 12


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A complete folder of the family, and transformers' model of it."""
    folder, config = tmp_path_factory.mktemp(request.param), SIZES | FAMILIES[request.param]
    right = transformers_model(config)
    tied = bool(right.config.tie_word_embeddings)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = checkpoint(right, config | {"tie_word_embeddings": tied})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_text_files(folder)
    return folder, right


def greedy(right: Any, prompt: list[int]) -> list[int]:
    """COUNT tokens; the end-of-sequence token is one like any other."""
    right.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = right.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def answers(engine: Engine, *prompts: list[int]) -> list[list[int]]:
    """Tokens of prompts that run side by side."""
    made = [request(engine, f"r{i}", p, eos=(), max_tokens=COUNT) for i, p in enumerate(prompts)]
    found = run(engine, made)
    return [found[f"r{i}", 0].tokens for i in range(len(prompts))]


@pytest.mark.parametrize("budget", [256, 19], ids=["whole prompts", "chunks of 19"])
def test_greedy_tokens_are_transformers_tokens(model: tuple[Path, Any], budget: int) -> None:
    folder, right = model
    prompts = [PROMPT, PROMPT[:5], PROMPT[:41]]
    engine = make_engine(folder, max_num_batched_tokens=budget, max_num_seqs=4, num_gpu_blocks=64)
    assert answers(engine, *prompts) == [greedy(right, p) for p in prompts]


def test_a_prefix_hit_changes_no_token(model: tuple[Path, Any]) -> None:
    folder, right = model
    engine = make_engine(folder, num_gpu_blocks=64)
    other = [*PROMPT[:64], 9, 8, 7]
    first = answers(engine, PROMPT)
    before = engine.stats().prefix_hits
    assert [first[0], *answers(engine, other)] == [greedy(right, PROMPT), greedy(right, other)]
    assert engine.stats().prefix_hits > before, "nothing was hit: the test shows nothing"


def test_explain_names_the_groups_and_what_a_token_costs(model: tuple[Path, Any]) -> None:
    folder, _ = model
    config = json.loads((folder / "config.json").read_text())
    told = make_engine(folder, num_gpu_blocks=64).explain["kv_cache"]
    heads = 4 if config["model_type"] == "gpt_neox" else 2
    assert told["bytes_per_token"] == 3 * 2 * heads * 16 * 4, "K and V of three layers, float32"
    assert {group["kind"] for group in told["groups"]} <= {"full", "window"}
    assert {group["window"] for group in told["groups"]} - {None} == ({WINDOW} if "sliding_window" in config else set())
