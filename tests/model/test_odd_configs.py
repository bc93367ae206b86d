"""A config.json with anything in any of its keys is read or refused by name: no other exception leaves an adapter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from octavo.errors import LoadError

from tests.model.test_models_page import EXAMPLES, OF_PLUGINS, adapter

ODD: list[Any] = [None, "", "x", -1, 0, 1, 3, 1.5, True, [], {}, [1], ["x"], {"a": 1}, math.inf, math.nan]
KEYS = [
    "attention_bias", "compress_rates", "compress_ratios", "dtype", "eos_token_id", "expert_dtype", "head_dim", "hidden_act",
    "layer_types", "max_position_embeddings", "mlp_layer_types", "n_group", "num_hash_layers", "num_key_value_heads",
    "partial_rotary_factor", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "swiglu_limit", "tie_word_embeddings", "torch_dtype", "vocab_size",
]  # fmt: skip
"""Beside those of an example; `architectures` is looked at before an adapter is asked."""


@pytest.mark.parametrize("architecture", [*EXAMPLES, *OF_PLUGINS])
def test_any_value_of_any_key_is_read_or_refused(architecture: str) -> None:
    config = {**(EXAMPLES | OF_PLUGINS)[architecture][1], "architectures": [architecture]}
    reader = adapter(architecture)
    read = refused = 0
    for key in sorted({*config, *KEYS} - {"architectures"}):
        for value in ODD:
            try:
                reader.facts({**config, key: value}, "bfloat16", "auto")
                read += 1
            except LoadError as error:
                refused += 1
                assert str(error)
            except Exception as error:
                pytest.fail(f"{key} {value!r}: {type(error).__name__}: {error}")
    assert read > 50 and refused > 50
