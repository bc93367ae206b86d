"""TINY of the test-suite: complete, very small Hugging Face folders, written in a few milliseconds.

Weights are random with a fixed seed and a large spread (standard deviation 0.3), so that the best
token wins by a wide margin and greedy output does not depend on the order of a sum. The tokenizer
is a real byte-level BPE of 512 entries; every byte is reachable, so a random model emits invalid
UTF-8 all the time, which the text tests want. Nothing here imports transformers.

    ids 0..7      special tokens: see SPECIAL
    ids 8..263    the 256 bytes
    ids 264..511  merges (a few English words, then pairs of digits)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|spare_5|>", "<|spare_6|>", "<|spare_7|>")
PAD, BOS, EOS, IM_START, IM_END = range(5)
VOCAB = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WORDS = [
    "the",
    "and",
    "that",
    "with",
    "for",
    "you",
    "was",
    "are",
    "not",
    "this",
    "have",
    "from",
    "one",
    "all",
    "out",
    "Paris",
    "France",
    "hello",
    "world",
    "model",
    "token",
    "page",
    "cache",
]


def tiny_tokenizer(*, add_bos: bool = True) -> Tokenizer:
    """The tokenizer of every tiny model: byte-level BPE, 512 entries, ids as in the module docstring."""
    vocab = {text: i for i, text in enumerate(SPECIAL)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> str:
        if left + right not in vocab and len(vocab) < VOCAB:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
        return left + right

    for word in WORDS:
        left = "Ġ"  # how byte-level BPE spells a leading space
        for char in word:
            left = merge(left, char)
    for ten in "0123456789":
        for one in "0123456789":
            merge(ten, one)
    for a in "etaoinshrdlu":
        for b in "etaoinshrdlu":
            merge(a, b)
    assert len(vocab) == VOCAB

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
        )
    return tokenizer


def tiny_config(*, layers: int = 2, tie: bool = False, eos: int | list[int] = EOS, **over: Any) -> dict[str, Any]:
    """config.json of TINY; keyword arguments replace or add keys (a value of `...` removes the key)."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "bos_token_id": BOS,
        "eos_token_id": eos,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    config.update(over)
    return {key: value for key, value in config.items() if value is not ...}


def tiny_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of a Llama, Mistral, Qwen2 or Qwen3 config, by name, in file order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    kind = config["model_type"]
    qkv_bias = config.get("attention_bias", False) or kind == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            shapes[f"{p}self_attn.{name}.weight"] = (rows, hidden)
            if qkv_bias:
                shapes[f"{p}self_attn.{name}.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (hidden, heads * dim)
        if config.get("attention_bias", False):
            shapes[p + "self_attn.o_proj.bias"] = (hidden,)
        if kind == "qwen3":
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (dim,)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{p}mlp.{name}.weight"] = (inner, hidden)
        shapes[p + "mlp.down_proj.weight"] = (hidden, inner)
        if config.get("mlp_bias", False):
            shapes[p + "mlp.gate_proj.bias"] = shapes[p + "mlp.up_proj.bias"] = (inner,)
            shapes[p + "mlp.down_proj.bias"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tiny_weights(
    config: dict[str, Any], *, seed: int = 0, std: float = 0.3, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights: norms near 1, everything else normal with deviation `std`."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tiny_shapes(config).items():
        noise = torch.randn(shape, generator=random)
        weights[name] = (1 + 0.1 * noise if "norm" in name else std * noise).to(dtype)
    return weights


def write_text_files(
    folder: Path,
    *,
    add_bos: bool = True,
    tokenizer_eos: str = "<|eos|>",
    generation: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """Everything of a model folder but config and weights."""
    tiny_tokenizer(add_bos=add_bos).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": tokenizer_eos,
        "pad_token": "<|pad|>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def tiny_llama(
    folder: str | Path,
    *,
    layers: int = 2,
    seed: int = 0,
    tie: bool = False,
    eos: int | list[int] = EOS,
    generation_eos: int | list[int] | None = None,
    tokenizer_eos: str = "<|eos|>",
    add_bos: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a complete model folder and return its path.

    Keyword arguments that are not named here go into config.json, so that
    `tiny_llama(d, model_type="qwen3", architectures=["Qwen3ForCausalLM"])` is a tiny Qwen3.
    generation_eos and tokenizer_eos (a text of SPECIAL) are the other two sources of the stop set.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    full = tiny_config(layers=layers, tie=tie, eos=eos, **config)
    if dtype != torch.float32:
        full.setdefault("dtype", str(dtype).removeprefix("torch."))
        full.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(full, indent=1))
    save_file(tiny_weights(full, seed=seed, std=std, dtype=dtype), folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": BOS, "eos_token_id": eos if generation_eos is None else generation_eos, "pad_token_id": PAD}
    write_text_files(folder, add_bos=add_bos, tokenizer_eos=tokenizer_eos, generation=generation, chat_template=chat_template)
    return folder
