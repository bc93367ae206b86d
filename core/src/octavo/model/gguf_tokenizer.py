"""The tokenizer that a GGUF file carries, as a `tokenizers.Tokenizer`.

Owns the two vocabulary kinds in use: byte-level BPE with merges ("gpt2") and SentencePiece BPE with
scores ("llama"). Needs neither torch nor transformers. How text is split before BPE is named by
tokenizer.ggml.pre; a name that is not in the table is an error, because a wrong split produces
plausible tokens and a worse model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import LoadError
from octavo.model.gguf_file import GGUFFile

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)

# The published pre-tokenizer patterns of these model families (each model's own tokenizer.json).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How one `tokenizer.ggml.pre` splits text. pattern None is GPT-2's own."""

    pattern: str | None = None
    digits: bool = False  # every digit alone, before anything else
    nfc: bool = False
    whole_words: bool = False  # a piece that is in the vocabulary is taken as it is, whatever the merges say
    add_bos: bool = False


_PRE = {
    "gpt-2": _Split(),
    "gpt2": _Split(),
    "smollm": _Split(digits=True),
    "starcoder": _Split(digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True, add_bos=True),
    "llama3": _Split(_LLAMA3, whole_words=True, add_bos=True),
    "llama-v3": _Split(_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2, nfc=True),
    "tekken": _Split(_TEKKEN, whole_words=True, add_bos=True),
}


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The converted tokenizer and what the metadata says about it. special holds the ids of control
    and unknown tokens; eos the end-of-sequence, end-of-turn and end-of-message ids, without repetition."""

    tokenizer: Tokenizer
    texts: list[str]
    special: frozenset[int]
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    add_bos: bool


def gguf_vocabulary(file: GGUFFile) -> GGUFVocabulary:
    """Convert. LoadError, naming the key, for vocabularies of another kind or damaged ones."""
    kind = file.require("tokenizer.ggml.model", str)
    texts: list[str] = file.require("tokenizer.ggml.tokens", list)
    types: list[int] = file.get("tokenizer.ggml.token_type", [_NORMAL] * len(texts), list)
    if len(types) != len(texts):
        raise LoadError(f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(texts)} tokens")
    if len(set(texts)) != len(texts):
        seen: set[str] = set()
        twice = next(t for t in texts if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise LoadError(f"{file.path}: tokenizer.ggml.tokens holds {twice!r} twice")
    if kind == "gpt2":
        tokenizer, default_bos = _byte_level(file, texts)
    elif kind == "llama":
        tokenizer, default_bos = _sentencepiece(file, texts, types), True
    else:
        raise LoadError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported. "
            "Give the model's own tokenizer with --tokenizer."
        )
    special = frozenset(i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN))
    _add_tokens(tokenizer, texts, types)

    ids = {name: _token_id(file, name, len(texts)) for name in ("bos", "eos", "eot", "eom", "padding")}
    eos = tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None))
    add_bos = file.get("tokenizer.ggml.add_bos_token", default_bos, bool) and ids["bos"] is not None
    if add_bos:
        bos = texts[ids["bos"] or 0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, ids["bos"] or 0)]
        )
    return GGUFVocabulary(tokenizer, texts, special, ids["bos"], eos, ids["padding"], add_bos)


def _token_id(file: GGUFFile, name: str, vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value: int | None = file.get(key, None, int)
    if value is not None and not 0 <= value < vocab:
        if value == 0xFFFFFFFF:  # how some writers spell "none"
            return None
        raise LoadError(f"{file.path}: {key} is {value}, outside the vocabulary of {vocab} tokens")
    return value


def _byte_level(file: GGUFFile, texts: list[str]) -> tuple[Tokenizer, bool]:
    pre = file.get("tokenizer.ggml.pre", None, str)
    if pre is None:
        log.warning("%s: no tokenizer.ggml.pre in the metadata (an old conversion): splitting text as GPT-2 does", file.path)
        pre = "gpt-2"
    if pre not in _PRE:
        raise LoadError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(_PRE))}. "
            "Give the model's own tokenizer with --tokenizer."
        )
    split = _PRE[pre]
    merges = []
    for number, line in enumerate(file.require("tokenizer.ggml.merges", list)):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise LoadError(f"{file.path}: tokenizer.ggml.merges[{number}] is {line!r}, not two pieces with a space between")
        merges.append((left, right))
    vocab = {text: i for i, text in enumerate(texts)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    except Exception as error:  # the Rust side raises a bare Exception for a merge whose pieces are not tokens
        raise LoadError(f"{file.path}: tokenizer.ggml.tokens and merges do not fit together: {error}") from error
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(file: GGUFFile, texts: list[str], types: list[int]) -> Tokenizer:
    scores: list[float] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(texts):
        raise LoadError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(texts)} tokens")
    vocab = {text: i for i, text in enumerate(texts)}
    # SentencePiece BPE joins, at every moment, the two neighbours whose union scores best. As a list
    # of merges: every way to make a piece out of two others, best piece first.
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, kind, score in zip(texts, types, scores, strict=True):
        if kind not in (_NORMAL, _USER, _UNUSED):
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    unknown = next((t for t, k in zip(texts, types, strict=True) if k == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[(r[3], r[4]) for r in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", True, bool)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, texts: list[str], types: list[int]) -> None:
    """Mark control and user-defined tokens as indivisible. They keep the ids that they have."""
    control = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(texts, types, strict=True) if k in (_CONTROL, _UNKNOWN)
    ]
    user = [AddedToken(t, special=False, normalized=False) for t, k in zip(texts, types, strict=True) if k == _USER]
    tokenizer.add_special_tokens(control)
    if user:
        tokenizer.add_tokens(user)
