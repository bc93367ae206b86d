"""DeepSeek on a GPU: every version's logits by the conformance suite of model adapters, and an engine whose graphs, chunks and
cached prefixes give the tokens that the CPU gives.

Oracle: transformers' eager model where the installed transformers has the architecture, else core's torch backend on the CPU,
which the CPU's tests hold against transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

from octavo import LLM, SamplingParams
from octavo.bench.kernel import cuda_device
from octavo.interfaces import AttentionBackend, AttentionParts, ModelAdapter
from octavo.testing.model import (
    LENGTH,
    BareModel,
    ModelSuite,
    ModelTarget,
    Oracle,
    checkpoint,
    random_tensors,
    right_logits,
    transformers_model,
)
from octavo_attention_triton.latent import TritonLatent
from octavo_attention_triton.latent_provider import LatentOptions
from octavo_models_deepseek.adapter import DeepseekAdapter
from octavo_models_deepseek.v4_adapter import V4Adapter
from octavo_models_deepseek.windowed import WindowedAdapter
from safetensors.torch import save_file

from tests.tiny import VOCAB, write_text_files

pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "q_lora_rank": None, "routed_scaling_factor": 1.0,
}  # fmt: skip
# Many index heads, for with few of them scores that relu makes exactly zero tie, and a tie may be broken either way.
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 16, "index_topk": 12,
}  # fmt: skip
V4 = {key: value for key, value in COMMON.items() if key != "intermediate_size"} | {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 24, "num_experts_per_tok": 3, "n_routed_experts": 8,
    "n_shared_experts": 1, "sliding_window": 7, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 64, "index_head_dim": 16, "index_topk": 3,
    "partial_rotary_factor": 0.25, "swiglu_limit": 1.0,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}  # fmt: skip
WINDOWED = COMMON | {
    "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 13, "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "dynamic", "factor": 8.0},
}  # fmt: skip
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "v2": (DeepseekAdapter, V2), "v3": (DeepseekAdapter, V3), "v3.2": (DeepseekAdapter, V32), "v4": (V4Adapter, V4),
    "windowed": (WindowedAdapter, WINDOWED),
}  # fmt: skip


def by_id(shape: torch.Size) -> torch.Tensor:
    """Distinct experts of 8 for every token id, int64 [vocab, top_k]."""
    random = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(8, generator=random)[: shape[1]] for _ in range(shape[0])])


def tensors_of(adapter: ModelAdapter, config: Mapping[str, Any], spread: float) -> dict[str, torch.Tensor]:
    """Random weights under the adapter's own names."""
    made = random_tensors(adapter, config, spread=spread)
    return {name: by_id(tensor.shape) if name.endswith("tid2eid") else tensor for name, tensor in made.items()}


def oracle(config: Mapping[str, Any]) -> Oracle:
    if find_spec(f"transformers.models.{config['model_type']}") is not None:
        model = transformers_model(config, spread=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(by_id(buffer.shape))
        return Oracle(checkpoint(model, config), lambda tokens: right_logits(model, tokens))
    cls = next(cls for cls, known in MODELS.values() if known["architectures"] == config["architectures"])
    tensors = tensors_of(cls(None, None), config, 0.2)

    def logits(tokens: Any) -> torch.Tensor:
        return BareModel(cls(None, None), config, tensors).feed(0, tokens, [len(tokens)], bounds={0: LENGTH})

    return Oracle(tensors, logits)


def triton_latent(parts: AttentionParts) -> AttentionBackend:
    backend: AttentionBackend = TritonLatent(LatentOptions(), parts)
    return backend


class TestLatent(ModelSuite):
    """Over Triton's kernels for latent caches."""

    target = ModelTarget(DeepseekAdapter, {"v2": V2, "v3": V3}, oracle, device=cuda_device(), attention=triton_latent)


class TestSparse(ModelSuite):
    target = ModelTarget(DeepseekAdapter, {"v3.2": V32}, oracle, device=cuda_device())


class TestSparseTriton(ModelSuite):
    target = ModelTarget(DeepseekAdapter, {"v3.2": V32}, oracle, device=cuda_device(), attention=triton_latent)


class TestCompressed(ModelSuite):
    target = ModelTarget(V4Adapter, {"v4": V4}, oracle, device=cuda_device())


class TestCompressedTriton(ModelSuite):
    target = ModelTarget(V4Adapter, {"v4": V4}, oracle, device=cuda_device(), attention=triton_latent)


class TestWindowed(ModelSuite):
    target = ModelTarget(WindowedAdapter, {"windowed": WINDOWED}, oracle, device=cuda_device())


# ------------------------------------------------------------ in the engine

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
            added.append(str(site))
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)


def greedy(folder: Path, **options: Any) -> tuple[list[list[int]], str]:
    """16 tokens of every prompt, the same from cached prefixes, and the attention backend that was chosen."""
    engine = LLM(str(folder), dtype="float32", max_model_len=400, max_num_seqs=8, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    asks: list[Any] = [{"prompt_token_ids": p} for p in PROMPTS]
    first, second = (engine.generate(asks, params) for _ in range(2))  # the second time from cached prefixes
    tokens = [list(o.outputs[0].token_ids) for o in first]
    assert tokens == [list(o.outputs[0].token_ids) for o in second]
    return tokens, engine.engine.explain["decisions"]["attention"]["chosen"]


# What serves a version where nothing is named, and whether its decode steps are captured.
CHOSEN = {"v2": "triton_latent", "v3": "triton_latent", "v3.2": "triton_latent", "v4": "triton_latent", "windowed": "triton"}


@pytest.mark.parametrize("version", MODELS)
def test_graphs_chunks_and_kernels_give_the_tokens_of_the_cpu(tmp_path: Path, version: str) -> None:
    adapter, config = MODELS[version]
    save_file(tensors_of(adapter(None, None), config, 0.3), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_text_files(tmp_path)
    right, _ = greedy(tmp_path, device="cpu", num_threads=4)
    gpu = {"device": "cuda", "num_gpu_blocks_override": 400}
    assert greedy(tmp_path, **gpu) == (right, CHOSEN[version])
    assert greedy(tmp_path, **gpu, enforce_eager=True, max_num_batched_tokens=32)[0] == right
    if CHOSEN[version] != "torch":
        assert greedy(tmp_path, **gpu, attention_backend="torch") == (right, "torch")
