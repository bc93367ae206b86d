"""Text to ids and back, incrementally or whole; control text and ids past the tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError
from octavo.model.source import ModelSource
from octavo.model.tokenizer_files import fingerprint
from octavo.text.tokenizer import Tokenizer

from tests.unit import tiny_tokenizers as tiny

KINDS = pytest.mark.parametrize("kind", tiny.ALL)
BYTES = ["byte_level", "sentencepiece"]
TEXTS = st.text(st.sampled_from("ab hP.\n<|>é日🎉▁") | st.characters(exclude_categories=["Cs"]), max_size=30)


def make(kind: str, **options: bool) -> Tokenizer:
    return tiny.octavo(tiny.ALL[kind](), **options)


def test_importing_the_text_side_loads_neither_torch_nor_transformers() -> None:
    names = "tokenizer, octavo.text.output, octavo.text.chat"
    code = f"import sys, octavo.text.{names}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- decoding


@KINDS
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_joined_deltas_equal_the_whole_text_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = make(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=25))
    for skip in (True, False):
        stream = tokenizer.stream((), skip_special_tokens=skip)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_byte_level_decoding_is_the_tokenizers_own_for_any_ids_valid_or_not(data: st.DataObject) -> None:
    tokenizer = make("byte_level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip in (True, False):
        whole = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("kind", BYTES)
@settings(deadline=None, max_examples=80)
@given(text=TEXTS)
def test_decoding_what_was_encoded_is_the_tokenizers_own_decode(kind: str, text: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids, skip_special_tokens=True)


@KINDS
def test_a_stream_after_a_prompt_continues_it_as_the_whole_decode_does(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("the Paris is a hello, don't")
    for cut in range(len(ids) + 1):
        prompt, rest = ids[:cut], ids[cut:]
        stream = tokenizer.stream(prompt)
        text = "".join([stream.push(token) for token in rest]) + stream.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BYTES)
def test_a_character_of_several_tokens_comes_when_it_is_complete_and_not_later(kind: str) -> None:
    tokenizer = make(kind)
    data = "🎉".encode()
    ids = [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([b])) for b in data]
    stream = tokenizer.stream(tokenizer.encode("a"))
    assert [stream.push(token) for token in ids] == ["", "", "", "🎉"]
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", BYTES)
def test_a_prompt_that_ends_inside_a_character_leaves_its_rest_to_the_output(kind: str) -> None:
    tokenizer = make(kind)
    data = "日".encode()
    ids = [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([b])) for b in data]
    stream = tokenizer.stream([*tokenizer.encode("ab"), *ids[:2]])
    assert stream.push(ids[2]) == "日"


def test_an_unfinished_character_becomes_replacement_characters_at_the_end() -> None:
    tokenizer = make("sentencepiece")
    ids = [tokenizer.id_of("<0xE6>"), tokenizer.id_of("<0x97>")]
    stream = tokenizer.stream(())
    assert "".join(stream.push(token) for token in ids) == ""  # type: ignore[arg-type]
    assert stream.flush() == tokenizer.backend.decode(ids) == "\ufffd\ufffd"  # type: ignore[arg-type]


@KINDS
@pytest.mark.parametrize("past", [0, 1, 100_000, 2**31 - 1])
def test_an_id_past_the_tokenizer_has_no_text_and_the_stream_goes_on(kind: str, past: int) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("the Paris")
    strange = [ids[0], tokenizer.vocab_size + past, *ids[1:]]
    assert tokenizer.decode(strange) == tokenizer.decode(ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size + past) == b""


def test_the_bytes_of_a_token_that_is_no_text_are_its_own() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("日")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "日".encode()


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_bos_comes_exactly_once_even_where_the_text_spells_it_out(kind: str) -> None:
    tokenizer = make(kind, add_bos=True)
    for text in ("the Paris", "<s>the Paris", "", "<s>"):
        assert tokenizer.encode(text).count(tokenizer.bos_id) == 1  # type: ignore[arg-type]
    assert tokenizer.encode("") == [tokenizer.bos_id]
    assert tokenizer.bos_id not in tokenizer.encode("the", add_special=False)
    assert make(kind).encode("") == []


@KINDS
@pytest.mark.parametrize("allow", [True, False])
def test_half_a_surrogate_pair_is_the_clients_error_and_says_where(kind: str, allow: bool) -> None:
    with pytest.raises(RequestError, match="at character 1"):
        make(kind).encode("a\ud83cb", allow_special_tokens=allow)


@KINDS
@settings(deadline=None, max_examples=40)
@given(text=TEXTS, at=st.integers(0, 30), marker=st.sampled_from(tiny.MARKERS))
def test_control_text_in_ordinary_text_never_becomes_a_control_token(kind: str, text: str, at: int, marker: str) -> None:
    tokenizer = make(kind)
    text = text[:at] + marker + text[at:]
    ids = tokenizer.encode(text, allow_special_tokens=False)
    assert not tokenizer.special_ids & set(ids)


@pytest.mark.parametrize("kind", BYTES)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_plain_encoding_equals_the_ordinary_one_where_no_marker_occurs(kind: str, text: str) -> None:
    tokenizer = make(kind)
    if not any(marker in text for marker in tiny.MARKERS):
        assert tokenizer.encode(text, allow_special_tokens=False) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", BYTES)
@settings(deadline=None, max_examples=60)
@given(parts=st.lists(TEXTS | st.sampled_from(tiny.MARKERS), max_size=8))
def test_wholly_trusted_text_is_encoded_as_the_tokenizer_does(kind: str, parts: list[str]) -> None:
    tokenizer = make(kind)
    text = "".join(parts)
    assert tokenizer.encode_trusted(text, [(0, len(text))]) == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_a_marker_counts_only_where_it_is_trusted_from_end_to_end() -> None:
    tokenizer = make("byte_level")
    end = tokenizer.id_of("<|im_end|>")
    text = "a<|im_end|>b<|im_end|>"
    assert tokenizer.encode_trusted(text, [(0, 11)]).count(end) == 1  # type: ignore[arg-type]
    assert tokenizer.encode_trusted(text, [(0, 10)]).count(end) == 0  # type: ignore[arg-type]
    assert tokenizer.encode_trusted(text, [(0, 11), (12, 22)]).count(end) == 2  # type: ignore[arg-type]
    assert tokenizer.encode_trusted(text, [(2, 22)]).count(end) == 1  # type: ignore[arg-type]


def test_a_role_marker_that_the_checkpoint_does_not_flag_as_special_is_one_all_the_same() -> None:
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(tiny.byte_level().to_str())
    backend.add_tokens([AddedToken("<\uff5cUser\uff5c>", special=False), AddedToken("<think>", special=False)])
    tokenizer = tiny.octavo(backend)
    marker, think = tokenizer.id_of("<\uff5cUser\uff5c>"), tokenizer.id_of("<think>")
    ids = tokenizer.encode("<\uff5cUser\uff5c><think>", allow_special_tokens=False)
    assert marker not in ids and think in ids


def test_the_demo_models_tokenizer_decodes_its_own_encoding(demo_path: object) -> None:
    tokenizer = Tokenizer.from_path(str(demo_path))
    text = "What is the capital of France? naïve 日本語 🎉\n\tx = 3"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(())
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text == tokenizer.decode(ids)


# ---------------------------------------------------------------- one tokenizer for equal files


def folder(at: Path, kind: str = "byte_level", **settings: str) -> Path:
    at.mkdir()
    tiny.ALL[kind]().save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text(json.dumps(settings))
    return at


def resolved(at: Path) -> ModelSource:
    return ModelSource("folder", at, at.name, {})


def test_models_with_equal_files_share_one_tokenizer_while_it_is_used_and_others_do_not(tmp_path: Path) -> None:
    plain = EngineConfig(model="m")
    first = Tokenizer.from_source(resolved(folder(tmp_path / "v1")), plain)
    assert Tokenizer.from_source(resolved(folder(tmp_path / "v2")), plain) is first
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    others = [
        Tokenizer.from_source(resolved(folder(tmp_path / "chat", chat_template="x")), plain),
        Tokenizer.from_source(resolved(folder(tmp_path / "words", "sentencepiece")), plain),
        Tokenizer.from_source(resolved(tmp_path / "v1"), EngineConfig(model="m", chat_template=str(template))),
    ]
    assert len({id(one) for one in (first, *others)}) == 4
    (tmp_path / "v1" / "chat_template.jinja").write_text("changed on the disk")
    assert Tokenizer.from_source(resolved(tmp_path / "v1"), plain).chat_template == "changed on the disk"
    gone = weakref.ref(first)
    del first
    assert gone() is None


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"chat_template": "/nowhere/x.jinja"}, "^--chat-template /nowhere/x.jinja: cannot be read: No such file or directory$"),
        (
            {"chat_template": "{folder}/broken.jinja"},
            "^--chat-template .*/broken.jinja: the chat template does not compile: line 1: ",
        ),
        ({"tokenizer": "/nowhere/at/all"}, "^--tokenizer /nowhere/at/all: "),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, flag: dict[str, str], message: str) -> None:
    (tmp_path / "broken.jinja").write_text("{% for")
    config = EngineConfig(model="m", **{name: value.format(folder=tmp_path) for name, value in flag.items()})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_source(resolved(folder(tmp_path / "v1")), config)


def test_a_tokenizer_with_more_tokens_than_the_model_is_another_models() -> None:
    tokenizer = make("byte_level")
    size = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    tokenizer.check_fits(size, "here")
    with pytest.raises(
        ConfigError, match=rf"^here: the tokenizer has {size} tokens and the model's vocabulary {size - 1}, .*--tokenizer$"
    ):
        tokenizer.check_fits(size - 1, "here")
    tokenizer.backend.add_tokens(["<extra>"])  # past the model's last id: a prompt may still be written without it
    tokenizer.check_fits(size, "here")


def test_a_gguf_file_that_was_written_anew_is_read_anew(demo_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    copy.symlink_to(demo_path)
    before = fingerprint(copy)
    assert before == fingerprint(demo_path)
    copy.unlink()
    copy.write_bytes(b"GGUF")
    assert fingerprint(copy) != before


def test_nothing_is_left_to_make_for_the_first_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make("byte_level")
    tokenizer.prepare()
    monkeypatch.setattr("octavo.text.tokenizer._PlainEncoder", None)
    assert tokenizer.encode_trusted("abc", ()) == tokenizer.encode("abc", add_special=False)
