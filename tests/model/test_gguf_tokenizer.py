"""The tokenizer inside a GGUF file.

Oracles: transformers' conversion of the demo model, the tokenizer that a file was written from, and
SentencePiece itself for vocabularies with scores.
"""

from __future__ import annotations

import random
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from octavo.errors import LoadError
from octavo.model.tokenizer_files import load_tokenizer_files
from tokenizers import Tokenizer, pre_tokenizers

from tests.model.checkpoints import family_config, write_gguf
from tests.tiny import tiny_tokenizer

PIECES = [
    "a", "the", " the", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "é", "日本語", "🙂", "👩‍👩‍👧", "123", "9", " 7", "٣", "ⅷ", "x²",
    "don't", "'S", "'LL", "we're", "_", "--", "{}", "://", "नमस्ते", "\u00a0", "\u2028", "\u200d", "\ufeff", "İ", "ß", "e\u0301", "\0", "▁",
]  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_start|>user\n", "<|im_", "end|>"]


def texts(count: int, pieces: list[str], seed: int = 0) -> list[str]:
    """Random concatenations of awkward pieces, and the pieces themselves."""
    chance = random.Random(seed)
    return ["", *pieces, *("".join(chance.choices(pieces, k=chance.randint(2, 14))) for _ in range(count))]


# ---------------------------------------------------------------- byte-level BPE


@pytest.fixture(scope="module")
def reference(demo_path: Path) -> Tokenizer:
    """The demo's tokenizer as transformers converts it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_path.parent, gguf_file=demo_path.name).backend_tokenizer


@pytest.mark.slow
def test_the_demo_tokenizer_agrees_with_transformers_on_many_texts(demo_path: Path, reference: Tokenizer) -> None:
    ours = load_tokenizer_files(demo_path).tokenizer
    assert ours.get_vocab() == reference.get_vocab()
    # The model was trained with every digit split off first (tokenizer.ggml.pre = "smollm"); transformers'
    # conversion forgets that step. It is put back here, so that the rest is compared over all texts.
    plain = Tokenizer.from_str(reference.to_str())
    trained = Tokenizer.from_str(reference.to_str())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    differing = []
    for text in texts(3000, PIECES + SPECIAL):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == trained.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == reference.decode(ids)
        if ids != plain.encode(text, add_special_tokens=False).ids:
            differing.append(text)
    # Without that step, only white space before a digit can come out differently.
    assert differing and all(any(c.isnumeric() and b.isspace() for b, c in pairwise(t)) for t in differing)


def test_the_demo_splits_digits_one_by_one(demo_path: Path) -> None:
    ours = load_tokenizer_files(demo_path).tokenizer
    assert [ours.decode([i]) for i in ours.encode("in 1984  7").ids] == ["in", " ", "1", "9", "8", "4", "  ", "7"]


def test_what_the_demo_metadata_says_about_special_tokens(demo_path: Path) -> None:
    files = load_tokenizer_files(demo_path)
    assert (files.bos_text, files.eos_text, files.pad_text) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (files.bos_id, files.eos_id, files.pad_id, files.eos_ids) == (1, 2, 2, (2,))
    assert files.add_bos is False
    assert files.special_ids == frozenset(range(17))
    assert files.chat_template is not None and "<|im_start|>" in files.chat_template
    assert files.tokenizer.decode([1, 28120, 2]) == files.tokenizer.decode([28120])  # hidden unless asked for


def test_the_demo_tokenizer_is_quick_and_imports_neither_torch_nor_transformers(demo_path: Path) -> None:
    code = """
import sys, time
from octavo.model.source import resolve_source
from octavo.model.tokenizer_files import load_tokenizer_files
begun = time.process_time()
source = resolve_source("demo")
files = load_tokenizer_files(source)
assert source.eos_token_ids() == (2,) and len(files.tokenizer.encode("Hello")) == 1
assert time.process_time() - begun < 1.0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_byte_level_tokenizer_survives_the_trip_through_gguf(tmp_path: Path) -> None:
    original = tiny_tokenizer()
    files = load_tokenizer_files(write_gguf(tmp_path / "m.gguf", family_config("llama")))
    assert files.tokenizer.get_vocab() == original.get_vocab()
    for text in texts(300, [*PIECES, "<|bos|>", "<|im_start|>"]):
        assert files.tokenizer.encode(text).ids == original.encode(text).ids, text
    assert files.add_bos and files.tokenizer.encode("").ids == [1]
    assert files.special_ids == frozenset(range(8))


@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_follows_the_metadata(tmp_path: Path, add_bos: bool) -> None:
    files = load_tokenizer_files(
        write_gguf(tmp_path / "m.gguf", family_config("llama"), extra={"tokenizer.ggml.add_bos_token": add_bos})
    )
    assert files.add_bos is add_bos and files.tokenizer.encode("").ids == ([1] if add_bos else [])


def test_end_of_turn_and_end_of_message_end_a_sequence_too(tmp_path: Path) -> None:
    from octavo.model.source import resolve_source

    extra = {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 5}
    path = write_gguf(tmp_path / "m.gguf", family_config("llama"), extra=extra)
    assert load_tokenizer_files(path).eos_ids == (2, 4, 5)
    assert resolve_source(str(path)).eos_token_ids() == (2, 4, 5)


def test_user_defined_tokens_are_indivisible_but_visible(tmp_path: Path) -> None:
    types = [4 if i == 5 else 3 if i < 8 else 1 for i in range(512)]
    files = load_tokenizer_files(
        write_gguf(tmp_path / "m.gguf", family_config("llama"), extra={"tokenizer.ggml.token_type": types})
    )
    ids = files.tokenizer.encode("a<|spare_5|>b", add_special_tokens=False).ids
    assert 5 in ids and 5 not in files.special_ids
    assert files.tokenizer.decode(ids) == "a<|spare_5|>b"


def test_named_chat_templates_are_kept_apart(tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    files = load_tokenizer_files(write_gguf(tmp_path / "m.gguf", family_config("llama"), extra=extra))
    assert files.chat_templates == {"default": "plain", "tool_use": "tools"} and files.chat_template == "plain"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "in 1984  x", ["in", " 1984", " ", " x"]),
        ("smollm", "in 1984  x", ["in", " ", "1", "9", "8", "4", " ", " x"]),
        ("llama-bpe", "in 198456  x", ["in", " ", "198", "456", " ", " x"]),
        ("qwen2", "in 1984 I'LL", ["in", " ", "1", "9", "8", "4", " I", "'LL"]),
        ("tekken", "in 19 HTMLPage", ["in", " ", "1", "9", " HTMLPage"]),
    ],
)
def test_each_way_of_splitting_splits_as_its_models_do(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer_files(
        write_gguf(tmp_path / "m.gguf", family_config("llama"), extra={"tokenizer.ggml.pre": pre})
    ).tokenizer
    assert [p.replace("Ġ", " ") for p, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tokenizer.ggml.pre": "some-new-model"}, "some-new-model"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges[0]"),
        ({"tokenizer.ggml.merges": ["qq zz"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}, "'a' twice"),
        ({"tokenizer.ggml.eos_token_id": 512}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_a_vocabulary_that_cannot_be_honoured_is_refused_by_key(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_tokenizer_files(write_gguf(tmp_path / "m.gguf", family_config("llama"), extra=extra))
    assert named in str(caught.value) and "m.gguf" in str(caught.value)


# ---------------------------------------------------------------- SentencePiece


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A real SentencePiece BPE model with byte fallback, trained on a little text."""
    import sentencepiece

    words = (
        "the quick brown fox jumps over a lazy dog and says hello to every world model that it has ever met in Paris or in France"
    )
    chance = random.Random(0)
    lines = [" ".join(chance.choices(words.split(), k=12)) for _ in range(300)]
    blob = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=blob, model_type="bpe", vocab_size=400, byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=blob.getvalue())


def sentencepiece_gguf(path: Path, model: Any, order: list[int] | None = None, **extra: Any) -> Path:
    """Write a SentencePiece model as GGUF. order: the model's id that each id of the file stands for."""
    size = model.get_piece_size()
    order = list(range(size)) if order is None else order

    def kind(i: int) -> int:
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in order],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in order],
        "tokenizer.ggml.token_type": [kind(i) for i in order],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }
    return write_gguf(path, family_config("llama", vocab_size=size), tokenizer=False, extra=metadata | extra)


def test_a_vocabulary_with_scores_encodes_and_decodes_as_sentencepiece_does(tmp_path: Path, sentencepiece_model: Any) -> None:
    files = load_tokenizer_files(sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_model))
    pieces = [p for p in PIECES if "▁" not in p and "\0" not in p] + ["hello", " world", "Paris", " fox", "jumps over", "dogdog"]
    for text in texts(500, pieces):
        ids = files.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_model.encode(text), text
        assert files.tokenizer.decode(ids) == text
    assert files.add_bos and files.tokenizer.encode("hello").ids[0] == sentencepiece_model.bos_id()
    assert files.special_ids == {0, 1, 2}


def test_scores_decide_what_is_joined_first_whatever_the_order_of_ids(tmp_path: Path, sentencepiece_model: Any) -> None:
    size = sentencepiece_model.get_piece_size()
    order = [0, 1, 2, *random.Random(0).sample(range(3, size), size - 3)]
    tokenizer = load_tokenizer_files(sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_model, order)).tokenizer
    for text in texts(200, ["hello", " world", "Paris", " fox", "jumps over", "dogdog", " the", " that", "everever"]):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [order[i] for i in ids] == sentencepiece_model.encode(text), text


def test_no_space_is_put_in_front_where_the_metadata_says_so(tmp_path: Path, sentencepiece_model: Any) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_model, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load_tokenizer_files(path).tokenizer
    for text in ("hello", " hello", "  hello world"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(" hello", add_special_tokens=False).ids == sentencepiece_model.encode("hello")


def test_scores_are_required_and_counted(tmp_path: Path, sentencepiece_model: Any) -> None:
    for scores in (None, [0.0]):
        with pytest.raises(LoadError, match=r"tokenizer\.ggml\.scores"):
            load_tokenizer_files(
                sentencepiece_gguf(tmp_path / "m.gguf", sentencepiece_model, **{"tokenizer.ggml.scores": scores})
            )
