"""DeepSeek with grouped heads, a window and a stretched RoPE: the mask is by true positions, the angles by stretched ones.

Oracle: transformers' Mistral, which has the same layers and window, with the same dynamic RoPE. transformers stretches by
the length so far and Octavo by the length that a request may reach, rounded up to original * 2^i, so the two are compared
where both say the same: a whole prompt of exactly such a length.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.model.families import read_decoder
from octavo.testing.model import BareModel, checkpoint, right_logits, transformers_model

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"))

from octavo_models_deepseek.windowed import WindowedAdapter, accepts, as_decoder

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 16, "sliding_window": 7, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "dynamic", "factor": 32.0},
}  # fmt: skip
OURS = SHAPE | {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek"}
THEIRS = SHAPE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 4}
TOKENS = [(7 * i + i // 5) % 64 for i in range(64)]


@pytest.mark.parametrize("length", [16, 32, 64])
def test_past_the_original_context_and_the_window_logits_are_transformers(length: int) -> None:
    right = transformers_model(THEIRS)
    model = BareModel(WindowedAdapter(None, None), OURS, checkpoint(right, THEIRS))
    expected = right_logits(right, TOKENS[:length])
    found = model.feed(0, TOKENS[:length], [length], bounds={0: length})
    chunks = model.feed(1, TOKENS[:length], [5, 1, 1, length - 7], bounds={1: length})
    for logits in (found, chunks):
        assert float((logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_a_key_outside_the_window_changes_nothing_however_far_the_rope_is_stretched() -> None:
    tensors = checkpoint(transformers_model(THEIRS | {"num_hidden_layers": 1}), THEIRS)
    model = BareModel(WindowedAdapter(None, None), OURS | {"num_hidden_layers": 1}, tensors)
    last = [model.feed(row, [first, *TOKENS[1:40]], [40], bounds={row: 512})[-1] for row, first in ((0, 3), (1, 50))]
    assert torch.equal(*last), "token 0 is 39 before the last one, whose window is 7"
    near = model.feed(2, [*TOKENS[:35], 11, *TOKENS[36:40]], [40], bounds={2: 512})[-1]
    assert not torch.equal(near, last[0]), "token 35 is inside the window"


@pytest.mark.parametrize("position", [1 << 17, (1 << 20) - 64])
def test_positions_far_past_any_table_have_finite_and_exact_angles(position: int) -> None:
    """float32 positions and frequencies, no table over positions to run out of: against float64, to the product's rounding."""
    from octavo.model.rotary import Rotary, inverse_frequencies

    rope = read_decoder(as_decoder(OURS | {"max_position_embeddings": 4096, "head_dim": 128})).layers[0].rope
    table = Rotary(rope, max_len=1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    positions = position + torch.arange(64)
    cos, sin = table.angles(positions, torch.full_like(positions, 1 << 20))
    turns = positions.double().unsqueeze(1) * inverse_frequencies(rope, rope.length(1 << 20)).double()
    assert float((cos[:, 0, :64].double() - turns.cos()).abs().max()) < position * 2**-23
    assert float((sin[:, 0, 64:].double() - turns.sin()).abs().max()) < position * 2**-23
    assert float((cos[1:, 0] - cos[:-1, 0]).abs().amax(1).min()) > 0.1, "neighbours have different angles"


def test_what_the_config_leaves_out_is_the_articles() -> None:
    bare = {
        k: v
        for k, v in OURS.items()
        if k not in ("sliding_window", "num_key_value_heads", "max_position_embeddings", "rope_theta", "rope_scaling")
    }
    decoder = read_decoder(as_decoder(bare))
    rope = decoder.layers[0].rope
    assert (decoder.num_kv_heads, decoder.max_position, {layer.window for layer in decoder.layers}) == (8, 131072, {4096})
    assert (rope.type, rope.theta, rope.factor, rope.original) == ("dynamic", 1e6, 32.0, 4096)
    assert {spec.window for spec in WindowedAdapter(None, None).facts(bare, "bfloat16", "auto").kv_specs} == {4096}


def test_its_provider_tells_it_from_the_mixture_of_experts_of_the_same_name() -> None:
    def answer(config: dict[str, Any]) -> Accept | Reject:
        return accepts(Needs("model", Device(), "float32", {"architecture": config["architectures"][0], "config": config}), None)

    assert answer(OURS).reason == "8 KV heads and a window of 7 tokens, in a context of 512"
    assert "n_routed_experts 64" in answer(OURS | {"n_routed_experts": 64}).reason
    assert isinstance(answer(THEIRS), Reject)
    with pytest.raises(LoadError, match="n_routed_experts"):
        as_decoder(OURS | {"n_routed_experts": 64})
