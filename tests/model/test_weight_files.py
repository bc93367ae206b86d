"""The files of a checkpoint: its index, links, pickles and damage. What is wrong is refused by name, before anything is filled."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import assert_equal, load, opened_files, refused, shard, write_index
from tests.tiny import tiny_config, tiny_llama, tiny_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A TINY1 folder that the test may damage."""
    return tiny_llama(tmp_path / "model", layers=1)


# ---------------------------------------------------------------- the index and the files


def test_a_missing_shard_is_refused_by_name(model: Path) -> None:
    weight_map = shard(model)
    (model / weight_map["model.norm.weight"]).unlink()
    refused(model, weight_map["model.norm.weight"], "model.safetensors.index.json")


def test_only_files_that_the_index_names_are_opened(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weight_map = shard(model)
    save_file(tiny_weights(tiny_config(layers=1), seed=99), model / "model.safetensors")  # an old single file
    save_file({"junk": torch.ones(1)}, model / "model-00009-of-00009.safetensors")
    with opened_files() as opened:
        places, _ = load(model)
    assert_equal(places, weights)
    assert {n for n in opened if n.endswith(".safetensors")} == set(weight_map.values())


def test_a_missing_shard_is_not_replaced_by_an_old_single_file(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weight_map = shard(model)
    save_file(weights, model / "model.safetensors")
    (model / weight_map["lm_head.weight"]).unlink()
    refused(model, weight_map["lm_head.weight"])


def test_an_index_that_names_the_wrong_shard_is_refused(model: Path) -> None:
    weight_map = shard(model)
    first, second = sorted(set(weight_map.values()))
    weight_map["model.norm.weight"] = first if weight_map["model.norm.weight"] == second else second
    write_index(model, weight_map)
    refused(model, "model.norm.weight", first, second)


def test_an_index_entry_that_no_shard_holds_is_refused(model: Path) -> None:
    weight_map = shard(model)
    write_index(model, weight_map | {"model.extra": weight_map["model.norm.weight"]})
    refused(model, "model.extra", weight_map["model.norm.weight"], "does not contain")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "a/../../outside.safetensors", "..\\outside.safetensors", "ABSOLUTE", ""]
)
def test_an_index_entry_outside_the_folder_is_refused_unopened(model: Path, name: str) -> None:
    outside = model.parent / "outside.safetensors"
    save_file({"model.norm.weight": torch.zeros(64)}, outside)
    name = str(outside) if name == "ABSOLUTE" else name
    write_index(model, shard(model) | {"model.norm.weight": name})
    with opened_files() as opened:
        refused(model, repr(name), "not inside the model's folder")
    assert "outside.safetensors" not in opened


def test_a_link_that_leads_outside_the_folder_is_refused_unopened(model: Path) -> None:
    outside = model.parent / "outside.safetensors"
    shutil.move(model / "model.safetensors", outside)
    (model / "model.safetensors").symlink_to(outside)
    with opened_files() as opened:
        refused(model, "model.safetensors", "outside.safetensors")
    assert "outside.safetensors" not in opened


def test_a_link_inside_the_folder_and_a_linked_folder_are_followed(model: Path) -> None:
    (model / "data").mkdir()
    shutil.move(model / "model.safetensors", model / "data" / "w.safetensors")
    (model / "model.safetensors").symlink_to(Path("data") / "w.safetensors")
    (model.parent / "alias").symlink_to(model)
    assert_equal(load(model.parent / "alias")[0], load_file(model / "data" / "w.safetensors"))


def test_a_dangling_link_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("nowhere")
    refused(model, "model.safetensors", "nowhere", "does not exist")


def test_a_folder_named_like_a_weight_file_is_refused(model: Path) -> None:
    weight_map = shard(model)
    (model / "subdir.safetensors").mkdir()
    write_index(model, weight_map | {"model.norm.weight": "subdir.safetensors"})
    refused(model, "subdir.safetensors", "is a folder")


def test_a_folder_named_like_a_weight_file_is_no_weight_file(model: Path) -> None:
    (model / "subdir.safetensors").mkdir()
    assert_equal(load(model)[0], load_file(model / "model.safetensors"))  # nobody named it: not looked at
    (model / "model.safetensors").unlink()
    refused(model, "subdir.safetensors/")


def test_a_weight_file_of_another_name_is_not_guessed(model: Path) -> None:
    os.rename(model / "model.safetensors", model / "consolidated.safetensors")
    refused(model, "consolidated.safetensors", "guess")


class _Payload:
    """Unpickling this writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "m.pkl"])
def test_a_pickle_is_refused_by_name_and_never_opened(model: Path, name: str) -> None:
    mark = model.parent / "the payload ran"
    torch.save(_Payload(mark), model / name)
    (model / "model.safetensors").unlink()
    with opened_files() as opened:
        refused(model, name, "pickle", "safetensors")
    assert name not in opened and not mark.exists()


def test_a_pickle_named_by_the_index_is_refused_and_never_opened(model: Path) -> None:
    mark = model.parent / "the payload ran"
    torch.save(_Payload(mark), model / "pytorch_model.bin")
    write_index(model, shard(model) | {"model.norm.weight": "pytorch_model.bin"})
    with opened_files() as opened:
        refused(model, "pytorch_model.bin", "pickle")
    assert "pytorch_model.bin" not in opened and not mark.exists()


def test_a_pickle_beside_safetensors_is_left_alone(model: Path) -> None:
    torch.save(_Payload(model.parent / "the payload ran"), model / "pytorch_model.bin")
    with opened_files() as opened:
        load(model)
    assert "pytorch_model.bin" not in opened


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{", "\xff", ""]
)
def test_a_malformed_index_is_refused_with_its_name(model: Path, index: str) -> None:
    (model / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    refused(model, "model.safetensors.index.json")


# ---------------------------------------------------------------- damaged files


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(model, "model.safetensors")
    file.write_bytes(whole + b"\0")
    refused(model, "model.safetensors", "incomplete or damaged")


def test_a_git_lfs_pointer_is_named_as_such(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(model, "model.safetensors", "Git LFS pointer")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]},
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]},
        [],
        None,
    ],
)
def test_a_lying_header_is_refused(model: Path, entry: Any) -> None:
    text = json.dumps({"x": entry}).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    refused(model, "model.safetensors")
