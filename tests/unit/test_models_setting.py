"""`models`: what each spelling means, and that an error names the place where the entry stands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from octavo.cli.flags import Parser, add_flags, add_model, place, read
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.server.models import Planned, planned

ENTRIES = [{"name": "small", "model": "/m/small", "max-model-len": 512}, {"name": "other", "model": "/m/other", "dtyp": "half"}]


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="octavo serve")
    add_model(parser)
    add_flags(parser, EngineConfig, ServerConfig)
    return parser.parse_args(list(words))


def plan(*words: str, env: dict[str, str] | None = None) -> list[Planned]:
    """As `octavo serve` does it."""
    args = parse(*words)
    engine, server = read(EngineConfig, args, env or {}), read(ServerConfig, args, env or {})
    return planned(engine, server, place("models", args, env or {}))


def test_an_entry_has_settings_of_its_own_and_the_rest_is_a_default_or_the_first_models() -> None:
    first, small = plan("/m/first", "--num-threads", "2", "--max-model-len", "64", "--models", "small=/m/small,max-num-seqs=3")
    assert (first.name, first.config.max_model_len) == ("/m/first", 64)
    assert (small.name, small.config.model, small.config.max_num_seqs) == ("small", "/m/small", 3)
    assert (small.config.num_threads, small.config.max_model_len) == (2, None), "threads are the machine's, a length is a model's"


def test_a_file_and_a_variable_mean_what_the_flag_means(tmp_path: Path) -> None:
    (tmp_path / "octavo.yaml").write_text(json.dumps({"models": ENTRIES[:1]}))
    from_flag = plan("--models", "small=/m/small,max-model-len=512")
    assert plan("--config", str(tmp_path / "octavo.yaml")) == from_flag
    assert plan(env={"OCTAVO_MODELS": json.dumps(ENTRIES[:1])}) == from_flag
    assert plan(env={"OCTAVO_MODELS": '["small=/m/small,max-model-len=512"]'}) == from_flag


def test_an_error_names_the_file_and_the_entry(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    for entries, says in (
        (ENTRIES, "models[1]: unknown setting 'dtyp'; did you mean dtype?"),
        (["other"], "models[0]: must be NAME=PATH[,SETTING=VALUE...]"),
        ([{"name": "other"}], "models[0]: a model needs a name and a path"),
        ([{**ENTRIES[0], "max-num-seqs": 0}], "models[0]: "),
    ):
        file.write_text(json.dumps({"models": entries}))
        with pytest.raises(ConfigError) as error:
            plan("--config", str(file))
        assert str(error.value).startswith(f"{file}: {says}")


def test_an_error_names_the_variable_or_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^OCTAVO_MODELS\[1\]: unknown setting 'dtyp'"):
        plan(env={"OCTAVO_MODELS": json.dumps(ENTRIES)})
    with pytest.raises(ConfigError, match=r"^--models other=/m/other,dtyp=half: unknown setting 'dtyp'"):
        plan("--models", "other=/m/other,dtyp=half")


def test_a_name_belongs_to_one_model() -> None:
    with pytest.raises(ConfigError, match="two models are called 'small'"):
        plan("--models", "small=/m/a", "--models", "small=/m/b")


def test_a_bound_of_priorities_needs_a_model_that_heeds_them() -> None:
    priority = ("--scheduling-policy", "priority")
    with pytest.raises(
        ConfigError, match="--min-priority -5: the server runs first come, first served; add --scheduling-policy priority"
    ):
        plan("/m/first", "--min-priority", "-5")
    assert plan("/m/first", "--min-priority", "-5", *priority)
    assert plan("/m/first", "--min-priority", "-5", "--models", "small=/m/small,scheduling-policy=priority")
    assert plan("/m/first", "--min-priority", "0"), "what holds anyhow contradicts nothing"
