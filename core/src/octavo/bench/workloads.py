"""Workloads and model shapes that engines are compared on.

Owns what is asked (prompt token ids and output lengths, the same numbers on every machine and in
every run) and the public shapes that random weights fill. Measures nothing and loads no torch.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.options import closest
from octavo.errors import ConfigError

FIRST_TOKEN = 10
"""Ids below this are left out: many vocabularies keep special tokens there."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt token ids, and how many tokens to generate (end-of-sequence ignored)."""

    prompt: list[int]
    output: int


class Draw:
    """The random numbers of one workload: a fixed seed, ids uniform in [10, vocab)."""

    def __init__(self, vocab: int) -> None:
        self._random, self._vocab = random.Random(0), vocab

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self._vocab) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


@dataclass(frozen=True, slots=True)
class Workload:
    """vocab bounds the token ids; a model with a smaller vocabulary lowers it (and is then another workload)."""

    name: str
    summary: str
    vocab: int
    draw: Callable[[Draw], list[Ask]]

    def asks(self, vocab_size: int | None = None) -> list[Ask]:
        """The requests, for a model of `vocab_size` tokens."""
        return self.draw(Draw(self.bound(vocab_size)))

    def bound(self, vocab_size: int | None) -> int:
        return self.vocab if vocab_size is None else min(self.vocab, vocab_size)


def _mixed(draw: Draw) -> list[Ask]:
    return [Ask(draw.ids(draw.between(100, 1024)), draw.between(100, 1024)) for _ in range(256)]


def _prefix(draw: Draw) -> list[Ask]:
    shared = draw.ids(2048)
    return [Ask(shared + draw.ids(128), 64) for _ in range(256)]


def _equal(count: int, prompt: int, output: int) -> Callable[[Draw], list[Ask]]:
    return lambda draw: [Ask(draw.ids(prompt), output) for _ in range(count)]


WIDE, SMALL = 100_000, 40_000

WORKLOADS: Mapping[str, Workload] = {
    w.name: w
    for w in (
        Workload("mixed256", "256 requests, 100 to 1024 tokens in, 100 to 1024 out", WIDE, _mixed),
        Workload("bs1", "one stream, 128 in, 256 out", WIDE, _equal(1, 128, 256)),
        Workload("prefill", "64 prompts of 4096, 1 out", WIDE, _equal(64, 4096, 1)),
        Workload("prefix", "256 requests over one shared prefix of 2048, 128 more in, 64 out", WIDE, _prefix),
        Workload("long", "8 prompts of 32768, 128 out", WIDE, _equal(8, 32768, 128)),
        Workload("decode256", "256 streams, 128 in, 512 out", WIDE, _equal(256, 128, 512)),
        Workload("cpu-bs1", "for a CPU: one stream, 64 in, 64 out", SMALL, _equal(1, 64, 64)),
        Workload("cpu-b16", "for a CPU: 16 streams, 128 in, 64 out", SMALL, _equal(16, 128, 64)),
        Workload("cpu-prefill", "for a CPU: 4 prompts of 1024, 1 out", SMALL, _equal(4, 1024, 1)),
    )
}


def workload(name: str) -> Workload:
    """Raises ConfigError for a name that is not there."""
    if name not in WORKLOADS:
        hint = closest(name, WORKLOADS) or f"; there are: {', '.join(WORKLOADS)}"
        raise ConfigError(f"--workload: no workload {name!r}{hint}")
    return WORKLOADS[name]


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
"""config.json of public models, by the name that `octavo bench offline NAME --load-format dummy` takes."""


def write_shape(name: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """A model folder that holds config.json alone; `--load-format dummy` fills the weights. With `tokenizer` also a
    made-up one of the shape's vocabulary, so that the folder can be served over HTTP: one token a byte of the prompt, and a short word for each other id.

    ConfigError if the folder holds anything else than this shape, OSError if it cannot be written."""
    config = folder / "config.json"
    text = json.dumps(SHAPES[name], indent=1)
    if folder.is_dir() and any(folder.iterdir()) and not (config.is_file() and config.read_text() == text):
        raise ConfigError(f"{folder}: holds something else than the shape {name}; nothing is overwritten, so name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(text)
    if tokenizer:
        _write_tokenizer(int(SHAPES[name]["vocab_size"]), folder)
    return folder


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(letters) for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    pieces = [*alphabet, *itertools.islice(words, vocab_size - len(alphabet))]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
