"""Writing a checkpoint: safetensors in shards, config.json and tokenizer, in a folder that appears when it is whole.

Owns the layout of the folder, which is the one that transformers reads. Must never leave a folder of the final
name that is not complete, nor hold more than one shard in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor

from octavo.errors import ConfigError, QuantizeError
from octavo.model.checkpoint import INDEX, SINGLE, checkpoint_headers
from octavo.model.readers import read_gguf, read_safetensors
from octavo.model.source import ModelSource
from octavo.model.tokenizer_files import TokenizerFiles, load_tokenizer_files

SHARD_BYTES = 4 << 30
"""A shard is closed when it holds this much: what writing a checkpoint keeps in memory."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files of a source folder that are copied as they are, where it has them; additional_chat_templates/ too."""


def read_tensors(source: ModelSource, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an unquantised source by checkpoint name, in file order, one in memory at a time. Tensors of a
    GGUF file are dequantised to the torch dtype `dtype`; those of a folder keep theirs."""
    headers = checkpoint_headers(source)
    if source.kind == "gguf":
        return read_gguf(source.path, headers.values(), getattr(torch, dtype))
    return read_safetensors(headers.values())


class CheckpointWriter:
    """A new checkpoint of `source`'s model in the folder `out`. Used as a context manager: what was written is removed
    unless `finish` was reached. ConfigError if `out` is there already."""

    def __init__(self, out: Path, source: ModelSource, *, shard_bytes: int = SHARD_BYTES) -> None:
        if out.exists():
            raise ConfigError(f"--out {out}: is there already; nothing is overwritten, so name a folder that is not")
        self.out, self._source, self._limit = out, source, shard_bytes
        self._folder = out.with_name(f".{out.name}.partial")
        self._pending: dict[str, Tensor] = {}
        self._size = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, which is moved to the CPU; it is written with its shard. ValueError if the name was used."""
        if name in self._pending or any(name in shard for shard in self._shards):
            raise ValueError(f"the tensor {name!r} was added twice")
        self._pending[name] = tensor.detach().to("cpu").contiguous()
        self._size += tensor.nbytes
        self.total_bytes += tensor.nbytes
        if self._size >= self._limit:
            self._flush()

    def finish(self, quantization_config: Mapping[str, Any], *, dtype: str) -> None:
        """Write what is pending, config.json with this quantization_config and dtype (a torch dtype name: the
        activations'), and the tokenizer; then give the folder its name."""
        self._flush()
        self._index()
        config = dict(self._source.config)
        config.pop("torch_dtype", None)
        config |= {"dtype": dtype, "quantization_config": dict(quantization_config)}
        self._json("config.json", config)
        if self._source.generation_config:
            self._json("generation_config.json", self._source.generation_config)
        self._tokenizer()
        self._folder.rename(self.out)

    def _flush(self) -> None:
        if self._pending:
            shard = self._shard(len(self._shards))
            try:
                save_file(self._pending, shard, {"format": "pt"})
            except SafetensorError as error:  # the disk is full, say
                raise QuantizeError(f"{self.out}: {len(self._pending)} tensors cannot be written: {error}") from error
            shard.chmod(0o644)  # the library makes files that only their owner can read
            self._shards.append(list(self._pending))
            self._pending, self._size = {}, 0

    def _shard(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"

    def _index(self) -> None:
        """Give the shards their final names, and write the index where there are several."""
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self._folder / SINGLE)
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._shard(number).rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        self._json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": places})

    def _json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _tokenizer(self) -> None:
        if self._source.kind == "gguf":
            self._tokenizer_of_gguf(load_tokenizer_files(self._source))
            return
        for name in TOKENIZER_FILES:
            if (self._source.path / name).is_file():
                shutil.copyfile(self._source.path / name, self._folder / name)
        more = self._source.path / "additional_chat_templates"
        if more.is_dir():
            shutil.copytree(more, self._folder / more.name)

    def _tokenizer_of_gguf(self, files: TokenizerFiles) -> None:
        tokenizer, settings = files.tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}
        if files.add_bos and tokenizer.encode("").ids[:1] != [files.bos_id]:
            begin = processors.TemplateProcessing(
                single=f"{files.bos_text} $A",
                pair=f"{files.bos_text} $A {files.bos_text} $B",
                special_tokens=[(files.bos_text, files.bos_id)],
            )
            own = tokenizer.post_processor
            tokenizer.post_processor = begin if own is None else processors.Sequence([own, begin])
        (self._folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        texts = {"bos_token": files.bos_text, "eos_token": files.eos_text, "pad_token": files.pad_text}
        self._json("tokenizer_config.json", settings | {name: text for name, text in texts.items() if text})
        for name, template in files.chat_templates.items():
            place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (self._folder / place).parent.mkdir(exist_ok=True)
            (self._folder / place).write_text(template, encoding="utf-8")
