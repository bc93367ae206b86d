"""One keyed server for the session, with a long context so that requests can be made to last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.harness import ADMIN_KEY, API_KEYS, SMALL_KEY, Server
from tests.tiny import tiny_llama

CONTEXT = 4096
QUEUE = 100
FLAGS = (
    "--max-num-queued-reqs",
    str(QUEUE),
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "256",
    "--num-gpu-blocks-override",
    "1200",
    "--block-size",
    "16",
)


@pytest.fixture(scope="session")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with a context of 4096 tokens."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def server(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests share: two client keys, one that may ask for little, one admin key, priorities allowed."""
    folder = tmp_path_factory.mktemp("server")
    small = {"name": "small", "key": SMALL_KEY, "limits": {"max_tokens": 4}}
    (folder / "keys.json").write_text(json.dumps({"tenants": [small]}))
    keys = [flag for key in API_KEYS for flag in ("--api-key", key)] + ["--api-keys-file", str(folder / "keys.json")]
    log = folder / "log"
    running = Server(
        long_tiny, log, *FLAGS, *keys, "--admin-api-key", ADMIN_KEY, "--scheduling-policy", "priority", "--min-priority", "-5"
    )
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def demo_server(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a template that knows tools, which its own does not."""
    template = Path(__file__).parents[2] / "examples" / "chatml_tools.jinja"
    flags = ("--max-model-len", "1024", "--max-num-seqs", "16", "--num-gpu-blocks-override", "400", "--block-size", "16")
    tools = ("--chat-template", str(template), "--enable-auto-tool-choice")
    log = tmp_path_factory.mktemp("demo") / "log"
    running = Server(demo_path, log, *flags, *tools, "--api-key", API_KEYS[0], "--admin-api-key", ADMIN_KEY)
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def demo_client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.url + "/v1", api_key=API_KEYS[0], max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """One that keeps its connections to the shared server, with the first client key."""
    with server.client() as client:
        yield client
