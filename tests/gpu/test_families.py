"""Families on a GPU: the engine with its kernels and graphs gives the tokens of transformers on the CPU, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from octavo.testing.model import checkpoint, transformers_model  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tests.engine.harness import make_engine, request, run  # noqa: E402
from tests.engine.test_families_engine import COUNT, FAMILIES, PROMPT, SIZES, greedy  # noqa: E402
from tests.tiny import write_text_files  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    config: dict[str, Any] = SIZES | FAMILIES[family] | {"head_dim": 64, "hidden_size": 256}
    right = transformers_model(config, spread=0.15)
    tied = bool(right.config.tie_word_embeddings)
    tensors = checkpoint(right, config | {"tie_word_embeddings": tied})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_text_files(tmp_path)
    prompts = [PROMPT, PROMPT[:5], PROMPT[:41], PROMPT[:1]]
    for options in ({}, {"max_num_batched_tokens": 19}):
        engine = make_engine(tmp_path, device="cuda", num_threads=None, max_num_seqs=8, num_gpu_blocks_override=256, **options)
        asks = [request(engine, str(i), prompt, eos=(), max_tokens=COUNT) for i, prompt in enumerate(prompts)]
        found = run(engine, asks)
        chosen = {kind: one.get("chosen") for kind, one in engine.explain["decisions"].items()}
        assert [found[str(i), 0].tokens for i in range(len(prompts))] == [greedy(right, p) for p in prompts], (family, chosen)
