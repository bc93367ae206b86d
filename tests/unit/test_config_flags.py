"""Settings: flag > environment > file > default; whatever is unknown or wrong is named with its place.

Every number from the command line is checked, and names, defaults and help live in config.py alone.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo import LLM
from octavo.cli import reference
from octavo.cli.flags import MODELS, SHORT, Parser, add_flags, add_model, read
from octavo.cli.options import Option, options_of
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.wording import NOT_SERVED
from pydantic import ValidationError

ALL = [option for model in MODELS for option in options_of(model)]
DOCS = Path(__file__).parents[2] / "docs"


def parser() -> Parser:
    made = Parser(prog="octavo serve")
    add_model(made)
    add_flags(made, EngineConfig, ServerConfig)
    return made


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args(list(words))


def engine(*words: str, env: dict[str, str] | None = None, **kw: Any) -> EngineConfig:
    return read(EngineConfig, parse(*words), env or {}, **kw)


def server(*words: str, env: dict[str, str] | None = None) -> ServerConfig:
    return read(ServerConfig, parse(*words), env or {})


def config_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "octavo.yaml"
    path.write_text(text)
    return str(path)


def another_value(option: Option) -> tuple[str, Any]:
    """A legal text for the option that is not its default, where there is one, and the value that it stands for."""
    if bool in option.kinds:
        return ("false", False) if option.default else ("true", True)
    if dict in option.kinds:
        return '{"enable": ["x"]}', {"enable": ["x"]}
    if option.name == "root_path":
        return "/llm", "/llm"
    if option.name == "allowed_origins":
        return "https://one", ("https://one",)
    if tuple in option.kinds:
        return "one", ("one",)
    if option.choices and len(option.kinds) == 1:
        word = next(c for c in option.choices if c != option.default)
        return word, word
    if option.name in ("tensor_parallel_size", "pipeline_parallel_size"):
        return "1", 1  # nothing else is legal
    if int in option.kinds:
        return "4321", 4321
    if option.name == "rope_scaling_factor":
        return "2.5", 2.5  # at least 1
    if option.name == "otlp_traces_endpoint":
        return "http://collector/v1/traces", "http://collector/v1/traces"
    return ("0.5", 0.5) if float in option.kinds else ("word", "word")


class TestOneSettingInThreePlaces:
    @pytest.mark.parametrize("option", ALL, ids=lambda o: o.name)
    def test_every_field_is_a_flag_a_variable_and_a_line_of_the_file_with_one_meaning(
        self, option: Option, tmp_path: Path
    ) -> None:
        text, value = another_value(option)
        words = [option.flag if value else f"--no-{option.key}"] if bool in option.kinds else [option.flag, text]
        line = f"{option.key}: {text}\n" if text != "word" else f"{option.name}: word\n"
        sources = [(words, {}), ([], {option.env: text}), (["--config", config_file(tmp_path, line)], {})]
        for given_words, env in sources:
            model = EngineConfig if option.name in EngineConfig.model_fields else ServerConfig
            assert getattr(read(model, parse(*given_words), env), option.name) == value

    def test_the_flag_wins_over_the_variable_over_the_file_over_the_default(self, tmp_path: Path) -> None:
        file = ["--config", config_file(tmp_path, "port: 1\n")]
        assert server().port == 8000
        assert server(*file).port == 1
        assert server(*file, env={"OCTAVO_PORT": "2"}).port == 2
        assert server(*file, "--port", "3", env={"OCTAVO_PORT": "2"}).port == 3

    def test_the_variable_OCTAVO_CONFIG_names_the_file(self, tmp_path: Path) -> None:
        assert server(env={"OCTAVO_CONFIG": config_file(tmp_path, "port: 7\n")}).port == 7

    def test_a_commands_own_defaults_are_below_everything_a_user_says(self) -> None:
        assert engine(defaults={"max_num_seqs": 9}).max_num_seqs == 9
        assert engine("--max-num-seqs", "8", defaults={"max_num_seqs": 9}).max_num_seqs == 8

    def test_a_flag_given_with_its_default_value_still_wins(self) -> None:
        assert server("--port", "8000", env={"OCTAVO_PORT": "2"}).port == 8000

    def test_the_model_is_the_first_word_or_a_flag_but_not_two_different_ones(self) -> None:
        assert engine("folder").model == engine("--model", "folder").model == "folder"
        with pytest.raises(ConfigError, match=r"'a'.*'b'"):
            engine("a", "--model", "b")


class TestSpelling:
    def test_underscores_in_a_flag_read_as_dashes_and_values_keep_theirs(self) -> None:
        config = engine("--max_model_len=16", "--kv_cache_dtype", "fp8_e4m3", "some_model")
        assert (config.max_model_len, config.kv_cache_dtype, config.model) == (16, "fp8_e4m3", "some_model")

    def test_short_flags_come_from_the_config(self) -> None:
        assert engine("-q", "awq").quantization == "awq"

    @pytest.mark.parametrize(
        ("text", "value"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2G", 2 << 30), ("2GiB", 2 << 30), ("7", 7)]
    )
    def test_integers_take_decimal_and_binary_suffixes(self, text: str, value: int) -> None:
        assert engine("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == value

    def test_several_values_repeat_the_flag_or_split_the_variable(self) -> None:
        assert server("--api-key", "a,b", "--api-key", "c").api_key == ("a,b", "c")
        assert server(env={"OCTAVO_API_KEY": "a, b"}).api_key == ("a", "b")
        assert server(env={"OCTAVO_API_KEY": '["a,b"]'}).api_key == ("a,b",)

    def test_a_repeated_flag_does_not_swallow_the_model(self) -> None:
        args = parse("--api-key", "k", "folder")
        assert (read(EngineConfig, args, {}).model, read(ServerConfig, args, {}).api_key) == ("folder", ("k",))

    def test_block_size_is_a_number_or_auto(self) -> None:
        assert (engine("--block-size", "32").block_size, engine("--block-size", "auto").block_size) == (32, "auto")


class TestErrorsNamePlaceValueAndWhatIsAllowed:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["--port", "70000"], ["--port", "'70000'", "at most 65535"]),
            (["--port", "x"], ["--port", "'x'", "an integer"]),
            (["--scheduling-policy", "fcsf"], ["--scheduling-policy", "'fcsf'", "fcfs, priority", "did you mean fcfs"]),
            (["--max-model-len", "0"], ["--max-model-len", "'0'", "at least 1"]),
            (["--max-model-len", "1.5"], ["--max-model-len", "'1.5'", "an integer"]),
            (["--kv-cache-memory-bytes", "2X"], ["--kv-cache-memory-bytes", "'2X'", "K, M, G, T (of 1024)"]),
            (["--block-size", "0"], ["--block-size", "'0'", "at least 1, or `auto`"]),
            (["--block-size", "big"], ["--block-size", "'big'", "an integer, or auto"]),
            (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "'nan'", "greater than 0 and at most 1"]),
            (["--gpu-memory-utilization", "1.01"], ["--gpu-memory-utilization", "'1.01'"]),
            (["--host", ""], ["--host: a value is empty"]),
            (["--tokenizer", ""], ["--tokenizer: a value is empty"]),
            (["--plugins", "{"], ["--plugins", "not valid JSON"]),
            (["--plugins", "[1]"], ["--plugins", "a JSON object"]),
        ],
        ids=lambda v: " ".join(v) if v[0].startswith("--") and len(v) == 2 else "",
    )
    def test_on_the_command_line(self, words: list[str], parts: list[str]) -> None:
        args = parse(*words)
        with pytest.raises(ConfigError) as error:
            read(EngineConfig, args, {})
            read(ServerConfig, args, {})
        for part in parts:
            assert part in str(error.value)

    def test_a_text_that_is_empty_by_default_may_be_given_so(self) -> None:
        assert server("--root-path", "").root_path == ""

    def test_in_the_environment(self) -> None:
        with pytest.raises(ConfigError, match=r"OCTAVO_PORT: 'x' is not allowed; it must be an integer"):
            server(env={"OCTAVO_PORT": "x"})
        with pytest.raises(ConfigError, match=r"OCTAVO_MAX_MODEL_LEM: unknown.*did you mean OCTAVO_MAX_MODEL_LEN"):
            engine(env={"OCTAVO_MAX_MODEL_LEM": "1"})

    def test_an_empty_variable_is_not_an_absent_key(self) -> None:
        with pytest.raises(ConfigError, match="OCTAVO_API_KEY: is set but empty"):
            server(env={"OCTAVO_API_KEY": ""})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max-model-lenn: 3", "unknown setting 'max-model-lenn'; did you mean max-model-len"),
            ("port: 1\nport: 2", "'port' is set twice"),
            ("max-model-len: 1\nmax_model_len: 2", "max-model-len is set twice"),
            ("port: yes", "port: True is not allowed"),
            ("api-key: 12345", "api-key: the value .not shown."),
            ("enforce-eager: 3", "enforce-eager: 3 is not allowed; it must be true or false"),
            ("- a", "must hold `setting: value`"),
            ("a: [", "not valid YAML"),
        ],
    )
    def test_in_the_file(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            server("--config", config_file(tmp_path, text))
            engine("--config", config_file(tmp_path, text))
        assert "octavo.yaml" in str(error.value) and "\n" not in str(error.value)

    def test_an_address_of_traces_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint: 'collector' is not allowed; it must begin with http"):
            server("--otlp-traces-endpoint", "collector")

    @pytest.mark.parametrize("prefix", ["llm", "/llm/", "/", "/a b"])
    def test_a_prefix_that_is_none(self, prefix: str) -> None:
        with pytest.raises(ConfigError, match=r"--root-path: '.*' is not allowed; it must begin with /"):
            server("--root-path", prefix)

    def test_origins_are_those_that_browsers_send(self) -> None:
        for origin in ("*", "null", "https://chat.example.org", "http://localhost:3000", "app://notes.example"):
            assert server("--allowed-origins", origin).allowed_origins == (origin,)
        for wrong in ("chat.example.org", "https://chat.example.org/", "https://chat.example.org/app", "*.example.org"):
            with pytest.raises(ConfigError, match=r"--allowed-origins: .*is not allowed; it must be "):
                server("--allowed-origins", wrong)

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
            engine("--config", "nowhere.yaml")

    def test_a_file_that_the_environment_names(self) -> None:
        with pytest.raises(ConfigError, match=r"^OCTAVO_CONFIG=nowhere\.yaml: cannot be read"):
            engine(env={"OCTAVO_CONFIG": "nowhere.yaml"})

    def test_all_wrong_settings_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError) as error:
            engine("--max-num-seqs", "0", "--device", "tpu")
        assert "--max-num-seqs" in str(error.value) and "--device" in str(error.value)

    def test_a_key_never_stands_in_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as error:
            server("--config", config_file(tmp_path, "api-key: [hunter2, 5]"))
        assert "hunter2" not in str(error.value)

    @pytest.mark.parametrize(
        ("words", "message"),
        [(["--max-modl-len", "3"], "--max-model-len"), (["a", "b"], "too many"), (["--max-model"], "unknown flag")],
    )
    def test_unknown_flags_and_words_exit_2_with_a_hint(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            parse(*words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("name", sorted(NOT_SERVED))
    def test_a_setting_of_vllm_that_is_not_served_is_refused_with_the_reason_wherever_it_stands(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flag, refused = f"--{name.replace('_', '-')}", f" is not supported: {NOT_SERVED[name]}; leave it out"
        for word in (flag, *(short for short, long in SHORT.items() if long == flag)):
            with pytest.raises(SystemExit):
                parse(word, "2")
            assert word + refused in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"OCTAVO_{name.upper()}{re.escape(refused)}"):
            engine(env={f"OCTAVO_{name.upper()}": "2"})
        (tmp_path / "octavo.yaml").write_text(f"{flag[2:]}: 2\n")
        with pytest.raises(ConfigError, match=f"octavo.yaml: {flag[2:]}{re.escape(refused)}"):
            engine("--config", str(tmp_path / "octavo.yaml"))
        with pytest.raises(ConfigError, match=f"LLM.{name}{re.escape(refused)}"):
            LLM("demo", **{name: 2})
        assert name not in {option.name for option in ALL}

    @pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"])
    def test_a_model_on_one_device_may_be_asked_for_and_on_two_is_refused(self, flag: str) -> None:
        assert engine(flag, "1") == EngineConfig(tensor_parallel_size=1, pipeline_parallel_size=1)
        with pytest.raises(ConfigError, match=r"parallel-size: '2' is not allowed; it must be 1: a model runs on one device"):
            engine(flag, "2")

    @pytest.mark.parametrize(
        "name", ["OCTAVO_SERVICE_HOST", "OCTAVO_SERVICE_PORT_HTTP", "OCTAVO_PORT_8000_TCP", "OCTAVO_PORT_8000_TCP_ADDR"]
    )
    def test_variables_of_a_kubernetes_service_named_octavo_are_not_settings(self, name: str) -> None:
        assert server(env={name: "10.0.0.1", "OCTAVO_PORT": "tcp://10.0.0.1:8000"}).port == 8000


@given(st.sampled_from([o for o in ALL if int in o.kinds]), st.integers(-3, 2**70))
def test_an_integer_is_taken_exactly_or_refused_never_clamped(option: Option, number: int) -> None:
    model = EngineConfig if option.name in EngineConfig.model_fields else ServerConfig
    args = argparse.Namespace(**{option.name: str(number)})
    try:
        direct = getattr(model(**{option.name: number}), option.name)
    except ValidationError:
        with pytest.raises(ConfigError):
            read(model, args, {})
    else:
        assert getattr(read(model, args, {}), option.name) == direct == number


class TestDocs:
    @pytest.mark.parametrize("name", ["configuration.md", "architecture.md"])
    def test_the_generated_parts_of_a_page_are_fresh(self, name: str) -> None:
        page = (DOCS / name).read_text()
        assert page == reference.insert(page), "run `make docs`"
        assert any(reference.BEGIN.format(part) in page for part in reference.GENERATORS)

    def test_every_field_has_help_and_a_group(self) -> None:
        assert [o.name for o in ALL if not o.help.endswith(".") or o.group == "other"] == []

    def test_no_two_fields_of_the_two_models_share_a_name(self) -> None:
        assert len({o.name for o in ALL}) == len(ALL)
