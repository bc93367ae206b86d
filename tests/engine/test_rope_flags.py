"""--rope-scaling-factor and --rope-theta: the model's RoPE as if its config.json had said so; what they cannot mean is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.plan import Plan, plan_engine
from octavo.errors import ConfigError
from octavo.model.families import read_decoder
from octavo.plugins import discover

from tests.tiny import tiny_config, tiny_llama


def plan(at: Path, *, flags: dict[str, Any], **config: Any) -> Plan:
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(tiny_config(**config)))
    return plan_engine(EngineConfig(model=str(at), device="cpu", num_threads=1, load_format="dummy", **flags), discover())


def rope(made: Plan) -> Any:
    return read_decoder(made.source.config).layers[0].rope


def test_a_plain_rope_becomes_dynamic_and_its_context_grows(tmp_path: Path) -> None:
    made = plan(tmp_path / "m", flags={"rope_scaling_factor": 8.0, "max_model_len": 4096})
    assert (rope(made).type, rope(made).factor, rope(made).original) == ("dynamic", 8.0, 512)
    assert made.facts.max_position == 4096
    told = made.explain()["values"]["rope"]
    assert told["value"]["factor"] == 8.0 and "--rope-scaling-factor 8" in told["why"]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_stretched_rope_keeps_its_type_and_its_other_numbers(tmp_path: Path, kind: str, key: str) -> None:
    theirs = {"rope_type": kind, "factor": 2.0} | ({"beta_fast": 16.0} if kind == "yarn" else {})
    made = rope(plan(tmp_path / "m", flags={"rope_scaling_factor": 4.0}, **{key: theirs}))
    assert (made.type, made.factor, made.theta) == (kind, 4.0, 10000.0)
    assert made.beta_fast == (16.0 if kind == "yarn" else 32.0)


@pytest.mark.parametrize("config", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": ...}])
def test_theta_replaces_the_checkpoints_wherever_it_says_it(tmp_path: Path, config: dict[str, Any]) -> None:
    made = plan(tmp_path / "m", flags={"rope_theta": 1e6}, **config)
    assert rope(made).theta == 1e6 and rope(made).type == "default"


def test_without_flags_nothing_is_said_of_the_rope(tmp_path: Path) -> None:
    assert "rope" not in plan(tmp_path / "m", flags={}).explain()["values"]


def test_a_rope_that_one_factor_cannot_stretch_is_refused_by_the_flag(tmp_path: Path) -> None:
    lists = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ConfigError, match=r"--rope-scaling-factor 2: .*longrope"):
        plan(tmp_path / "m", flags={"rope_scaling_factor": 2.0}, rope_scaling=lists)


def test_a_context_whose_positions_are_no_float32_is_refused(tmp_path: Path) -> None:
    """Never wrapped, never rounded: past 2^24 two neighbours would share an angle."""
    with pytest.raises(ConfigError, match="16777217 is more than 16777216"):
        plan(tmp_path / "m", flags={"max_model_len": (1 << 24) + 1}, max_position_embeddings=1 << 25)


def test_the_flags_give_what_the_same_config_json_gives(tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 50000.0}
    said = tiny_llama(tmp_path / "said", max_position_embeddings=32, rope_parameters=scaled)
    asked = tiny_llama(tmp_path / "asked", max_position_embeddings=32)
    prompt = [{"prompt_token_ids": [5 + (11 * i) % 500 for i in range(50)]}]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    common: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
    right = LLM(str(said), **common).generate(prompt, params)[0].outputs[0].token_ids
    found = (
        LLM(str(asked), rope_scaling_factor=4.0, rope_theta=50000.0, **common).generate(prompt, params)[0].outputs[0].token_ids
    )
    assert found == right
