"""`octavo quantize fp8`: what it writes, that Octavo and transformers read it, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.bench.perplexity import score
from octavo.cli import quantize as command
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.errors import ConfigError, LoadError, QuantizeError
from octavo.plugins import discover
from octavo.testing.model import checkpoint, transformers_model
from safetensors.torch import load_file, save_file

from tests.plugins.fp8 import round_e4m3
from tests.tiny import BOS, EOS, VOCAB, tiny_llama, write_text_files

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "quant_fp8" / "src"))

CATALOG = discover(extra_modules=["octavo_quant_fp8"])
TEXT = "hello world, this is the page that you have not seen from the cache of Paris. " * 12
IDS = [1, 20, 300, 41, 260, 7, 99, 411, 23, 8, 150, 377]


MIXTURE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
MIXTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "mixtral": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "intermediate_size": 136},
        "block_sparse_moe.experts.3.w2",
        "block_sparse_moe.gate",
    ),
    "qwen3_moe": (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 136, "intermediate_size": 64},
        "mlp.experts.3.down_proj",
        "mlp.gate",
    ),
}
"""By model_type: its config, one expert's matrix and the router of a layer."""


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A tiny mixture of experts, one expert's matrix and the router of its first layer."""
    more, expert, router = MIXTURES[request.param]
    config = MIXTURE | more | {"model_type": request.param}
    folder = tmp_path_factory.mktemp("mixture") / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = checkpoint(transformers_model(config, spread=0.08), config)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    write_text_files(folder)
    return folder, f"model.layers.0.{expert}", f"model.layers.0.{router}"


def make(model: Path, out: Path, *pairs: str, text: str | None = None) -> dict[str, Any]:
    entry, function = command.maker(CATALOG, "fp8")
    assert entry.provider is not None
    options = command.parse_options("fp8", entry.provider.quantize_options, pairs)
    return command.quantize(EngineConfig(model=str(model), device="cpu"), CATALOG, function, options, out, text)


def engine(model: Path, **options: Any) -> Engine:
    plugins = options.pop("plugins", {})
    config = EngineConfig(model=str(model), device="cpu", num_threads=1, max_model_len=128, plugins=plugins, **options)
    return build_engine(config, discover(plugins, extra_modules=["octavo_quant_fp8"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("make") / "model", hidden_size=192, intermediate_size=200, head_dim=48, std=0.08)


@pytest.mark.parametrize("weights", ["channel", "tensor", "block"])
def test_what_is_made_is_within_fp8_of_the_model(weights: str, model: Path, tmp_path: Path) -> None:
    made = make(model, tmp_path / "out", f"weights={weights}")
    assert made["report"]["matrices"] == 14
    right, found = score(engine(model), [IDS])[0], score(engine(tmp_path / "out"), [IDS])[0]
    error = (torch.tensor(right) - torch.tensor(found)).abs().mean()
    assert 1e-4 < error < 0.25, error
    plain, small = ((folder / "model.safetensors").stat().st_size for folder in (model, tmp_path / "out"))
    assert small < plain * 0.5


@pytest.mark.parametrize(("pairs", "near"), [((), 2e-2), (("activations=none",), 2e-4)])
def test_transformers_loads_what_is_made_and_computes_the_same(
    pairs: tuple[str, ...], near: float, model: Path, tmp_path: Path
) -> None:
    """Quantised activations differ where the last bit of a sum decides how one value is rounded."""
    make(model, tmp_path / "out", *pairs, text=TEXT)
    assert_transformers_agree(tmp_path / "out", near)


def assert_transformers_agree(folder: Path, near: float) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([IDS])).logits[0].log_softmax(-1)
    want = logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    found = score(engine(folder, kv_cache_dtype="float32"), [IDS])[0]
    torch.testing.assert_close(torch.tensor(found), want, rtol=0, atol=near)


@pytest.mark.parametrize(("pairs", "near"), [((), 2e-2), (("activations=none", "weights=tensor"), 2e-4)])
def test_transformers_loads_a_mixture_of_experts_and_computes_the_same(
    pairs: tuple[str, ...], near: float, mixture: tuple[Path, str, str], tmp_path: Path
) -> None:
    model, expert, router = mixture
    made = make(model, tmp_path / "out", *pairs, text=TEXT)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert made["report"]["matrices"] == 2 * (4 + 4 * 3), "four of attention and three of each expert"
    assert tensors[f"{expert}.weight"].dtype == torch.float8_e4m3fn and f"{expert}.weight_scale" in tensors
    assert tensors[f"{router}.weight"].dtype == torch.float32
    assert router in made["quantization_config"]["ignore"], "who reads the config must not expect scales of a router"
    assert_transformers_agree(tmp_path / "out", near)


@pytest.mark.parametrize("weights", ["channel", "tensor", "block"])
def test_experts_are_within_fp8_of_the_model(weights: str, mixture: tuple[Path, str, str], tmp_path: Path) -> None:
    make(mixture[0], tmp_path / "out", f"weights={weights}")
    right, found = (torch.tensor(score(engine(folder), [IDS])[0]) for folder in (mixture[0], tmp_path / "out"))
    assert 1e-4 < float((right - found).abs().mean()) < 0.25


def test_static_input_scales_of_experts_are_refused(mixture: tuple[Path, str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="activations=static: the model has experts"):
        make(mixture[0], tmp_path / "out", "activations=static", text=TEXT)
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_text_gives_kv_and_input_scales_that_cover_what_was_seen(model: Path, tmp_path: Path) -> None:
    made = make(model, tmp_path / "out", "activations=static", text=TEXT)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings == made["quantization_config"]
    assert (
        settings["kv_cache_scheme"]["num_bits"] == 8 and not settings["config_groups"]["group_0"]["input_activations"]["dynamic"]
    )
    scales = {name: float(t) for name, t in tensors.items() if name.endswith(("input_scale", "k_scale", "v_scale"))}
    assert len(scales) == 14 + 4 and all(0 < s < 1 for s in scales.values())
    # the norm's weight is near one: what enters q, k and v is at most sqrt(hidden) in size, and a text gets near a third of it
    q, k, v = (scales[f"model.layers.0.self_attn.{p}_proj.input_scale"] for p in "qkv")
    assert q == k == v and 192**0.5 / 448 / 6 < q < 2 * 192**0.5 / 448
    loaded = engine(tmp_path / "out")
    assert loaded.explain["values"]["kv_cache_dtype"]["value"] == "float8_e4m3fn"
    right, found = score(engine(model), [IDS])[0], score(loaded, [IDS])[0]
    assert (torch.tensor(right) - torch.tensor(found)).abs().mean() < 0.3


def test_headroom_makes_calibrated_scales_larger(model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_scale"
    found = []
    for headroom in (1, 2):
        make(model, tmp_path / str(headroom), f"headroom={headroom}", text=TEXT)
        found.append(float(load_file(tmp_path / str(headroom) / "model.safetensors")[name]))
    assert found[1] == pytest.approx(2 * found[0])


def test_stored_weights_are_the_nearest_e4m3_under_their_scale(model: Path, tmp_path: Path) -> None:
    make(model, tmp_path / "out")
    tensors, plain = load_file(tmp_path / "out" / "model.safetensors"), load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = plain[name].abs().amax(1, keepdim=True) / 448
    assert torch.equal(tensors[name + "_scale"], scale)
    assert torch.equal(tensors[name].double(), round_e4m3(plain[name] / scale))
    same = [n for n in plain if not n.endswith("_proj.weight")]
    assert all(torch.equal(tensors[n], plain[n]) for n in same) and "lm_head.weight" in same


def test_a_gguf_model_becomes_a_folder_with_its_tokenizer(demo_path: Path, tmp_path: Path) -> None:
    made = make(demo_path, tmp_path / "out")
    assert made["bytes"] < 165e6
    from octavo.model.tokenizer_files import load_tokenizer_files

    ours, theirs = load_tokenizer_files(tmp_path / "out"), load_tokenizer_files(demo_path)
    text = "What is the capital of France? 1234"
    assert ours.tokenizer.encode(text).ids == theirs.tokenizer.encode(text).ids
    assert (ours.chat_template, ours.eos_id, ours.add_bos) == (theirs.chat_template, theirs.eos_id, theirs.add_bos)


@pytest.mark.parametrize(
    ("pairs", "text", "match"),
    [
        (("activations=static",), None, "give --calibrate"),
        (("activations=static", "weights=block"), TEXT, "block weights have dynamic inputs"),
        (("weights=rows",), None, "'tensor' or 'block'"),
        (("wheights=channel",), None, "did you mean 'weights'"),
        (("weights",), None, "must be KEY=VALUE"),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(
    pairs: tuple[str, ...], text: str | None, match: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(model, tmp_path / "out", *pairs, text=text)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_when_a_weight_is_not_finite(model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(model, tmp_path / "bad")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = float("inf")
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(QuantizeError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight has a value that is not finite"):
        make(tmp_path / "bad", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_anything_is_written(name: str, model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(model, tmp_path / "bad")
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(LoadError, match=rf"/bad does not fit the model:\n  missing: {name}"):
        make(tmp_path / "bad", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_neither_an_existing_folder_nor_a_quantised_model_is_taken(model: Path, tmp_path: Path) -> None:
    make(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="is there already"):
        make(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="quantised already"):
        make(tmp_path / "out", tmp_path / "again")


def test_a_config_that_is_not_read_is_named_with_its_folder(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "odd", hidden_act="nope")
    with pytest.raises(LoadError, match=r"^.*/odd: hidden_act 'nope' is not supported here"):
        make(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_method_that_nobody_has_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fp8'"):
        command.maker(CATALOG, "fp9")
    with pytest.raises(ConfigError, match="no installed quantizer of this name makes checkpoints"):
        command.maker(discover(), "fp8x")


def test_large_models_are_written_in_shards(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.model.export as export

    original = export.CheckpointWriter.__init__
    monkeypatch.setattr(
        export.CheckpointWriter, "__init__", lambda self, out, source: original(self, out, source, shard_bytes=200_000)
    )
    make(model, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert (
        len(files) > 2
        and set(index["weight_map"].values()) == set(files)
        and files[0].endswith(f"-of-{len(files):05}.safetensors")
    )
    assert len(score(engine(tmp_path / "out"), [IDS])[0]) == len(IDS) - 1


def test_the_command_makes_a_checkpoint_and_says_what_it_did(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.cli import main as cli

    monkeypatch.setattr("octavo.plugins.discover", lambda plugins=None, **kw: CATALOG)
    assert cli.main(["quantize", "fp8", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "--set weights=channel|tensor|block " in shown
    assert (
        "--set kv_cache=true|false " in shown
        and "[default: true]" in shown
        and "--set window=N " in shown
        and "--set headroom=X " in shown
    )
    (tmp_path / "text").write_text(TEXT)
    words = ["quantize", "fp8", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    before = torch.get_num_threads()
    try:
        assert cli.main([*words, "--calibrate", str(tmp_path / "text"), "--num-threads", "1"]) == 0
        assert torch.get_num_threads() == 1, "threads that wait for cores of others take many times as long"
    finally:
        torch.set_num_threads(before)
    told = capsys.readouterr()
    assert "matrices: 14" in told.out and "KV scales: 2 layers" in told.out and "octavo: quantising" in told.err
    assert cli.main(["quantize", "fp8", str(model)]) == 2
    assert "--out must be given" in capsys.readouterr().err
