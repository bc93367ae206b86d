"""4-bit checkpoints in the engine: the same tokens as from the plain weights that they stand for, and where weights may come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.plan import plan_engine
from octavo.errors import ConfigError, OctavoError
from octavo.plugins import discover
from safetensors.torch import save_file

from tests.plugins.fourbit import LAYOUTS, Installed, mixture_of_experts, quantised
from tests.tiny import tiny_config, tiny_weights, write_text_files

PROMPTS = [[5 + (7 * i) % 500 for i in range(n)] for n in (3, 40)]
INNER = 192  # of an MLP, and of an expert
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": INNER, "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with Installed(tmp_path_factory.mktemp("site")):
        yield


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": quantization} if quantization else {})))
    write_text_files(folder)
    return folder


def pair(
    folder: Path, layout: str, group: int, plain: tuple[str, ...] = (), experts: bool = False, **over: Any
) -> tuple[Path, Path]:
    """A 4-bit checkpoint and the plain one that it stands for. experts: Mixtral's four in place of every MLP."""
    config = tiny_config(**SHAPE, **over)
    weights = tiny_weights(config)
    if experts:
        weights = mixture_of_experts(weights, config["hidden_size"], INNER, layers=config["num_hidden_layers"])
    stored, stands_for = quantised(weights, LAYOUTS[layout], group, plain)
    settings = LAYOUTS[layout].config(group)
    if plain:
        settings |= {"modules_to_not_convert": list(plain)}
    return write(folder / "q", config, stored, settings), write(folder / "p", config, stands_for, None)


def tokens(model: Path, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), device="cpu", num_threads=1, **options)
    results = llm.generate([list(p) for p in PROMPTS], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [list(r.outputs[0].token_ids) for r in results]


@pytest.mark.parametrize(
    ("layout", "group", "plain", "over"),
    [
        ("gemm", 32, (), {}),
        ("gemv", 64, ("down_proj",), {}),
        ("gptq", 32, (), {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
        ("packed", -1, (), {}),
        ("packed-asymmetric", 32, (), {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie": True}),
    ],
)
def test_a_checkpoint_gives_the_tokens_of_the_weights_that_it_stands_for(
    layout: str, group: int, plain: tuple[str, ...], over: dict[str, Any], tmp_path: Path
) -> None:
    four_bit, whole = pair(tmp_path, layout, group, plain, **over)
    assert tokens(four_bit) == tokens(whole)


def test_another_checkpoints_weights_under_the_models_own_tokenizer(tmp_path: Path) -> None:
    """--awq-ckpt-path: the folder needs no tokenizer of its own."""
    four_bit, whole = pair(tmp_path, "gemm", 32)
    for file in four_bit.glob("*token*"):
        file.unlink()
    assert tokens(whole, awq_ckpt_path=str(four_bit)) == tokens(whole)
    plan = plan_engine(EngineConfig(model=str(whole), awq_ckpt_path=str(four_bit), device="cpu"), discover())
    assert plan.quantizer.name == "awq" and plan.source.path == four_bit and plan.source.name == str(whole)


def test_settings_from_before_config_json_held_them(tmp_path: Path) -> None:
    four_bit, whole = pair(tmp_path, "gemm", 32)
    config = json.loads((four_bit / "config.json").read_text())
    del config["quantization_config"]
    (four_bit / "config.json").write_text(json.dumps(config))
    early = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (four_bit / "quant_config.json").write_text(json.dumps(early))
    assert tokens(four_bit) == tokens(whole)


def test_a_checkpoint_of_another_model_or_format_is_refused_by_its_numbers(tmp_path: Path) -> None:
    four_bit, whole = pair(tmp_path, "gemm", 32)
    other = write(tmp_path / "other", tiny_config(**SHAPE | {"intermediate_size": 160}), {"x": torch.ones(1)}, None)

    def plan(**options: Any) -> Any:
        return plan_engine(EngineConfig(device="cpu", **options), discover())

    with pytest.raises(ConfigError, match=r"is not a checkpoint of .*intermediate_size 192 instead of 160"):
        plan(model=str(other), awq_ckpt_path=str(four_bit))
    with pytest.raises(ConfigError, match="it is not quantised"):
        plan(model=str(whole), awq_ckpt_path=str(other))
    with pytest.raises(ConfigError, match="--awq-ckpt-path with --quantization none"):
        plan(model=str(whole), awq_ckpt_path=str(four_bit), quantization="none")


def test_random_weights_of_the_format_are_served(tmp_path: Path) -> None:
    config = tiny_config(**SHAPE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    folder = tmp_path / "dummy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_text_files(folder)
    found = tokens(folder, load_format="dummy", quantization="awq")
    assert [len(row) for row in found] == [12, 12]


@pytest.mark.parametrize("layout", ["gemm", "packed"])
def test_a_mixture_of_experts_gives_the_tokens_of_the_weights_that_it_stands_for(layout: str, tmp_path: Path) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    four_bit, whole = pair(tmp_path, layout, 32, (".gate",), experts=True, **mixtral)
    assert tokens(four_bit) == tokens(whole)


def test_experts_stacked_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config(
        **SHAPE, architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2
    )
    folder = write(tmp_path / "moe", config, {"x": torch.ones(1)}, LAYOUTS["gemm"].config(32))
    with pytest.raises(OctavoError, match=r"layers\.0\..*experts are read one matrix an expert"):
        tokens(folder)
