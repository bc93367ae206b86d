"""Writing a checkpoint: what cannot be written is named, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.errors import ConfigError, QuantizeError
from octavo.model import export
from octavo.model.source import resolve_source
from safetensors import SafetensorError


def test_a_disk_that_is_full_is_named_and_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    out = tmp_path / "out"
    with (
        pytest.raises(QuantizeError, match=r"^.*/out: 1 tensors cannot be written: .*No space left on device"),
        export.CheckpointWriter(out, resolve_source(str(tiny))) as writer,
    ):
        writer.add("x", torch.ones(3))
        writer.finish({}, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_written_into(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        export.CheckpointWriter(tmp_path, resolve_source(str(tiny)))
