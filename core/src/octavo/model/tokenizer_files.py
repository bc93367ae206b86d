"""What a model's files say about text: the tokenizer, its special tokens and its chat templates.

Owns the order in which the files of a folder are read, and the same answer for a GGUF file. Renders
no template and runs no code from a checkpoint. Must never import torch or transformers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.model.files import read_json, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from octavo.model.gguf_file import GGUFFile
    from octavo.model.source import ModelSource

log = logging.getLogger(__name__)

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Everything needed to turn text into ids and back.

    bos_text and the others are what a chat template sees as `bos_token`; "" where there is none.
    eos_ids: every id that the tokenizer's files call an end (the model's config may add more).
    add_bos: raw text (a completion, not a rendered chat) starts with bos; encode with
    add_special_tokens=False and prepend it. special_ids: ids whose text is hidden from output.
    chat_templates: by name, "default" first; {} if the model has none.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    bos_text: str
    eos_text: str
    pad_text: str
    eos_ids: tuple[int, ...]
    add_bos: bool
    special_ids: frozenset[int]
    chat_templates: dict[str, str] = field(default_factory=dict)

    @property
    def chat_template(self) -> str | None:
        """The default template, or the only one; None if there is none or if several have other names."""
        return template_for(self.chat_templates, tools=False)


def template_for(templates: Mapping[str, str], *, tools: bool) -> str | None:
    """The template of a conversation: with tools the one named `tool_use`, where there is one; else TokenizerFiles.chat_template."""
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates or len(templates) != 1:
        return templates.get("default")
    return next(iter(templates.values()))


def load_chat_templates(source: ModelSource | str | Path) -> dict[str, str]:
    """TokenizerFiles.chat_templates without the tokenizer. LoadError for a damaged file."""
    path = _text_path(source)
    if path.is_file():
        from octavo.model.gguf_file import read_gguf

        return _gguf_templates(read_gguf(path))
    settings = path / SETTINGS
    return _templates(path, read_json(settings) if settings.exists() else {}, settings)


def load_tokenizer_files(source: ModelSource | str | Path) -> TokenizerFiles:
    """Read the tokenizer of a resolved model, of a folder or of a GGUF file.

    LoadError, naming the file, if there is no tokenizer.json or if a file is damaged.
    """
    path = _text_path(source)
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def fingerprint(source: ModelSource | str | Path) -> tuple[str, ...]:
    """Equal for two sources only if `load_tokenizer_files` finds the same in both: the digests of a folder's files, or which GGUF
    file it is and when it was written. LoadError for a file that cannot be read."""
    path = _text_path(source)
    try:
        if path.is_file():
            state = path.stat()
            return ("gguf", str(path.resolve()), str(state.st_size), str(state.st_mtime_ns))
        more = sorted((path / MORE_TEMPLATES).glob("*.jinja"))
        files = [f for f in (path / TOKENIZER, path / SETTINGS, path / TEMPLATE, *more) if f.is_file()]
        return tuple(f"{f.relative_to(path)} {hashlib.sha256(f.read_bytes()).hexdigest()}" for f in files)
    except OSError as error:
        raise LoadError(f"{path}: the tokenizer's files cannot be read: {error}") from error


def _text_path(source: ModelSource | str | Path) -> Path:
    return Path(source) if isinstance(source, (str, Path)) else source.text_path or source.path


def _from_gguf(path: Path) -> TokenizerFiles:
    from octavo.model.gguf_file import read_gguf
    from octavo.model.gguf_tokenizer import gguf_vocabulary

    file = read_gguf(path)
    words = gguf_vocabulary(file)

    def text(token: int | None) -> str:
        return "" if token is None else words.texts[token]

    eos = words.eos[0] if words.eos else None
    return TokenizerFiles(
        tokenizer=words.tokenizer,
        bos_id=words.bos,
        eos_id=eos,
        pad_id=words.pad,
        bos_text=text(words.bos),
        eos_text=text(eos),
        pad_text=text(words.pad),
        eos_ids=words.eos,
        add_bos=words.add_bos,
        special_ids=words.special,
        chat_templates=_gguf_templates(file),
    )


def _gguf_templates(file: GGUFFile) -> dict[str, str]:
    templates: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = file.require(key, str)
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates


def _from_folder(folder: Path) -> TokenizerFiles:
    from tokenizers import AddedToken, Tokenizer

    path = folder / TOKENIZER
    if not path.is_file():
        old = [n for n in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / n).is_file()]
        hint = f" It has {old[0]}: save the tokenizer once with transformers' save_pretrained." if old else ""
        raise LoadError(f"{folder}: there is no tokenizer.json.{hint} Another tokenizer can be given with --tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises a bare Exception
        raise LoadError(f"{path}: not a tokenizer: {error}") from error
    settings = folder / SETTINGS
    config = read_json(settings) if settings.exists() else {}

    texts = {name: _token_text(config, name, settings) for name in ("bos_token", "eos_token", "pad_token")}
    for entry in _added(config, settings):
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and tokenizer.token_to_id(entry["content"]) is None:
            tokenizer.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special")), normalized=False)])
    ids = {name: tokenizer.token_to_id(text) if text else None for name, text in texts.items()}
    for name, text in texts.items():
        if text and ids[name] is None:
            raise LoadError(f"{settings}: {name} is {text!r}, which tokenizer.json does not contain")
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special.update(i for i in ids.values() if i is not None)
    starts = tokenizer.encode("", add_special_tokens=True).ids
    return TokenizerFiles(
        tokenizer=tokenizer,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        pad_id=ids["pad_token"],
        bos_text=texts["bos_token"],
        eos_text=texts["eos_token"],
        pad_text=texts["pad_token"],
        eos_ids=() if ids["eos_token"] is None else (ids["eos_token"],),
        # tokenizer.json's own post-processor decides, as in transformers 5; the flag in the config is ignored there too.
        add_bos=ids["bos_token"] is not None and starts[:1] == [ids["bos_token"]],
        special_ids=frozenset(special),
        chat_templates=_templates(folder, config, settings),
    )


def _added(config: dict[str, Any], path: Path) -> Iterable[Any]:
    """Added tokens that transformers 4 lists in tokenizer_config.json as well."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise LoadError(f"{path}: added_tokens_decoder is a {type(listed).__name__}; an object of ids is expected")
    return listed.values()


def _token_text(config: dict[str, Any], name: str, path: Path) -> str:
    value = config.get(name)
    if isinstance(value, dict):  # an AddedToken written out
        value = value.get("content")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise LoadError(f"{path}: {name} is {value!r}, neither text nor an object with `content`")
    return value


def _templates(folder: Path, config: dict[str, Any], path: Path) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/*.jinja if the first exists, else tokenizer_config.json's
    `chat_template`, a string or a list of {name, template}."""
    main, more = folder / TEMPLATE, folder / MORE_TEMPLATES
    templates: dict[str, str] = {}
    try:
        if main.is_file():
            templates["default"] = main.read_text(encoding="utf-8")
        if more.is_dir():
            templates.update((f.stem, f.read_text(encoding="utf-8")) for f in sorted(more.glob("*.jinja")))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{folder}: a chat template cannot be read: {error}") from error
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        raise LoadError(f"{path}: chat_template is a {type(value).__name__}, neither text nor a list of {{name, template}}")
    for number, entry in enumerate(value):
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)):
            raise LoadError(f"{path}: chat_template[{number}] is {str(entry)[:60]!r}, not {{name, template}}")
        templates[entry["name"]] = entry["template"]
    return templates


def tokenizer_eos_ids(path: Path) -> tuple[int, ...]:
    """The end-of-sequence ids by the tokenizer's files alone, without building the tokenizer; () if unknown."""
    settings, words = path / SETTINGS, path / TOKENIZER
    if not settings.is_file() or not words.is_file():
        return ()
    text = _token_text(read_json(settings), "eos_token", settings)
    if not text:
        return ()
    data = read_json(words)
    added = data.get("added_tokens") or []
    if not isinstance(added, list):
        raise LoadError(f"{words}: added_tokens is a {type(added).__name__}; a list is expected")
    for entry in added:
        if isinstance(entry, dict) and entry.get("content") == text:
            return token_ids(entry.get("id"), words, "added_tokens.id")
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return token_ids(vocab.get(text), words, "model.vocab") if isinstance(vocab, dict) else ()
