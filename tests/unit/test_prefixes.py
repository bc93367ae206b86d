"""The file of warm prefixes: every form that it takes, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.engine.prefixes import Prefix, read_prefixes
from octavo.errors import ConfigError

MESSAGE = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.yaml", "- hello there\n- - {role: system, content: be brief}\n- {prompt: again, pin: true}\n"),
        ("p.json", '["hello there", [{"role": "system", "content": "be brief"}], {"prompt": "again", "pin": true}]'),
    ],
)
def test_prompts_conversations_and_pins(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_prefixes(tmp_path / name) == [
        Prefix(prompt="hello there"),
        Prefix(messages=(MESSAGE,)),
        Prefix(prompt="again", pin=True),
    ]


def test_any_other_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo: [not yaml\n")
    assert read_prefixes(tmp_path / "prompts.txt") == [Prefix(prompt="one"), Prefix(prompt="two: [not yaml")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "must be a list"),
        ("[]", "must be a list"),
        ("[{prompt: a, messages: [{role: user, content: b}]}]", "entry 1: needs either"),
        ("[a, {pin: true}]", "entry 2: needs either"),
        ("[{promt: a}]", "unknown key 'promt'"),
        ("['']", "entry 1: prompt must be a text that is not empty"),
        ("[[hello]]", "entry 1: messages must be"),
        ("[{prompt: a, pin: 3}]", "pin must be true or false"),
        ("[a: b: c]", "p.yaml"),
        ("[{prompt: a, prompt: b}]", "'prompt' is set twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--warm-prefixes") as error:
        read_prefixes(tmp_path / "p.yaml")
    assert words in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        read_prefixes(tmp_path / "missing.yaml")
