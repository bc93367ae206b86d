"""gpt-oss's MXFP4 experts: the values are those that transformers unpacks, and the model is the one with these values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from octavo.builtin import accepts_mxfp4
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, QuantizerParts
from octavo.model.adapters import DecoderAdapter
from octavo.model.mxfp4 import Mxfp4Quantizer, dequantise
from octavo.model.source import resolve_source
from octavo.testing.model import BareModel, DictWeights, checkpoint, right_logits, transformers_model
from safetensors.torch import save_file
from torch import Tensor

from tests.model.test_families import OSS, TOLERANCE, config, tokens

E2M1 = {0b000: 0.0, 0b001: 0.5, 0b010: 1.0, 0b011: 1.5, 0b100: 2.0, 0b101: 3.0, 0b110: 4.0, 0b111: 6.0}


def packed(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a matrix [..., width]; scales near 1."""
    random = torch.Generator().manual_seed(seed)
    *front, width = shape
    blocks = torch.randint(0, 256, (*front, width // 32, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, (*front, width // 32), generator=random, dtype=torch.uint8)


def test_a_byte_is_two_values_and_a_scale_a_power_of_two() -> None:
    """By the definition, value by value."""
    blocks, scales = packed((3, 64), 0)
    found = dequantise(blocks, scales, torch.float32)
    assert found.shape == (3, 64)
    for row in range(3):
        for column in range(64):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            bits = byte >> 4 if column % 2 else byte & 15
            value = (-1.0 if bits & 8 else 1.0) * E2M1[bits & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(found[row, column]) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed((2, 12, 96), 1)
    right = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantise(blocks, scales, dtype), right)


def test_scales_at_the_ends_of_their_range_stay_exact() -> None:
    blocks = torch.full((2, 1, 16), 0x21, dtype=torch.uint8)
    found = dequantise(blocks, torch.tensor([[0], [250]], dtype=torch.uint8), torch.float32)
    assert found[0, :2].tolist() == [0.5 * 2.0**-127, 2.0**-127]
    assert found[1, :2].tolist() == [0.5 * 2.0**123, 2.0**123]


def test_a_packed_checkpoint_is_the_model_of_its_values() -> None:
    made = config("gpt_oss", **OSS | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8}, max_position_embeddings=131072)
    oracle = transformers_model(made)
    tensors = checkpoint(oracle, made)
    with torch.no_grad():
        for i, layer in enumerate(oracle.model.layers):
            for name, rows, width in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
                full = f"model.layers.{i}.mlp.experts.{name}"
                del tensors[full]
                blocks, scales = packed((6, rows, width), 10 * i + len(name))
                tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
                getattr(layer.mlp.experts, name).copy_(dequantise(blocks, scales, torch.float32).transpose(1, 2))
    prompt = tokens(40)
    bare = BareModel(DecoderAdapter(None, None), made, tensors, quantizer=Mxfp4Quantizer)
    error = float((bare.feed(0, prompt, [30, 1, 9]) - right_logits(oracle, prompt)).abs().max())
    assert error <= TOLERANCE, f"off by {error:.1e}"


def test_a_width_that_does_not_fill_blocks_is_refused() -> None:
    quantizer = Mxfp4Quantizer(
        None,
        QuantizerParts(Device(), "float32", {}, DictWeights(), lambda name: (lambda *a: a[0]) if name == "experts" else None),
    )
    with pytest.raises(LoadError, match=r"blocks of 32.*48"):
        quantizer.experts("e", ExpertsSpec(2, 48, 32, 1, stacked=True))
    with pytest.raises(LoadError, match="stacked"):
        quantizer.experts("e", ExpertsSpec(2, 64, 32, 1))


def test_the_plan_knows_what_is_loaded_is_larger_than_the_file(tmp_path: Path) -> None:
    """16 bytes of a block become 32 values; scales become none."""
    answer = accepts_mxfp4(Needs("quantizer", Device(), "bfloat16", {"method": "mxfp4"}), None)
    assert isinstance(answer, Accept)
    assert isinstance(accepts_mxfp4(Needs("quantizer", Device(), "bfloat16", {"method": "fp8"}), None), Reject)
    blocks, scales = packed((2, 4, 64), 0)
    save_file({"a_blocks": blocks, "a_scales": scales, "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    source = resolve_source(str(tmp_path))
    assert source.weight_bytes("bfloat16", answer.preferences["stored_values"]) == 2 * (2 * 4 * 64 + 3)
    assert source.weight_bytes("bfloat16") == blocks.nbytes + scales.nbytes + 2 * 3
