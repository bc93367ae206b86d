"""Sampling flags are the fields of SamplingParams, checked by SamplingParams, and errors name the flag."""

from __future__ import annotations

import msgspec
import pytest
from octavo.cli.flags import Parser
from octavo.cli.main import main
from octavo.cli.sampling_flags import HELP, add_sampling, read_sampling
from octavo.errors import ConfigError
from octavo.request import SamplingParams


def params(*words: str, **defaults: object) -> SamplingParams:
    parser = Parser(prog="octavo generate")
    add_sampling(parser, **defaults)
    return read_sampling(parser.parse_args(list(words)), **defaults)


def test_every_field_has_a_flag_with_help_and_no_other_flag_exists() -> None:
    assert set(HELP) == {field.name for field in msgspec.structs.fields(SamplingParams)} - {"grammar"}


def test_nothing_given_is_the_structs_defaults() -> None:
    assert params() == SamplingParams()


def test_values_arrive_with_their_types() -> None:
    found = params(
        *[
            "--temperature",
            "0",
            "--top-p",
            "0.5",
            "--top-k",
            "3",
            "--n",
            "2",
            "--max-tokens",
            "7",
            "--seed",
            "-1",
            "--ignore-eos",
            "--no-skip-special-tokens",
        ],
        *["--stop", "a", "--stop", "b", "--stop-token-ids", "5", "--stop-token-ids", "6"],
        "--logit-bias",
        '{"7": -100, "8": 1.5}',
    )
    assert found == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        n=2,
        max_tokens=7,
        seed=-1,
        ignore_eos=True,
        skip_special_tokens=False,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        logit_bias={7: -100.0, 8: 1.5},
    )


def test_a_commands_own_default_gives_way_to_the_flag() -> None:
    assert params(max_tokens=256).max_tokens == 256
    assert params("--max-tokens", "3", max_tokens=256).max_tokens == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "--temperature: must be at least 0, got -1"),
        (["--temperature", "warm"], "--temperature: 'warm' is not allowed; it must be a number"),
        (["--top-k", "1.5"], "--top-k: '1.5' is not allowed; it must be an integer"),
        (["--stop-token-ids", "x"], "--stop-token-ids: "),
        (["--logit-bias", "5"], "--logit-bias: '5' is not allowed; it must be a JSON object"),
        (["--logit-bias", '{"x": 1}'], "--logit-bias: "),
        (["--n", "0"], "--n: must be an integer in [1, 128], got 0"),
        (["--max-tokens", "0"], "--max-tokens: must be an integer of at least 1, got 0"),
        (["--seed", str(2**70)], "--seed: must be an integer of 64 bits, got"),
        (["--stop", ""], "--stop: a value is empty"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_wrong_value_names_its_flag(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        params(*words)
    assert str(error.value).startswith(message)


def test_a_list_of_numbers_is_asked_for_as_such() -> None:
    with pytest.raises(ConfigError, match=r"--stop-token-ids: \['x'\] is not allowed; it must be an integer, or a list of them"):
        params("--stop-token-ids", "x")


def test_what_a_command_cannot_honour_is_no_flag_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "demo", "--logprobs", "3"])
    assert "unknown flag --logprobs" in capsys.readouterr().err
