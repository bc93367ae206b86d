"""Fetching a checkpoint from the Hugging Face hub into its local cache.

Owns which files are wanted (weights as safetensors, JSON, tokenizer, templates: never code, never
pickles) and turns the hub's failures into errors that say what to do. Must never import torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import LoadError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

SMALL = ("*.json", "*.jinja", "tokenizer.model")
"""Config, index, tokenizer and chat templates."""
WEIGHTS = ("*.safetensors",)


def snapshot(repo: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of one commit of `repo` in the local cache, downloaded if need be, with progress bars.

    A branch or tag is resolved to a commit once; the folder is named after that commit, so that
    everything read from it belongs together. Without a network the cached commit of `revision` is
    used. LoadError says which of these failed: network, name, revision, or permission.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        patterns = [*SMALL, *WEIGHTS] if weights else list(SMALL)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*.safetensors"]))


def single_file(repo: str, name: str, revision: str | None = None) -> Path:
    """One file of `repo` (a GGUF), downloaded if need be, with a progress bar."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, name, revision=revision))


class _explained:
    """Turns what huggingface_hub raises into LoadError."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.what = f"hub model {repo!r}" + (f" at revision {revision!r}" if revision else "")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        from huggingface_hub import errors

        def fail(text: str) -> LoadError:
            return LoadError(f"{self.what}: {text}")

        if isinstance(error, errors.GatedRepoError):
            raise fail(
                "its owner asks for an agreement. Accept it on the model's page, then log in with `hf auth login`."
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise fail("there is no such model, or it is private. Check the name, or log in with `hf auth login`.") from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise fail("the model has no such revision.") from error
        if isinstance(error, errors.IncompleteSnapshotError):
            raise fail("only part of it is in the local cache, and the hub cannot be reached for the rest.") from error
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            raise fail(
                "it is not in the local cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set). "
                "Give a local folder, or `demo`."
            ) from error
        if isinstance(error, errors.HFValidationError):
            raise fail("this is not a valid name of a model.") from error
        if isinstance(error, OSError | errors.EntryNotFoundError):
            raise fail(f"the download failed: {type(error).__name__}: {error}") from error
