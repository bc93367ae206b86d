"""What a making that was interrupted goes on from: a folder beside the new checkpoint.

Owns the files: what was asked for, the statistics, the errors of the candidates so far, and the tensors of every finished Linear. A
folder that was made for something else is refused, not mixed in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from octavo.errors import QuantizeError
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo_quant_awq.make.search import Seen


class State:
    """The folder `.NAME.awq` beside `out`."""

    def __init__(self, out: Path, asked: Mapping[str, Any]) -> None:
        """asked: JSON data that must be equal for the work to be of use. QuantizeError if the folder is of another making."""
        self.folder = out.with_name(f".{out.name}.awq")
        marker, text = self.folder / "asked.json", json.dumps(asked, indent=1, sort_keys=True)
        self.resumed = marker.exists()
        if self.resumed and marker.read_text() != text:
            raise QuantizeError(
                f"{self.folder}: holds an unfinished checkpoint of other settings or another text; go on with those, or remove it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(text)

    def statistics(self) -> dict[str, Seen] | None:
        found = self._load("statistics")
        if found is None:
            return None
        keys = [name.removesuffix("/mean") for name in found if name.endswith("/mean")]
        return {key: Seen(found[f"{key}/mean"], found[f"{key}/sample"]) for key in keys}

    def keep_statistics(self, seen: Mapping[str, Seen]) -> None:
        tensors = {f"{key}/mean": s.mean for key, s in seen.items()} | {f"{key}/sample": s.sample for key, s in seen.items()}
        self._save("statistics", tensors)

    def losses(self) -> tuple[int, dict[str, Tensor]]:
        """Passes that are done, and what they added up."""
        found = self._load("losses")
        return (0, {}) if found is None else (int(found.pop("/passes")), found)

    def keep_losses(self, passes: int, losses: Mapping[str, Tensor]) -> None:
        self._save("losses", {**losses, "/passes": torch.tensor(passes)})

    def linear(self, index: int) -> dict[str, Tensor] | None:
        return self._load(f"linear-{index}")

    def keep_linear(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        self._save(f"linear-{index}", tensors)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _load(self, name: str) -> dict[str, Tensor] | None:
        file = self.folder / f"{name}.safetensors"
        return load_file(file) if file.exists() else None

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """All or nothing: the file appears when it is whole."""
        partial = self.folder / f"{name}.partial"
        save_file({key: t.contiguous() for key, t in tensors.items()}, partial)
        partial.rename(self.folder / f"{name}.safetensors")
