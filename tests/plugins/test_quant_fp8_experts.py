"""FP8 experts of every dialect on a CPU: the model of a checkpoint is the one that its dequantised weights make.

Oracle: the same engine over the float32 checkpoint that the FP8 one stands for, which is transformers' model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Gate, QuantizerParts
from octavo.model.operators import experts
from octavo.testing.model import DictWeights, checkpoint, transformers_model
from safetensors.torch import load_file, save_file

from tests.plugins.fp8 import DIALECTS, write_fp8
from tests.plugins.test_quant_fp8 import WEIGHTS_ONLY, engine, logprobs
from tests.tiny import BOS, EOS, VOCAB, write_text_files

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

from octavo.catalog import Device
from octavo_quant_fp8.experts import Fp8Experts, experts_fp8
from octavo_quant_fp8.provider import Fp8Options
from octavo_quant_fp8.quantizer import Fp8Quantizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 192,
    "intermediate_size": 64, "moe_intermediate_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 256,
    "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts wider than one block in every direction, and no multiple of it."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    folder.mkdir()
    right = transformers_model(CONFIG, spread=0.08)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: t.contiguous() for name, t in checkpoint(right, CONFIG).items()}, folder / "model.safetensors")
    write_text_files(folder)
    return folder


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_checkpoint_means_its_dequantised_experts(dialect: str, model: Path, tmp_path: Path) -> None:
    stored = write_fp8(model, tmp_path / "fp8", dialect, plain=tmp_path / "plain")
    held = load_file(stored / "model.safetensors")
    assert held["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert held["model.layers.0.mlp.gate.weight"].dtype == torch.float32, "the router is never quantised"
    got, want = logprobs(engine(stored, plugins=WEIGHTS_ONLY)), logprobs(engine(tmp_path / "plain"))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=2e-4)


def test_plain_experts_are_quantised_while_they_load(model: Path) -> None:
    got, want = torch.tensor(logprobs(engine(model, quantization="fp8"))), torch.tensor(logprobs(engine(model)))
    near = float((got - want)[:11].abs().mean())
    assert 1e-4 < near < 0.25, near


def quantizer(weights: DictWeights, **config: Any) -> Fp8Quantizer:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], **config}
    offered = {"experts_fp8": experts_fp8, "experts": experts}
    return Fp8Quantizer(Fp8Options(), QuantizerParts(Device(), "float32", settings, weights, offered.get))


def test_experts_that_the_checkpoint_left_alone_are_plain() -> None:
    spec = ExpertsSpec(2, 128, 128, 1)
    assert isinstance(quantizer(DictWeights()).experts("a.experts", spec), Fp8Experts)
    plain = quantizer(DictWeights(), modules_to_not_convert=["a.experts"]).experts("a.experts", spec)
    assert not isinstance(plain, Fp8Experts)
    with pytest.raises(LoadError, match="some experts"):
        quantizer(DictWeights(), modules_to_not_convert=["a.experts.1"]).experts("a.experts", spec)


def test_stacked_experts_are_refused_by_name() -> None:
    with pytest.raises(LoadError, match="stacked"):
        quantizer(DictWeights()).experts("a.experts", ExpertsSpec(2, 128, 128, 1, stacked=True))


def test_a_scale_that_is_not_positive_is_an_error_that_names_it() -> None:
    weights = DictWeights()
    quantizer(weights).experts("e", ExpertsSpec(1, 128, 128, 1))
    _, fill, _ = weights.declared["e.0.up_proj.weight_scale_inv"]
    with pytest.raises(LoadError, match=r"e\.0\.up_proj\.weight_scale_inv has the value"):
        fill(torch.zeros(1, 1))


def test_the_operator_equals_its_definition_in_float64() -> None:
    """Both kinds of scales, a token that takes one expert twice, and a clamped gate."""
    torch.manual_seed(0)
    e4m3, hidden, inner, count = torch.float8_e4m3fn, 136, 130, 3
    x, shares, base = torch.randn(5, hidden), torch.rand(5, 2), torch.randn(5, hidden)
    ids = torch.randint(0, count, (5, 2)).int()
    ids[0] = 1
    gate_up, down = torch.randn(count, 2 * inner, hidden).to(e4m3), torch.randn(count, hidden, inner).to(e4m3)
    blocks = torch.rand(count, 2, 2, 2) / 8, torch.rand(count, 2, 2) / 8
    rows = torch.rand(count, 2 * inner) / 8, torch.rand(count, hidden) / 8
    for scales in (blocks, rows):
        right = base.double()
        for t in range(5):
            for j, e in enumerate(ids[t].tolist()):
                if scales is rows:
                    both, one = (
                        gate_up[e].double() * rows[0][e].double()[:, None],
                        down[e].double() * rows[1][e].double()[:, None],
                    )
                else:
                    i, h, n = torch.arange(inner) // 128, torch.arange(hidden) // 128, torch.arange(inner)
                    halves = [gate_up[e].double()[half * inner + n] * blocks[0][e, half].double()[i][:, h] for half in (0, 1)]
                    both, one = torch.cat(halves), down[e].double() * blocks[1][e].double()[h][:, i]
                gate, up = (both @ x[t].double()).chunk(2)
                gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
                right[t] += shares[t, j].double() * (one @ (gate * gate.sigmoid() * up))
        found = experts_fp8(x, shares, ids, gate_up, down, Gate(limit=2.0), scales=scales, base=base)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
