"""FP8 checkpoints of every dialect on a CPU: what is loaded, what is computed, what is refused."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.catalog import Accept, Device, Needs
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.errors import LoadError, OctavoError
from octavo.interfaces import Activation, QuantizerParts
from octavo.plugins import discover
from octavo.testing.bare_model import DictWeights
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.harness import request, run
from tests.plugins.fp8 import DIALECTS, INPUT_SCALE, by_block, by_channel, by_tensor, compressed, inputs, round_e4m3, write_fp8
from tests.tiny import tiny_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

from octavo_quant_fp8 import provider
from octavo_quant_fp8.operators import TorchOperators
from octavo_quant_fp8.quantizer import Fp8Quantizer

PROMPT = [1, 20, 300, 41, 260, 7, 99, 411, 23, 8, 150, 377]
WEIGHTS_ONLY = {"quantizer": {"fp8": {"activations": "none"}}}


def engine(model: Path | str, **options: Any) -> Engine:
    plugins = options.pop("plugins", {})
    config = EngineConfig(
        model=str(model),
        plugins=plugins,
        **{"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 128, **options},
    )
    return build_engine(config, discover(plugins, extra_modules=["octavo_quant_fp8"]))


def logprobs(made: Engine) -> list[float]:
    """Of the tokens of PROMPT, then of those that follow greedily."""
    outcome = run(made, [request(made, "r", PROMPT, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)])["r", 0]
    prompt = [p for event in outcome.events for p in event.prompt_logprobs or () if p is not None]
    following = [p for event in outcome.events for p in event.logprobs or ()]
    return [p.logprob for p in (*prompt, *following)]


# ---------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than one block in every direction, and no multiple of it: q has 192 rows, k and v 96, inner 200."""
    folder = tmp_path_factory.mktemp("fp8") / "model"
    return tiny_llama(folder, hidden_size=192, intermediate_size=200, head_dim=48, std=0.08)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_checkpoint_means_its_dequantised_weights(dialect: str, model: Path, tmp_path: Path) -> None:
    stored = write_fp8(model, tmp_path / "fp8", dialect, plain=tmp_path / "plain")
    got, want = logprobs(engine(stored, plugins=WEIGHTS_ONLY)), logprobs(engine(tmp_path / "plain"))
    assert len(want) == len(PROMPT) - 1 + 8
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=2e-4)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_with_quantised_activations_a_checkpoint_stays_near(dialect: str, model: Path, tmp_path: Path) -> None:
    stored = write_fp8(model, tmp_path / "fp8", dialect, plain=tmp_path / "plain")
    got, want = torch.tensor(logprobs(engine(stored))), torch.tensor(logprobs(engine(tmp_path / "plain")))
    near = (got - want)[: len(PROMPT) - 1].abs().mean()
    assert near < 0.25, near
    assert (near < 1e-4) == (dialect == "compressed-weights-only"), near


def test_plain_weights_are_quantised_while_they_load(model: Path, tmp_path: Path) -> None:
    write_fp8(model, tmp_path / "fp8", "compressed-channel", plain=tmp_path / "plain")
    made = engine(model, quantization="fp8", plugins=WEIGHTS_ONLY)
    assert made.explain["decisions"]["quantizer"]["chosen"] == "fp8"
    torch.testing.assert_close(
        torch.tensor(logprobs(made)), torch.tensor(logprobs(engine(tmp_path / "plain"))), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_quantised_where_the_options_say_so(tied: bool, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=192, intermediate_size=200, head_dim=48, std=0.08, tie=tied)
    plain = tmp_path / "plain"
    write_fp8(folder, tmp_path / "fp8", "compressed-channel", plain=plain)
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"] = by_channel(tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])[1].float()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": False}))
    options = {"quantizer": {"fp8": {"activations": "none", "head": True}}}
    got = torch.tensor(logprobs(engine(folder, quantization="fp8", plugins=options)))
    torch.testing.assert_close(got, torch.tensor(logprobs(engine(plain))), rtol=0, atol=2e-4)
    assert not torch.allclose(got, torch.tensor(logprobs(engine(folder, quantization="fp8", plugins=WEIGHTS_ONLY))), atol=1e-3)


def test_loading_never_holds_a_second_copy(model: Path) -> None:
    """Each plain matrix is let go before the next one comes: a fill keeps no reference to what it was given."""
    import weakref

    weights = DictWeights()
    quantizer = Fp8Quantizer(provider.Fp8Options(), QuantizerParts(Device(), "bfloat16", {}, weights))
    quantizer.linear("m", 64, {"q_proj": 32, "k_proj": 16})
    for name in ("m.q_proj.weight", "m.k_proj.weight"):
        shape, fill, _ = weights.declared[name]
        tensor = torch.randn(shape or ())
        fill(tensor)
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None


def test_q_and_k_that_the_checkpoint_left_alone_are_plain(model: Path, tmp_path: Path) -> None:
    """re: patterns, and a fused layer whose parts are stored in different formats."""
    stored = write_fp8(model, tmp_path / "fp8", "compressed-channel")
    tensors = load_file(stored / "model.safetensors")
    original = load_file(model / "model.safetensors")
    for name in list(tensors):
        if ".q_proj." in name or ".1.mlp." in name:
            del tensors[name]
            tensors |= {n: t for n, t in original.items() if n.startswith(name.rsplit(".", 1)[0] + ".")}
    from safetensors.torch import save_file

    save_file(tensors, stored / "model.safetensors")
    facts = json.loads((stored / "config.json").read_text())
    facts["quantization_config"]["ignore"] = ["lm_head", "re:.*self_attn[.]q_proj", "model.layers.1.mlp"]
    (stored / "config.json").write_text(json.dumps(facts))
    assert len(logprobs(engine(stored))) == len(PROMPT) - 1 + 8


# ---------------------------------------------------------------- one Linear


def linear(
    config: dict[str, Any], tensors: dict[str, Tensor], parts: dict[str, int], width: int, dtype: str = "float32", **kw: Any
) -> Any:
    weights = DictWeights()
    made = Fp8Quantizer(provider.Fp8Options(), QuantizerParts(Device(), dtype, config, weights)).linear("m", width, parts, **kw)
    weights.fill(tensors, lambda name: False)
    made.finish()
    return made


def named(part: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"m.{part}.{key}": value for key, value in stored.items()}


def test_each_part_of_a_fused_layer_keeps_its_own_scale() -> None:
    """q, k and v with scales 0.5, 1 and 2: no slot is left uninitialised, none takes another's."""
    torch.manual_seed(0)
    parts, tensors, dense = {"q_proj": 6, "k_proj": 2, "v_proj": 2}, {}, []
    for (part, rows), scale in zip(parts.items(), (0.5, 1.0, 2.0), strict=True):
        values = round_e4m3(torch.randn(rows, 16) * 50)
        tensors |= named(part, {"weight": values.float().to(torch.float8_e4m3fn), "weight_scale": torch.tensor(scale)})
        dense.append(values * scale)
    made = linear(compressed("tensor", None), tensors, parts, 16)
    x = torch.randn(3, 16)
    torch.testing.assert_close(made(x).double(), x.double() @ torch.cat(dense).T, rtol=1e-5, atol=1e-3)


def test_a_layer_that_is_fused_in_the_checkpoint_has_one_scale_for_all_its_rows() -> None:
    stored, meant = by_tensor(torch.randn(24, 16))
    made = linear(compressed("tensor", None), named("qkv_proj", stored), {"qkv_proj": 24}, 16)
    x = torch.randn(3, 16)
    torch.testing.assert_close(made(x).double(), x.double() @ meant.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight_scale", "input_scale"])
def test_a_scale_that_is_not_positive_and_finite_is_refused_by_name(bad: float, where: str) -> None:
    stored, _ = by_tensor(torch.randn(8, 16), input_scale=INPUT_SCALE)
    stored[where] = torch.tensor([bad])
    with pytest.raises(LoadError, match=f"m.down_proj.{where} has the value"):
        linear(compressed("tensor", inputs("tensor", dynamic=False)), named("down_proj", stored), {"down_proj": 8}, 16)


def test_one_bad_channel_or_block_among_many_is_refused() -> None:
    stored, _ = by_channel(torch.randn(8, 16))
    stored["weight_scale"][5] = 0
    with pytest.raises(LoadError, match=r"m.down_proj.weight_scale has the value 0.0 \(1 of 8\)"):
        linear(compressed("channel", None), named("down_proj", stored), {"down_proj": 8}, 16)
    stored, _ = by_block(torch.randn(200, 140))
    stored["weight_scale_inv"][1, 1] = float("nan")
    with pytest.raises(LoadError, match=r"m.down_proj.weight_scale_inv has the value nan \(1 of 4\)"):
        linear(DIALECTS["block"][0], named("down_proj", stored), {"down_proj": 200}, 140)


def test_a_missing_scale_is_a_load_error_that_names_it(model: Path, tmp_path: Path) -> None:
    stored = write_fp8(model, tmp_path / "fp8", "compressed-tensor")
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    from safetensors.torch import save_file

    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(LoadError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight_scale"):
        engine(stored)


def test_static_inputs_take_the_largest_scale_of_the_parts_and_saturate() -> None:
    torch.manual_seed(1)
    a, meant_a = by_tensor(torch.randn(8, 16), input_scale=torch.tensor([0.01]))
    b, meant_b = by_tensor(torch.randn(8, 16), input_scale=torch.tensor([0.02]))
    made = linear(compressed("tensor", inputs("tensor", dynamic=False)), named("a", a) | named("b", b), {"a": 8, "b": 8}, 16)
    x = torch.randn(4, 16)
    x[0, 3] = 1000.0  # past 448 * 0.02
    seen = round_e4m3(x.double() / torch.tensor(0.02).double()) * torch.tensor(0.02).double()
    torch.testing.assert_close(made(x).double(), seen @ torch.cat((meant_a, meant_b)).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dynamic_inputs_are_quantised_by_token(dtype: str) -> None:
    torch.manual_seed(2)
    stored, meant = by_channel(torch.randn(24, 200))
    bias = torch.randn(24)
    made = linear(compressed("channel", inputs("token")), named("a", stored | {"bias": bias}), {"a": 24}, 200, dtype, bias=True)
    x = (torch.randn(5, 200) * torch.tensor([[1e-3], [1.0], [50.0], [0.0], [3.0]])).to(getattr(torch, dtype))
    scale = x.double().abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
    want = (round_e4m3(x.double() / scale) * scale) @ meant.T + bias.double()
    got = made(x)
    assert made.activation == "fp8_token" and got.dtype == x.dtype
    torch.testing.assert_close(got.double(), want, rtol=1.6e-2 if dtype == "bfloat16" else 2e-3, atol=1e-3)


def test_a_norm_and_a_gate_hand_their_linear_the_format_that_it_asks_for() -> None:
    """The fused route gives what the plain one gives, for rows and for groups of 128 channels."""
    torch.manual_seed(3)
    ops = TorchOperators(None, None).ops  # type: ignore[arg-type]
    for config, store in ((compressed("channel", inputs("token")), by_channel), (DIALECTS["block"][0], by_block)):
        stored, _ = store(torch.randn(40, 200))
        made = linear(config, named("a", stored), {"a": 40}, 200)
        x, residual, weight = torch.randn(3, 200), torch.randn(3, 200), torch.rand(200)
        normed = torch.rms_norm(x + residual, (200,), weight, 1e-5)
        fused, total = ops["add_rms_norm", made.activation](x, residual.clone(), weight, 1e-5)
        assert isinstance(fused, Activation) and fused.data.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(made(fused), made(normed), rtol=1e-2, atol=5e-2)
        gate_up = torch.randn(3, 400)
        gated = torch.nn.functional.silu(gate_up[:, :200]) * gate_up[:, 200:]
        torch.testing.assert_close(made(ops["silu_mul", made.activation](gate_up)), made(gated), rtol=1e-2, atol=5e-2)


def test_what_is_past_the_range_saturates_and_what_is_not_a_number_stays_one() -> None:
    from octavo_quant_fp8.numerics import quantise_rows, quantise_static, to_e4m3

    values = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf"), float("nan")])
    got = to_e4m3(values).float()
    assert got[:6].tolist() == [448, 448, 448, 448, -448, 448] and got[6].isnan()
    assert quantise_static(torch.tensor([930.0]), torch.tensor([2.0])).float().tolist() == [448.0]
    rows = torch.ones(3, 4)
    rows[1, 2], rows[2, 2] = float("nan"), float("inf")
    data, scale = quantise_rows(rows)
    assert (data.float() * scale).isnan().any(1).tolist() == [False, True, True], "a bad row must not look like a good one"


def test_fbgemm_bounds_what_a_row_may_reach() -> None:
    stored, _ = by_channel(torch.eye(4, 16))
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 100.0}
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 5000.0, 1.0
    got = linear(config, named("a", stored), {"a": 4}, 16)(x)
    torch.testing.assert_close(got[0, :2], torch.tensor([100.0, 1.0]), rtol=0.04, atol=0)


# ---------------------------------------------------------------- the KV cache


def test_kv_scales_come_from_the_checkpoint(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three spellings; scales that make a difference: with 1e-3 every key saturates at 0.448."""
    fine = logprobs(engine(model))
    for names in (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)):
        for value, differs in ((0.02, False), (1e-3, True)):
            extra = {f"model.layers.{i}.self_attn.{name}": torch.tensor([value]) for i in range(2) for name in names}
            folder = tmp_path / f"{names[0]}-{value}"
            made = engine(with_tensors(model, folder, extra), kv_cache_dtype="fp8_e4m3")
            error = (torch.tensor(logprobs(made)) - torch.tensor(fine))[: len(PROMPT) - 1].abs().mean()
            assert bool(error > 0.3) == differs, (names, value, error)
    assert "1.0 is used" not in caplog.text


def with_tensors(source: Path, folder: Path, extra: dict[str, Tensor]) -> Path:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(source, folder)
    save_file(load_file(source / "model.safetensors") | extra, folder / "model.safetensors")
    return folder


def test_without_kv_scales_they_are_one_and_a_warning_says_so_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine(model, kv_cache_dtype="fp8_e4m3")
    assert [r.getMessage() for r in caplog.records if "no KV scales" in r.getMessage()].__len__() == 1
    caplog.clear()
    engine(model)
    assert "KV scales" not in caplog.text


@pytest.mark.parametrize(("value", "match"), [(0.0, "positive"), (float("nan"), "positive"), ([1.0, 2.0, 3.0], "3 values")])
def test_a_wrong_kv_scale_is_refused_by_name(value: Any, match: str, model: Path, tmp_path: Path) -> None:
    folder = with_tensors(model, tmp_path / "m", {"model.layers.1.self_attn.k_scale": torch.tensor(value)})
    with pytest.raises(LoadError, match=rf"model\.layers\.1\.self_attn\.k_scale .*{match}"):
        engine(folder)


def test_two_names_that_disagree_about_one_cache_are_refused(model: Path, tmp_path: Path) -> None:
    names = {"k_scale": 0.5, "kv_scale": 0.25}
    folder = with_tensors(model, tmp_path / "m", {f"model.layers.0.self_attn.{n}": torch.tensor(v) for n, v in names.items()})
    with pytest.raises(LoadError, match="says"):
        engine(folder)


def test_scales_of_each_head_count_by_their_largest(model: Path, tmp_path: Path) -> None:
    both = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.01, 0.02]),
        "model.layers.0.self_attn.v_scale": torch.tensor(0.02),
    }
    one = {name: torch.tensor(0.02) for name in both}
    got = logprobs(engine(with_tensors(model, tmp_path / "a", both), kv_cache_dtype="fp8_e4m3"))
    assert got == logprobs(engine(with_tensors(model, tmp_path / "b", one), kv_cache_dtype="fp8_e4m3"))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_head_whose_own_scale_is_smaller_loses_nothing_by_the_largest(kind: torch.dtype) -> None:
    """A float keeps its mantissa at any size: only a head a thousand times smaller than the largest would run out of exponents."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    most = torch.finfo(kind).max
    own = float(values.abs().max()) / most

    def error(scale: float) -> float:
        held = (values / scale).clamp(-most, most).float().to(kind).double() * scale
        return float((held - values).norm() / values.norm())

    for larger in (1.7, 8.0, 100.0, 1000.0):
        assert error(own * larger) < 1.02 * error(own), larger


def test_an_fp8_cache_takes_half_the_bytes_of_bfloat16(model: Path) -> None:
    blocks = {
        kind: engine(model, dtype="bfloat16", kv_cache_dtype=kind, kv_cache_memory_bytes=8 << 20).info.num_blocks
        for kind in ("auto", "fp8_e4m3", "fp8_e5m2")
    }
    assert blocks["fp8_e4m3"] == blocks["fp8_e5m2"]
    assert abs(blocks["fp8_e4m3"] - 2 * blocks["auto"]) <= 2  # one block of each pool is nobody's


def test_a_checkpoint_with_a_kv_cache_scheme_has_an_fp8_cache_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.{n}": torch.tensor([0.05]) for i in range(2) for n in ("k_scale", "v_scale")}
    folder = write_fp8(
        model, tmp_path / "fp8", "compressed-channel", extra=extra, kv_cache_scheme=inputs("tensor", dynamic=False)
    )
    told = engine(folder).explain["values"]["kv_cache_dtype"]
    assert told["value"] == "float8_e4m3fn" and "checkpoint" in told["why"]
    assert engine(folder, kv_cache_dtype="float32").explain["values"]["kv_cache_dtype"]["value"] == "float32"


# ---------------------------------------------------------------- the plan


def test_an_unknown_format_names_what_each_quantizer_said(model: Path, tmp_path: Path) -> None:
    folder = write_fp8(model, tmp_path / "fp8", "compressed-channel", format="marlin-24")
    with pytest.raises(OctavoError, match=r"fp8 .*format 'marlin-24' is not FP8"):
        engine(folder)


def test_room_for_the_cache_is_what_quantised_weights_leave(model: Path) -> None:
    """A GPU's pool is sized before a weight is read: half of bfloat16's bytes for what will be FP8."""
    from octavo.engine.sizing import estimate_weight_bytes, linear_parameters
    from octavo.model.adapters import DecoderAdapter
    from octavo.model.source import resolve_source

    config = resolve_source(str(model)).config
    facts = DecoderAdapter(None, None).facts(config, "bfloat16", "bfloat16")
    matrices = [t.numel() for n, t in load_file(model / "model.safetensors").items() if n.endswith("_proj.weight")]
    assert linear_parameters(facts, config) == sum(matrices)
    assert estimate_weight_bytes(facts, config, 2) == 2 * (sum(matrices) + 2 * 512 * 192)
    needs = Needs("quantizer", Device("cuda", capability=(9, 0)), "bfloat16", {"method": "fp8", "config": {}})
    answer = provider.accepts(needs, provider.Fp8Options())
    assert isinstance(answer, Accept) and answer.preferences["linear_bytes"] == 1


def test_a_weight_that_is_not_a_number_is_refused_by_name() -> None:
    stored, _ = by_channel(torch.randn(8, 16))
    stored["weight"].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(LoadError, match=r"m\.down_proj: 1 weights are NaN"):
        linear(compressed("channel", None), named("down_proj", stored), {"down_proj": 8}, 16)
