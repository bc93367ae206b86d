"""Loading weights: every parameter is filled exactly once, from the files that are named, or nothing is.

Every fault is found on headers: in each refusal below, no fill has run.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from octavo.errors import LoadError
from octavo.model.checkpoint import safetensors_headers
from octavo.model.loader import WeightTable, load_weights
from octavo.model.readers import dummies
from octavo.model.source import ModelSource, resolve_source
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import assert_equal, load, refused, shard, wishes
from tests.tiny import tiny_config, tiny_llama, tiny_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A TINY1 folder that the test may damage."""
    return tiny_llama(tmp_path / "model", layers=1)


# ---------------------------------------------------------------- what works


def test_a_single_file_fills_every_parameter_with_its_own_tensor(tiny: Path) -> None:
    places, report = load(tiny)
    assert_equal(places, load_file(tiny / "model.safetensors"))
    assert report.tensors == len(places)
    assert report.nbytes == sum(p.nbytes for p in places.values())


def test_shards_load_to_the_same_weights_as_one_file(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    shard(model, 3)
    assert_equal(load(model)[0], weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_precision_reaches_the_layer_untouched(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_llama(tmp_path / "m", layers=1, dtype=dtype)
    seen = {}
    source, table = resolve_source(str(folder)), WeightTable()
    for name in load_file(folder / "model.safetensors"):
        table.declare(name, None, lambda t, n=name: seen.__setitem__(n, t))
    load_weights(source, table, "float32")
    assert {t.dtype for t in seen.values()} == {dtype}
    assert_equal(seen, load_file(folder / "model.safetensors"))


def test_quantised_tensors_reach_the_layer_bit_for_bit(model: Path) -> None:
    odd = {
        "a.weight": torch.randn(8, 16).to(torch.float8_e4m3fn),
        "a.qweight": torch.randint(-(2**31), 2**31 - 1, (4, 2), dtype=torch.int32),
        "a.flag": torch.tensor([True, False]),
        "a.scale": torch.tensor(0.5),  # a scalar
        "a.empty": torch.empty(0, 4),
    }
    save_file(odd, model / "model.safetensors")
    table, seen = WeightTable(), {}
    for name, tensor in odd.items():
        dtypes = (str(tensor.dtype).removeprefix("torch."),)
        table.declare(name, tuple(tensor.shape), lambda t, n=name: seen.__setitem__(n, t), dtypes=dtypes)
    load_weights(resolve_source(str(model)), table, "bfloat16")
    for name, tensor in odd.items():
        assert seen[name].dtype == tensor.dtype and seen[name].shape == tensor.shape
        assert torch.equal(
            seen[name].view(torch.uint8) if tensor.ndim else seen[name], tensor.view(torch.uint8) if tensor.ndim else tensor
        )


def test_progress_rises_to_the_total_number_of_bytes(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(tiny, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done) and done[0] == 0 and calls[-1][0] == calls[-1][1] == sum(p.nbytes for p in load(tiny)[0].values())


def test_a_load_leaves_the_number_of_threads_as_it_was(tiny: Path) -> None:
    torch.set_num_threads(2)
    try:
        load(tiny)
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            load(tiny, progress=lambda done, total: 1 // (0 if done else 1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_headers_agree_with_the_safetensors_library(tiny: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        expected = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118 - not a dict
    assert {h.name: h.shape for h in safetensors_headers(tiny / "model.safetensors")} == expected


# ---------------------------------------------------------------- the head


def test_a_tied_model_needs_no_lm_head(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", layers=1, tie=True)
    places, report = load(folder)
    assert "lm_head.weight" not in places and report.skipped == ()


def test_a_tied_model_ignores_an_lm_head_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "m", layers=1, tie=True)
    weights = tiny_weights(tiny_config(layers=1, tie=False))
    save_file(weights, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        places, report = load(folder)
    assert report.skipped == ("lm_head.weight",)
    assert "lm_head.weight" in caplog.text and "tie_word_embeddings" in caplog.text
    assert_equal(places, weights)


def test_an_untied_model_without_lm_head_is_refused(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors")
    refused(model, "missing: lm_head.weight", "tie_word_embeddings")


def test_a_model_that_forgot_to_ask_for_its_untied_lm_head_is_refused(model: Path) -> None:
    refused(model, "unexpected: lm_head.weight", config=tiny_config(layers=1, tie=True), tied=False)


# ---------------------------------------------------------------- tensors that do not fit


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, model / "model.safetensors")
    refused(model, "model.norm.weight", "[65]", "[64]", "model.safetensors")


def test_a_transposed_tensor_is_refused(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].T.contiguous()
    save_file(weights, model / "model.safetensors")
    refused(model, name, "[160, 64]", "[64, 160]")


def test_an_unexpected_tensor_is_refused(model: Path) -> None:
    weights = load_file(model / "model.safetensors") | {"model.layers.0.mlp.router.weight": torch.ones(4)}
    save_file(weights, model / "model.safetensors")
    refused(model, "unexpected: model.layers.0.mlp.router.weight")


def test_layers_beyond_the_config_are_unexpected(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", layers=2)
    refused(folder, "unexpected", "model.layers.1.", config=tiny_config(layers=1))


def test_layers_missing_from_the_files_are_refused(model: Path) -> None:
    refused(model, "missing", "model.layers.1.", "and 4 more", config=tiny_config(layers=2))


def test_a_tensor_that_the_architecture_knows_and_does_not_use_is_skipped(model: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(model / "model.safetensors") | {name: torch.ones(8)}, model / "model.safetensors")
    _, report = load(model, ignored=lambda n: n.endswith("rotary_emb.inv_freq"))
    assert report.skipped == (name,)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_a_quantised_tensor_where_floats_are_wanted_is_refused(model: Path, dtype: torch.dtype) -> None:
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = torch.zeros(64, 64).to(dtype)
    save_file(weights, model / "model.safetensors")
    refused(model, name, str(dtype).removeprefix("torch."), "unquantised")


def test_a_float_tensor_where_a_quantised_one_is_wanted_is_refused(model: Path) -> None:
    table = WeightTable()
    table.declare("lm_head.weight", (512, 64), lambda t: pytest.fail("filled"), dtypes=("float8_e4m3fn",))
    with pytest.raises(LoadError, match=r"lm_head.weight is float32.*needs float8_e4m3fn"):
        load_weights(resolve_source(str(model)), table, "float32", ignored=lambda n: n != "lm_head.weight")


def test_all_faults_of_a_checkpoint_are_told_at_once(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["stray"] = weights.pop("lm_head.weight")
    weights["model.norm.weight"] = torch.ones(1)
    save_file(weights, model / "model.safetensors")
    refused(model, "model.norm.weight", "missing: lm_head.weight", "unexpected: stray")


# ---------------------------------------------------------------- exactly once


def test_a_name_cannot_be_declared_twice() -> None:
    table = WeightTable()
    table.declare("x", (1,), lambda t: None)
    with pytest.raises(LoadError, match="'x' was declared twice"):
        table.declare("x", (1,), lambda t: None)


def test_a_tensor_cannot_be_filled_twice() -> None:
    table, seen = WeightTable(), []
    table.declare("x", (1,), seen.append)
    table.fill("x", torch.ones(1))
    with pytest.raises(LoadError, match="'x' was filled twice"):
        table.fill("x", torch.ones(1))
    assert len(seen) == 1


def test_a_tensor_that_stayed_empty_is_an_error_at_the_end() -> None:
    table = WeightTable()
    table.declare("x", (1,), lambda t: None)
    table.declare("y", (1,), lambda t: None, optional=True)
    with pytest.raises(LoadError, match="not filled: x"):
        table.verify()


def test_an_optional_tensor_is_filled_once_where_it_is_there(model: Path) -> None:
    table, seen = WeightTable(), []
    for name in load_file(model / "model.safetensors"):
        table.declare(name, None, seen.append, optional=True)
    table.declare("model.layers.0.self_attn.k_scale", (), seen.append, optional=True)
    load_weights(resolve_source(str(model)), table, "float32")
    assert len(seen) == len(load_file(model / "model.safetensors"))


def test_a_tensor_in_two_shards_is_refused(model: Path) -> None:
    weight_map = shard(model)
    file = model / weight_map["model.norm.weight"]
    other = next(f for f in sorted(set(weight_map.values())) if f != file.name)
    save_file(load_file(model / other) | {"model.norm.weight": torch.zeros(64)}, model / other)
    refused(model, "model.norm.weight", file.name, other, "twice")


# ---------------------------------------------------------------- dummy weights


def dummy(source: ModelSource, seed: int = 0) -> dict[str, torch.Tensor]:
    table, places = wishes(source.config)
    load_weights(source, table, "float32", load_format="dummy", seed=seed)
    return places


def test_dummy_weights_need_no_file_are_finite_and_depend_on_the_seed_alone(model: Path) -> None:
    (model / "model.safetensors").unlink()
    source = resolve_source(str(model))
    first, again, other = dummy(source), dummy(source), dummy(source, seed=1)
    assert all(torch.isfinite(t).all() for t in first.values())
    assert_equal(first, again)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(first["model.layers.0.mlp.gate_proj.weight"], first["model.layers.0.mlp.up_proj.weight"])


def test_dummy_weights_respect_the_declared_dtypes_and_need_a_shape(model: Path) -> None:
    table, seen = WeightTable(), {}
    wanted = {"q": ("int32",), "w": ("float8_e4m3fn",), "s": ("float32",), "plain": ()}
    for name, dtypes in wanted.items():
        table.declare(name, (2, 4), lambda t, n=name: seen.__setitem__(n, t), dtypes=dtypes)
    load_weights(resolve_source(str(model)), table, "bfloat16", load_format="dummy")
    assert {n: t.dtype for n, t in seen.items()} == {
        "q": torch.int32, "w": torch.float8_e4m3fn, "s": torch.float32, "plain": torch.bfloat16,
    }  # fmt: skip
    table.declare("any", None, lambda t: None)
    with pytest.raises(LoadError, match="'any' was declared without a shape"):
        load_weights(resolve_source(str(model)), table, "bfloat16", load_format="dummy")


def test_a_load_format_that_the_files_do_not_have_is_refused(model: Path, demo_path: Path) -> None:
    refused(model, "load_format is 'gguf'", "safetensors", load_format="gguf")
    with pytest.raises(LoadError, match=r"load_format is 'safetensors'.*gguf"):
        load_weights(resolve_source("demo"), WeightTable(), "float32", load_format="safetensors")


def test_dummies_of_64_bits_are_numbers_of_things_that_there_are() -> None:
    """A table of experts by token id, of which random bits would name none."""
    ((_, made),) = dummies([("layers.0.ffn.gate.tid2eid", (5, 3), "int64")], seed=0)
    assert made.dtype == torch.int64 and made.tolist() == [[0, 1, 2]] * 5
