"""A JSON file of a checkpoint with anything in any of its keys is read or refused by name: no other exception comes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import LoadError
from octavo.model.source import resolve_source
from octavo.text.tokenizer import Tokenizer

from tests.model.test_models_page import EXAMPLES, OF_PLUGINS, adapter
from tests.tiny import tiny_llama

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


TEXT_FILES = {
    "tokenizer_config.json": ["bos_token", "eos_token", "pad_token", "add_bos_token", "chat_template", "added_tokens_decoder"],
    "generation_config.json": ["eos_token_id", "bos_token_id", "pad_token_id", "temperature"],
    "tokenizer.json": ["added_tokens", "model", "post_processor", "pre_tokenizer", "decoder", "normalizer", "truncation"],
    "config.json": ["architectures", "quantization_config", "text_config", "eos_token_id", "dtype", "torch_dtype"],
}


@pytest.mark.parametrize("file", TEXT_FILES)
def test_any_value_in_the_files_about_text_is_read_or_refused(file: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / file
    whole = json.loads(path.read_text()) if path.exists() else {}
    refused = 0
    for key in TEXT_FILES[file]:
        for value in [*ODD[:-2], {"content": 3}, [{"name": "a"}]]:
            path.write_text(json.dumps({**whole, key: value}))
            try:
                source = resolve_source(str(tmp_path))
                source.eos_token_ids()
                Tokenizer.from_source(source, EngineConfig(model=str(tmp_path))).prepare()
            except LoadError as error:
                refused += 1
                assert str(tmp_path) in str(error), f"{key} {value!r}: the file is not named: {error}"
            except Exception as error:
                pytest.fail(f"{key} {value!r}: {type(error).__name__}: {error}")
    assert refused > 5
