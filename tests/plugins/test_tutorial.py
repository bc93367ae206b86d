"""docs/writing-a-plugin.md quotes the example package, and keeps quoting it as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.config import EngineConfig
from octavo.engine.plan import attention_facts
from octavo.interfaces import AttentionLayer, KVSpec, ModelFacts

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "octavo-attention-sdpa"
DOC = (ROOT / "docs" / "writing-a-plugin.md").read_text()
QUOTES = re.findall(r"(?ms)^```(?:python|toml) (\S+)\n(.*?)^```", DOC)


@pytest.mark.parametrize(("file", "text"), QUOTES, ids=[f"{file}-{i}" for i, (file, _) in enumerate(QUOTES)])
def test_every_quoted_block_is_the_example_s_own_text(file: str, text: str) -> None:
    assert text in (EXAMPLE / file).read_text()


def test_every_python_block_says_which_file_it_quotes() -> None:
    assert len(re.findall(r"(?m)^```(?:python|toml)", DOC)) == len(QUOTES) >= 8


def test_the_tree_that_the_page_shows_is_the_example_s() -> None:
    tree = re.search(r"(?ms)^```\n(octavo-attention-sdpa/.*?)^```", DOC)
    assert tree
    shown = set(re.findall(r"[\w/]+\.(?:py|toml)", tree[1]))
    there = {p.name for p in EXAMPLE.rglob("*.py")} | {"pyproject.toml"}
    assert {Path(name).name for name in shown} == there


def test_the_configuration_that_the_page_shows_is_a_configuration() -> None:
    (text,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", DOC)
    config = EngineConfig(**yaml.safe_load(text))
    assert config.plugins["attention"]["sdpa"] == {"rows_at_once": 32}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn"), ({"softcap": 50.0}, "softcap 50"), ({"sinks": True}, "sinks")],
)
def test_the_example_rejects_what_it_cannot_do_with_the_value(
    facts: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    from octavo_attention_sdpa.provider import SdpaOptions, accepts

    model = ModelFacts("Test", 512, 64, 512, (AttentionLayer(0, 4, 2, 16, 16, 0.25),), (KVSpec("full", 2, 16, 16, "float32"),))
    common = attention_facts(model, "float32", None)
    assert isinstance(accepts(Needs("attention", Device(), "float32", common), SdpaOptions()), Accept)
    answer = accepts(Needs("attention", Device(), "float32", common | facts), SdpaOptions())
    assert isinstance(answer, Reject) and reason in answer.reason
