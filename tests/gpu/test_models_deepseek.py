"""DeepSeek on a GPU: the engine with Triton's latent attention and captured graphs gives the tokens that the CPU gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

import json
import sys

from octavo import LLM, SamplingParams
from octavo.testing.model import transformers_model

from tests.tiny import VOCAB, write_text_files

pytestmark = pytest.mark.gpu

PLUGINS = Path(__file__).parents[2] / "plugins"
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = [[5 + (i * k) % 500 for i in range(n)] for k, n in ((3, 70), (5, 9), (7, 200), (11, 1), (13, 64))]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugins as pip leaves them, where they are not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    added: list[str] = []
    for name in ("models_deepseek", "attention_triton", "ops_triton"):
        try:
            distribution(f"octavo-{name.replace('_', '-')}")
        except PackageNotFoundError:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek")
    transformers_model(CONFIG).save_pretrained(made)
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_text_files(made)
    return made


def greedy(folder: Path, **options: Any) -> list[list[int]]:
    engine = LLM(str(folder), dtype="float32", max_model_len=400, max_num_seqs=8, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    asks: list[Any] = [{"prompt_token_ids": p} for p in PROMPTS]
    first, second = (engine.generate(asks, params) for _ in range(2))  # the second time from cached prefixes
    tokens = [list(o.outputs[0].token_ids) for o in first]
    assert tokens == [list(o.outputs[0].token_ids) for o in second]
    return tokens


def test_graphs_chunks_and_kernels_give_the_tokens_of_the_cpu(folder: Path) -> None:
    right = greedy(folder, device="cpu", num_threads=4)
    gpu = {"device": "cuda", "num_gpu_blocks_override": 200}
    assert greedy(folder, **gpu) == right
    assert greedy(folder, **gpu, enforce_eager=True, max_num_batched_tokens=32) == right
    assert greedy(folder, **gpu, attention_backend="torch") == right
