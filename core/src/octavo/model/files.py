"""Reading the small files of a checkpoint, and finding the large ones, without trusting any of them.

Owns JSON reading, the rule that no path leaves the model's folder, and the refusal of pickles. Opens
nothing but JSON. Must never import torch.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.errors import LoadError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of formats that run code when they are read. Such files are refused by name, unopened."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. LoadError, naming file and place, if it is missing or is something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LoadError(f"{path}: the file does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if text.startswith("version https://git-lfs"):
        raise LoadError(f"{path}: this is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds a JSON {type(value).__name__}; an object is expected")
    return value


def token_ids(value: Any, path: Path, key: str) -> tuple[int, ...]:
    """Token ids of a config field that may be null, one id or a list. LoadError naming file and key otherwise."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise LoadError(f"{path}: {key} is {value!r}; a token id, a list of them or null is expected")
    return tuple(dict.fromkeys(ids))


def inside(folder: Path, name: str, named_by: Path) -> Path:
    """The real path of `name` in `folder`. LoadError if it is not a plain relative path, if it (or what
    its links lead to) is outside the folder, if it is missing, or if it is not a regular file.

    Folders of the Hugging Face cache hold links to ../../blobs of the same repository: these are inside.
    """
    parts = PurePosixPath(name.replace("\\", "/"))
    if not name or parts.is_absolute() or ".." in parts.parts or ":" in name:
        raise LoadError(f"{named_by}: names the file {name!r}, which is not inside the model's folder")
    if parts.suffix.lower() in PICKLES:
        raise LoadError(f"{named_by}: names {name!r}, a pickle: it could run code and is not opened. Use safetensors.")
    path = folder / parts
    if path.is_symlink() and not path.exists():
        raise LoadError(f"{path}: is a link to {path.readlink()}, which does not exist; the download is incomplete")
    if not path.exists():
        raise LoadError(f"{named_by}: names the file {name!r}, which is not in {folder}")
    real, root = path.resolve(), folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(r) for r in roots):
        raise LoadError(f"{path}: is a link to {real}, outside the model's folder; copy the file, or give the real folder")
    if not real.is_file():
        raise LoadError(f"{path}: is a folder, not a file")
    return real


def pickles(folder: Path) -> list[str]:
    """Names of pickled weight files in a folder, for error messages."""
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES)
