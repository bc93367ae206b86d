"""Tokenizer: text to ids and back, and which text may become a special token.

Owns the rule that the text of a control token (a role marker, an end of sequence) becomes that token
only where the caller says so. Never renders a template, never imports torch or transformers.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from octavo.errors import ConfigError, LoadError, RequestError
from octavo.text.detokenizer import Detokenizer, Pieces, pieces_of
from octavo.text.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from octavo.config import EngineConfig
    from octavo.model.source import ModelSource
    from octavo.model.tokenizer_files import TokenizerFiles

_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Some checkpoints flag role markers of this shape as ordinary added tokens; they control all the same."""


class Tokenizer:
    """One model's tokenizer. Thread-safe.

    vocab_size counts the ids that have text (a padded model head may be wider). eos_ids are the ends
    that the tokenizer's files name; special_ids are hidden by skip_special_tokens. chat_template is
    the Jinja source or None; chat_templates holds the named ones.
    """

    def __init__(self, files: TokenizerFiles, chat_template: str | None = None) -> None:
        self.backend: Backend = files.tokenizer
        self.bos_id, self.eos_id, self.pad_id = files.bos_id, files.eos_id, files.pad_id
        self.bos_text, self.eos_text, self.pad_text = files.bos_text, files.eos_text, files.pad_text
        self.eos_ids, self.add_bos, self.special_ids = files.eos_ids, files.add_bos, files.special_ids
        self.chat_template = files.chat_template if chat_template is None else chat_template
        self.chat_templates = dict(files.chat_templates)
        if self.chat_template is not None:
            self.chat_templates["default"] = self.chat_template
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.pieces: Pieces = pieces_of(self.backend)
        self._plain: _PlainEncoder | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_source(cls, source: ModelSource, config: EngineConfig) -> Tokenizer:
        """The tokenizer of a resolved model, or the one that --tokenizer names, with --chat-template if given.
        LoadError names the file that is wrong, ConfigError the flag.

        Sources with the same files share one tokenizer while somebody uses it: to make one holds the interpreter's lock
        for a fifth of a second, and a server that replaces a model by its next version has others to serve meanwhile."""
        from octavo.model.tokenizer_files import fingerprint, load_tokenizer_files

        where = source if config.tokenizer is None else _located(config.tokenizer)
        template = None if config.chat_template is None else _read_template(config.chat_template)
        key = (*fingerprint(where), template)
        with _MAKING:
            known = _KNOWN.get(key)
            if known is None:
                known = _KNOWN[key] = cls(load_tokenizer_files(where), template)
        return known

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder with tokenizer.json, or of a GGUF file."""
        from octavo.model.tokenizer_files import load_tokenizer_files

        return cls(load_tokenizer_files(Path(path)))

    def encode(self, text: str, *, add_special: bool = True, allow_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt. With add_special it starts with bos exactly once where the model wants one,
        also if the text spells it out. Without allow_special_tokens, control tokens' text is plain text."""
        ids = _ids(self.backend, text) if allow_special_tokens else self._encoder().encode(text, ())
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_trusted(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of text in which a control token's text counts only where it lies wholly inside one of the
        `trusted` spans (start, end), sorted and apart. No bos is added: the text is a rendered template."""
        return self._encoder().encode(text, trusted)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, equal to the joined deltas of a stream of them. An unknown id has no text."""
        stream = Detokenizer(self.pieces, self.special_ids if skip_special_tokens else frozenset())
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder of what follows `prompt`."""
        return Detokenizer(self.pieces, self.special_ids if skip_special_tokens else frozenset(), prompt)

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes of one token, which need not be valid UTF-8; b"" if it is unknown."""
        return self.pieces[token]

    def token_text(self, token: int) -> str:
        """The text of one token alone; U+FFFD where its bytes are part of a character."""
        return self.pieces[token].decode("utf-8", "replace")

    def id_of(self, text: str) -> int | None:
        """The id of exactly this piece or special token."""
        return self.backend.token_to_id(text)

    def check_fits(self, vocab_size: int, where: str) -> None:
        """ConfigError if it is another model's, which gives ids that this one does not have. Tokens that were added to a
        vocabulary may lie past the model's: prompts that use them are refused one by one."""
        own = self.backend.get_vocab_size(with_added_tokens=False)
        if own > vocab_size:
            raise ConfigError(
                f"{where}: the tokenizer has {own} tokens and the model's vocabulary {vocab_size}, so it is another model's; "
                "give this model's with --tokenizer"
            )

    def prepare(self) -> None:
        """Make what the first conversation would make: a copy, and for as long as it takes no other thread runs."""
        self._encoder()

    def _encoder(self) -> _PlainEncoder:
        with self._lock:
            if self._plain is None:
                self._plain = _PlainEncoder(self.backend, self.special_ids)
            return self._plain


class _PlainEncoder:
    """A copy of the tokenizer that reads no control token from text, except under an alias made here.

    Each control token gets one alias, unguessable text that exists in this process only. Trusted
    markers are replaced by their aliases, so the whole text goes through the tokenizer in one pass and
    is split exactly where the original splits it. Everything else that looks like a marker stays text.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        from tokenizers import AddedToken

        added = backend.get_added_tokens_decoder()
        markers = {i: t for i, t in added.items() if t.special or i in special_ids or _MARKER.fullmatch(t.content)}
        self._ids = {token.content: i for i, token in markers.items()}
        self._control = frozenset(self._ids.values()) | special_ids
        # Longest first: the leftmost-longest rule of the tokenizer's own matcher.
        names = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._backend = _with_special(backend, frozenset(self._ids))
        self._backend.encode_special_tokens = True  # means: special tokens are encoded like any text
        self._nonce = "q" + secrets.token_hex(16)
        self._aliases = {name: f"{self._nonce}x{number}z" for number, name in enumerate(names)}
        for token in markers.values():
            alias = AddedToken(
                self._aliases[token.content], normalized=token.normalized, lstrip=token.lstrip, rstrip=token.rstrip, special=False
            )
            self._backend.add_tokens([alias])
        self._real = {self._backend.token_to_id(alias): self._ids[name] for name, alias in self._aliases.items()}

    def encode(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[int]:
        if self._nonce in text:
            raise RequestError("the text holds a value that is private to this process", code="invalid_value")
        marked = self._mark(text, trusted)
        ids = _ids(self._backend, marked)
        if not self._control.isdisjoint(ids):
            # The vocabulary itself spells a marker out (a unigram model may): cut the text inside every such place.
            ids = self._encode_cut(marked)
        return [self._real.get(i, i) for i in ids]

    def _mark(self, text: str, trusted: Sequence[tuple[int, int]]) -> str:
        if self._pattern is None or not trusted:
            return text
        parts: list[str] = []
        at = 0
        for start, end in trusted:
            for match in self._pattern.finditer(text, start, end):
                parts += (text[at : match.start()], self._aliases[match.group()])
                at = match.end()
        parts.append(text[at:])
        return "".join(parts)

    def _encode_cut(self, text: str) -> list[int]:
        cuts = [0, *(m.start() + 1 for m in self._pattern.finditer(text)), len(text)] if self._pattern else [0, len(text)]
        ids: list[int] = []
        for start, end in pairwise(cuts):
            ids += _ids(self._backend, text[start:end])
        if not self._control.isdisjoint(ids):
            raise RequestError(
                "the text cannot be encoded without turning part of it into one of the model's control tokens",
                code="invalid_value",
            )
        return ids


_KNOWN: WeakValueDictionary[tuple[str | None, ...], Tokenizer] = WeakValueDictionary()
_MAKING = threading.Lock()


def _ids(backend: Backend, text: str) -> list[int]:
    """encode_batch lets other threads run; plain encode holds the interpreter's lock for as long as it takes,
    which for a long text is seconds. The fast variant leaves out offsets."""
    try:
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    except TypeError:  # what the Rust side says of text that is not UTF-8
        at = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if at is None:
            raise
        raise RequestError(
            f"the text holds half of a surrogate pair ({text[at]!r} at character {at}), which no tokenizer can encode",
            code="invalid_value",
        ) from None


def _with_special(backend: Backend, names: frozenset[str]) -> Backend:
    """A copy in which every added token of these names is flagged special."""
    from tokenizers import Tokenizer as Copy

    if all(t.special for t in backend.get_added_tokens_decoder().values() if t.content in names):
        return Copy.from_str(backend.to_str())
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["special"] or token["content"] in names
    return Copy.from_str(json.dumps(data))


def place_of(config: EngineConfig, source: ModelSource) -> str:
    """Where a model's tokenizer comes from, for errors."""
    return f"--tokenizer {config.tokenizer}" if config.tokenizer is not None else str(source.text_path or source.path)


def tool_template(source: ModelSource, config: EngineConfig) -> str:
    """The template that conversations with tools go through, read without making a tokenizer; "" where there is none. Raises as
    `Tokenizer.from_source` does."""
    from octavo.model.tokenizer_files import load_chat_templates, template_for

    templates = load_chat_templates(source if config.tokenizer is None else _located(config.tokenizer))
    if config.chat_template is not None:
        templates["default"] = _read_template(config.chat_template)
    return template_for(templates, tools=True) or ""


def _located(tokenizer: str) -> Path:
    from octavo.model.source import locate

    try:
        return locate(tokenizer, weights=False)[0]
    except LoadError as error:
        raise ConfigError(f"--tokenizer {tokenizer}: {str(error).removeprefix(f'{tokenizer}: ')}") from error


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
        ChatTemplate(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except LoadError as error:
        raise ConfigError(f"--chat-template {path}: {error}") from error
    return text
