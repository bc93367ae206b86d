"""Tiny tokenizers, one of each kind of decoder, built in memory. All know ChatML's markers and <s>, </s>."""

from __future__ import annotations

import functools

from octavo.model.tokenizer_files import TokenizerFiles
from octavo.text.tokenizer import Tokenizer as OctavoTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "User: hello\nAssistant: hello there, naïve café — 日本語 and 🎉🎉 emoji.\n\n\n",
    "system user assistant im_start im_end <|im_start|> you are you were [INST] [/INST] def f(x):\n    return x\n",
] * 4
MARKERS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def files(
    backend: Tokenizer, *, markers: tuple[str, ...] = MARKERS, template: str | None = None, add_bos: bool = False
) -> TokenizerFiles:
    ids = {name: backend.token_to_id(name) for name in markers}
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return TokenizerFiles(
        tokenizer=backend,
        bos_id=ids.get("<s>"),
        eos_id=ids.get("</s>"),
        pad_id=None,
        bos_text="<s>" if "<s>" in ids else "",
        eos_text="</s>" if "</s>" in ids else "",
        pad_text="",
        eos_ids=tuple(i for name, i in ids.items() if name in ("</s>", "<|im_end|>")),
        add_bos=add_bos,
        special_ids=special,
        chat_templates={} if template is None else {"default": template},
    )


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte has a token, so most characters outside ASCII are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(m, special=True, normalized=False) for m in MARKERS],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: spaces are ▁, unknown characters are byte tokens, the first space is stripped."""
    words = ["▁the", "▁Paris", "▁is", "▁a", "▁", "hello", "▁hello"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>|_/[].,:!?\n#"))
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], *letters]
    merges: list[tuple[str, str]] = []
    vocab = {piece: i for i, piece in enumerate(pieces)}
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return backend


@functools.cache
def unigram() -> Tokenizer:
    """A vocabulary that spells a marker out by itself, whatever the added tokens say."""
    letters = [(c, -5.0) for c in "▁abcdefghijklmnopqrstuvwxyz<>|_/"]
    backend = Tokenizer(models.Unigram([("<unk>", -20.0), ("<|im_end|>", -1.0), *letters], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return backend


@functools.cache
def word_piece() -> Tokenizer:
    """A decoder whose text is no sum of its tokens'."""
    words = ["[UNK]", "the", "capital", "of", "is", "Paris", ",", "##s", "##ing", "walk", "don", "'", "t"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return backend


ALL = {"byte_level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram, "word_piece": word_piece}


def octavo(backend: Tokenizer, *, template: str | None = None, add_bos: bool = False) -> OctavoTokenizer:
    return OctavoTokenizer(files(backend, template=template, add_bos=add_bos))
