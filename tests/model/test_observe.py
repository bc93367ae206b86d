"""The observed model: transformers' hidden states, and an observer that sees what enters each Linear and each cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.catalog import Needs
from octavo.engine.device import choose_device
from octavo.errors import QuantizeError
from octavo.interfaces import AttentionLayer, QuantizeTask
from octavo.model.observe import ObservedModel, calibration_windows, linear_modules
from octavo.model.source import resolve_source
from octavo.plugins import discover
from torch import Tensor

from tests.tiny import tiny_llama

IDS = [1, 20, 300, 41, 260, 7, 99, 411, 23, 8, 150, 377]


class Seen:
    def __init__(self) -> None:
        self.inputs: dict[tuple[str, ...], Tensor] = {}
        self.caches: dict[str, tuple[Tensor, Tensor]] = {}

    def linear(self, names: tuple[str, ...], x: Tensor) -> None:
        self.inputs[names] = x.clone()

    def attention(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        self.caches[layer.module] = k.clone(), v.clone()


def task(model: Path, text: str | None = None) -> QuantizeTask:
    source, device = resolve_source(str(model)), choose_device("cpu").device
    needs = Needs("model", device, "float32", {"architecture": source.architecture, "config": source.config})
    adapter = discover().resolve("model", needs).create(None)
    return QuantizeTask(source, adapter, device, "float32", text, None, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [{}, {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4, "attention_bias": ..., "mlp_bias": ...}],
    ids=["llama", "window"],
)  # fmt: skip
def test_a_text_s_hidden_states_are_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = tiny_llama(tmp_path / "m", std=0.1, **more)
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen = Seen()
    found = ObservedModel(task(folder), seen, max_len=32).run(IDS)
    theirs.requires_grad_(False)
    want = theirs(torch.tensor([IDS]), output_hidden_states=True)
    torch.testing.assert_close(found, want.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    first = seen.inputs["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"]
    torch.testing.assert_close(first, theirs.layers[0].input_layernorm(want.hidden_states[0])[0], rtol=1e-4, atol=1e-4)
    values = seen.caches["model.layers.0.self_attn"][1].reshape(len(IDS), -1)
    torch.testing.assert_close(values, theirs.layers[0].self_attn.v_proj(first), rtol=1e-4, atol=1e-4)


def test_the_linears_of_a_model_are_known_without_reading_its_weights(tiny1: Path) -> None:
    names = linear_modules(task(tiny1))
    layer = "model.layers.0"
    attention = [f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "o")]
    assert names == (*attention, *(f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")))


def test_a_text_becomes_windows_that_each_start_with_bos(tiny1: Path) -> None:
    windows = calibration_windows(task(tiny1, "hello world " * 30), 16)
    assert all(w[0] == 1 and len(w) == 16 for w in windows[:-1]) and 1 < len(windows[-1]) <= 16
    assert calibration_windows(task(tiny1, "hello world " * 30), 16, 2) == windows[:2]
    with pytest.raises(QuantizeError, match="--calibrate"):
        calibration_windows(task(tiny1), 16)


def test_the_matrices_of_experts_are_named_one_by_one_unless_they_are_stacked(tmp_path: Path) -> None:
    common = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 512,
              "num_experts_per_tok": 2, "intermediate_size": 32}  # fmt: skip
    mixtral = common | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
    stacked = common | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 2, "head_dim": 16}
    for name, config in (("each", mixtral), ("stacked", stacked)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    names = linear_modules(task(tmp_path / "each"))
    assert names[4:] == tuple(f"model.layers.0.block_sparse_moe.experts.{e}.{w}" for e in (0, 1) for w in ("w1", "w3", "w2"))
    with pytest.raises(QuantizeError, match="keeps its 2 experts in one tensor"):
        linear_modules(task(tmp_path / "stacked"))
