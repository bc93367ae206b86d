"""Token ids to text, one at a time, so that the joined pieces equal the whole.

Owns the bytes of every token and the incremental decoding of them. For the decoders in use (byte
level, and SentencePiece with byte fallback) a token is a fixed byte string, and text is those bytes
read as UTF-8: an incomplete character waits for its rest, an invalid one becomes U+FFFD. Any other
decoder goes through a window of whole decodes. Never looks for stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
_PENDING = 16
"""Tokens that a window holds back for an incomplete character before it lets go of them."""


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Byte fallback writes one U+FFFD for every byte that is no character."""
    assert isinstance(error, UnicodeDecodeError)
    return "�" * (error.end - error.start), error.end


codecs.register_error("octavo.each_byte", _each_byte)


class Pieces:
    """The bytes of each token, found when first asked for. pieces[id] is b"" for an unknown id.

    strip: a text's first space belongs to the tokenizer, not to the text. errors: the codec's error
    handler. window: tokens have no bytes of their own, and text comes from whole decodes.
    """

    def __init__(self, backend: Backend, *, strip: bool = False, errors: str = "replace", window: bool = False) -> None:
        self.backend, self.strip, self.errors, self.window = backend, strip, errors, window
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            text = self.backend.id_to_token(token) if token >= 0 else None
            found = self._known[token] = b"" if text is None else self._bytes(token, text)
        return found

    def _bytes(self, token: int, text: str) -> bytes:
        return self.backend.decode([token], skip_special_tokens=False).encode()


class _ByteLevel(Pieces):
    def _bytes(self, token: int, text: str) -> bytes:
        try:
            return bytes([_BYTE_OF[c] for c in text])
        except KeyError:  # an added token written as it is
            return text.encode()


class _SentencePiece(Pieces):
    def _bytes(self, token: int, text: str) -> bytes:
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def pieces_of(backend: Backend) -> Pieces:
    """The byte table that a tokenizer's decoder implies."""
    decoder = getattr(backend, "decoder", None)
    steps = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel(backend)
    if "ByteFallback" in kinds and all(_is_sentencepiece(step) for step in steps):
        return _SentencePiece(backend, strip="Strip" in kinds, errors="octavo.each_byte")
    return Pieces(backend, window=True)


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
    if step["type"] == "Strip":
        return (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0)
    return step["type"] in ("ByteFallback", "Fuse")


class Detokenizer:
    """push(id) gives the text that has become certain; flush() what is left at the end.

    `hidden` ids have no text. `prompt` is what comes before: a character that it leaves incomplete is
    completed here, and a leading space is stripped only if nothing visible precedes.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_pieces", "_prefix", "_strip", "_window")

    def __init__(self, pieces: Pieces, hidden: frozenset[int], prompt: Sequence[int] = ()) -> None:
        self._pieces, self._hidden, self._window = pieces, hidden, pieces.window
        tail = [token for token in prompt[-8:] if token not in hidden]
        if not tail and len(prompt) > 8:
            tail = [token for token in prompt if token not in hidden][-8:]
        self._strip = pieces.strip and not tail
        if self._window:
            self._ids, self._prefix = tail, pieces.backend.decode(tail) if tail else ""
        else:
            self._decode = codecs.getincrementaldecoder("utf-8")(pieces.errors).decode
            if tail:
                self._decode(b"".join([pieces[token] for token in tail]))

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        if self._window:
            self._ids.append(token)
            return self._advance(len(self._ids) > _PENDING + 8)
        text = self._decode(self._pieces[token])
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The rest: an incomplete character becomes U+FFFD. Call once."""
        if self._window:
            return self._advance(True)
        return self._decode(b"", True)

    def _advance(self, force: bool) -> str:
        text = self._pieces.backend.decode(self._ids, skip_special_tokens=False)
        if not force and (text.endswith("�") or len(text) <= len(self._prefix)):
            return ""
        new = text[len(self._prefix) :]
        self._ids = self._ids[-8:]
        self._prefix = self._pieces.backend.decode(self._ids, skip_special_tokens=False)
        return new
