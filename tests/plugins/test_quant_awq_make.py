"""Making AWQ checkpoints: the arithmetic against its definition, the result against the model, and what is refused.

The quality on a real model is in benchmarks/RESULTS.md; here two layers of it, judged by the hidden states that come out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.cli.quantize import maker, parse_options, quantize
from octavo.config import EngineConfig
from octavo.errors import ConfigError, QuantizeError
from octavo.plugins import discover
from safetensors.torch import load_file, save_file

from tests.plugins.fourbit import Installed, mixture_of_experts
from tests.tiny import tiny_config, tiny_llama, tiny_weights, write_text_files

TEXT = (Path(__file__).parents[1] / "data" / "calibration.txt").read_text()
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with Installed(tmp_path_factory.mktemp("site")):
        yield


def make(model: Path | str, out: Path, *settings: str, text: str | None = TEXT[:3000], tell: Any = None) -> dict[str, Any]:
    catalog = discover()
    entry, function = maker(catalog, "awq")
    assert entry.provider is not None
    options = parse_options("awq", entry.provider.quantize_options, settings)
    config = EngineConfig(model=str(model), device="cpu")
    return quantize(config, catalog, function, options, out, text, tell or (lambda stage, done=0, total=0: None))


def greedy(model: Path) -> list[int]:
    llm = LLM(str(model), device="cpu", num_threads=1, dtype="float32")
    (result,) = llm.generate([[1, 2, 3, 40, 50]], SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    return list(result.outputs[0].token_ids)


# ---------------------------------------------------------------- arithmetic


def test_rounding_is_by_group_and_exact_where_the_weights_are_on_the_grid() -> None:
    from octavo_quant_awq.make.rounding import round_groups

    q = torch.randint(0, 16, (6, 4, 32)).float()
    q[..., 0], q[..., 1] = 0, 15  # each group spans its whole range
    z, s = torch.randint(0, 16, (6, 4, 1)).float(), torch.tensor(0.125)
    found = round_groups(((q - z) * s).flatten(1), 32, zero_point=True)
    assert torch.equal(found[0], q) and torch.equal(found[1], z) and bool((found[2] == s).all())


def test_symmetric_rounding_keeps_8_as_zero() -> None:
    from octavo_quant_awq.make.rounding import round_groups, rounded

    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    q, z, _ = round_groups(w, 32, zero_point=False)
    assert bool((z == 8).all()) and q.min() >= 0 and q.max() <= 15
    assert float((rounded(w, 32, zero_point=False) - w).abs().max()) <= float(w.abs().max()) / 7.5


def test_a_scale_has_a_geometric_middle_of_one_and_follows_the_activations() -> None:
    from octavo_quant_awq.make.rounding import scale_for

    activation = torch.tensor([1.0, 4.0, 16.0, 64.0])
    s = scale_for(0.5, activation, torch.ones(4))
    assert torch.allclose(s, activation.sqrt() / 8**0.5, atol=1e-3)
    assert torch.allclose(s.max() * s.min(), torch.tensor(1.0), atol=1e-5)


def test_a_clip_never_makes_the_products_of_a_group_worse() -> None:
    from octavo_quant_awq.make.rounding import clip, rounded

    generator = torch.Generator().manual_seed(5)
    w, x = torch.randn(16, 128, generator=generator), torch.randn(200, 128, generator=generator)
    w[:, ::32] *= 6  # one weight of each group is far out

    def errors(weight: torch.Tensor) -> torch.Tensor:
        change = (rounded(weight, 32, zero_point=True) - w).unflatten(1, (-1, 32))
        return torch.einsum("tgi,rgi->trg", x.unflatten(1, (-1, 32)), change).square().sum(0)

    for tokens in (200, 20):  # more tokens than a group has inputs, and fewer: two ways to the same sum
        found = clip(w, x[:tokens], 32, zero_point=True)
        x_used = x
        x = x[:tokens]
        assert bool((errors(found) <= errors(w) * (1 + 1e-4)).all())
        x = x_used
    assert float(errors(clip(w, x, 32, zero_point=True)).sum()) < float(errors(w).sum())


# ---------------------------------------------------------------- the checkpoint


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie": True},
        {"num_key_value_heads": 4},
        MIXTRAL,
    ],
    ids=["gqa", "biases", "tied", "mha", "experts"],
)
def test_folded_scales_leave_the_function_of_the_model_as_it_was(over: dict[str, Any], tmp_path: Path) -> None:
    """Whatever scales the search finds: with weights rounded so finely that rounding does not show, the new checkpoint is the
    old model. The rounding is replaced by none, and the folded weights are read back."""
    from octavo_quant_awq.make import command

    config = tiny_config(**SHAPE, **over)
    source = tmp_path / "model"
    source.mkdir()
    weights = tiny_weights(config)
    if "num_local_experts" in config:
        weights = mixture_of_experts(weights, 64, 192, layers=config["num_hidden_layers"])
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    write_text_files(source)
    exact: dict[str, torch.Tensor] = {}
    module = command._Making._module

    def keep(self: Any, group: Any, one: Any, columns: Any, rows: Any, seen: Any) -> dict[str, torch.Tensor]:
        weight = self._model.tensors(f"{one.name}.weight").float()
        weight = weight if columns is None else weight * columns
        exact[f"{one.name}.weight"] = weight if rows is None else command._divide_rows(weight, rows)
        made = module(self, group, one, columns, rows, seen)
        return {name: t for name, t in made.items() if name.endswith(".bias")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command._Making, "_module", keep)
        make(source, tmp_path / "out", "group_size=32", "window=48")
    folded = load_file(tmp_path / "out" / "model.safetensors") | exact
    assert any(not torch.equal(folded[name], t) for name, t in load_file(source / "model.safetensors").items() if "norm" in name)
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(folded, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps(config))
    write_text_files(whole)
    assert greedy(whole) == greedy(source)


def test_the_result_is_an_autoawq_checkpoint_and_loads(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "model", **SHAPE)
    made = make(source, tmp_path / "out", "group_size=32", "window=48", "skip=layers.0.mlp.down_proj")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["layers.0.mlp.down_proj"],
    }  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    shapes = {
        end: (tensors[f"{name}.{end}"].dtype, list(tensors[f"{name}.{end}"].shape)) for end in ("qweight", "qzeros", "scales")
    }
    assert shapes == {
        "qweight": (torch.int32, [192, 8]), "qzeros": (torch.int32, [6, 8]), "scales": (torch.float16, [6, 64]),
    }  # fmt: skip
    assert "model.layers.0.mlp.down_proj.weight" in tensors and f"{name}.weight" not in tensors
    assert made["report"]["bits a weight"] == pytest.approx(4 + 20 / 32)
    assert len(greedy(tmp_path / "out")) == 10


def test_a_window_is_never_longer_than_the_models_context(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "model", max_position_embeddings=64)
    report = make(source, tmp_path / "out", "group_size=32", "window=4000", "samples=3")["report"]
    assert report["calibration tokens"] == 3 * 64


def test_without_a_search_it_needs_no_text(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "model", **SHAPE)
    make(source, tmp_path / "out", "group_size=-1", "search=false", "zero_point=false", text=None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors["model.layers.0.mlp.up_proj.qzeros"].unique().tolist()) == {-2004318072}  # 0x88888888
    with pytest.raises(QuantizeError, match="--calibrate"):
        make(source, tmp_path / "other", "group_size=32", text=None)


@pytest.mark.parametrize("stage", ["observing", "searching scales", "rounding"])
def test_what_was_interrupted_goes_on_to_the_same_checkpoint(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_quant_awq.make import command

    monkeypatch.setattr(command, "PASS_TOKENS", {"cpu": 4 * 48})
    source = tiny_llama(tmp_path / "model", **SHAPE)
    settings = ("group_size=32", "window=48", "samples=3")
    make(source, tmp_path / "right", *settings)
    done: list[str] = []

    def stop(name: str, at: int = 0, total: int = 0) -> None:
        done.append(name)
        if name == stage and at >= (0 if stage == "observing" else 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(source, tmp_path / "out", *settings, tell=stop)
    assert not (tmp_path / "out").exists()
    stages: list[str] = []
    make(source, tmp_path / "out", *settings, tell=lambda name, at=0, total=0: stages.append(name))
    before = ("observing", "searching scales", "rounding").index(stage)
    assert not {"observing", "searching scales"} & set(stages) or before < 2
    if before == 1:
        assert "observing" not in stages
    right, found = (load_file(tmp_path / name / "model.safetensors") for name in ("right", "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items()) and found.keys() == right.keys()
    assert not list(tmp_path.glob(".*"))


def test_unfinished_work_of_other_settings_is_refused(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "model", **SHAPE)

    def stop(name: str, at: int = 0, total: int = 0) -> None:
        if name == "rounding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(source, tmp_path / "out", "group_size=32", "window=48", tell=stop)
    with pytest.raises(QuantizeError, match=r"\.out\.awq: holds an unfinished checkpoint of other settings"):
        make(source, tmp_path / "out", "group_size=64", "window=48")


# ---------------------------------------------------------------- refusals


def test_inputs_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    """SmolLM2's 576 inputs and groups of 128."""
    config = tiny_config(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    write_text_files(folder)
    wrong = r"layers\.0\.self_attn\.q_proj: its 576 inputs do not divide into groups of 128"
    with pytest.raises(QuantizeError, match=rf"{wrong}; give --group-size 64 or 32 or -1, .*\(--skip self_attn\.q_proj\)$"):
        make(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_module_to_skip_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with pytest.raises(
        QuantizeError, match=r"--skip mlp\.down: no module of this model is called so; there are .*mlp\.down_proj"
    ):
        make(model, tmp_path / "out", "group_size=32", "search=false", "skip=lm_head,mlp.down")
    assert not (tmp_path / "out").exists()
    report = make(model, tmp_path / "out", "group_size=32", "search=false", "skip=lm_head,layers.1,mlp.down_proj")["report"]
    assert report["matrices"] == 6


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"group_size.*must be one of 32, 64, 128, -1"):
        make(tmp_path, tmp_path / "out", "group_size=48")


def test_a_mixture_of_experts_is_made_and_loads(tmp_path: Path) -> None:
    """Routers stay plain, and what each expert's down is scaled by is divided out of its up: experts that no token of the text takes are rounded."""
    config = tiny_config(**SHAPE, **MIXTRAL)
    weights = mixture_of_experts(tiny_weights(config), 64, 192, layers=config["num_hidden_layers"])
    folder, out = tmp_path / "moe", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    write_text_files(folder)
    make(folder, out, "group_size=32", "samples=2", "window=64")
    made = json.loads((out / "config.json").read_text())["quantization_config"]
    assert made["modules_to_not_convert"] == ["gate"]
    stored = load_file(out / "model.safetensors")
    router = "model.layers.0.block_sparse_moe.gate.weight"
    torch.testing.assert_close(stored[router].float(), weights[router])
    assert stored["model.layers.1.block_sparse_moe.experts.3.w2.qweight"].shape == (192, 8)
    assert len(greedy(out)) == 10


def test_experts_stacked_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config(
        **SHAPE, architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2
    )
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    write_text_files(folder)
    with pytest.raises(QuantizeError, match=r"layers\.0\..*4 experts stacked in one tensor"):
        make(folder, tmp_path / "out", "group_size=32")


# ---------------------------------------------------------------- structure


def test_heads_that_share_a_v_head_share_their_scale() -> None:
    from octavo_quant_awq.make.structure import Group, Module

    o = Group((Module("o_proj", 4, 8),), "rows", "v_proj", "o_proj", repeat=2, width=2)  # 2 v heads of 2, 4 heads
    tied = o.tied(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
    assert tied.tolist() == [2, 3, 2, 3, 6, 7, 6, 7]
    assert o.of_rows(tied).tolist() == [2, 3, 6, 7]


def test_what_scales_fold_into_by_family() -> None:
    from octavo_quant_awq.make.structure import Module, describe

    def fold(linear: tuple[Module, ...], others: tuple[tuple[Module, ...], ...], norms: set[str]) -> tuple[Any, ...]:
        (first, *_) = describe((linear, *others), norms, v=(2, 16))
        return first.fold, first.source, first.judge

    down, up = Module("l.0.mlp.down_proj", 64, 192), Module("l.0.mlp.up_proj", 192, 64)
    gate_up, gate = Module("l.0.mlp.gate_up_proj", 384, 64), Module("l.0.mlp.gate_proj", 192, 64)
    post, pre = "l.0.post_attention_layernorm.weight", "l.0.pre_feedforward_layernorm.weight"
    assert fold((gate, up), ((down,),), {post}) == ("norm", post, down.name)
    assert fold((gate, up), ((down,),), {post, pre}) == ("norm", pre, down.name)  # Gemma 2: the other norms an output
    assert fold((gate_up,), ((down,),), {post}) == ("norm", post, down.name)
    assert fold((down,), ((gate_up,),), set()) == ("rows", gate_up.name, down.name)
    q, v, o = (Module(f"l.0.self_attn.{n}_proj", rows, 64) for n, rows in (("q", 64), ("v", 32), ("o", 64)))
    qkv = Module("l.0.self_attn.qkv_proj", 128, 64)
    assert fold((o,), ((q, v),), set()) == ("rows", v.name, o.name)
    assert fold((o,), ((qkv,),), set()) == ("rows", qkv.name, o.name)
    assert fold((Module("l.0.mixer.in_proj", 8, 8),), (), set())[0] is None
