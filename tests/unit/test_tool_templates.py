"""`--tool-call-parser auto`: the format that a model's chat template shows, and json where it shows none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from octavo.config import EngineConfig
from octavo.engine.tool_parser import choose_tool_parser
from octavo.model.source import resolve_source
from octavo.plugins import discover
from octavo.text.tool_templates import BEGIN

CALL, SEP = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
SHOWN = {
    "hermes": '{{ "within <tool_call></tool_call> tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>" }}',
    "llama3_json": "{{ 'Environment: ipython\\n' }}{{ '{\"name\": function name, \"parameters\": dictionary of its arguments}.' }}",
    "deepseek_v3": f"{{{{ '{BEGIN}{CALL}function{SEP}' + name + '\\n```json\\n' + arguments + '\\n```' }}}}",
    "deepseek_v31": f"{{{{ '{BEGIN}{CALL}' + name + '{SEP}' + arguments }}}}",
}
OTHERS = {
    "none": "{{ messages[0]['content'] }}",
    "XML of functions": "{{ '<tool_call>\\n<function=name>\\n<parameter=a>\\n1\\n</parameter></function>\\n</tool_call>' }}{{ call.arguments }}",
    "XML of arguments": "{{ '<tool_call>name\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>' }}{{ \"arguments\" }}",
}


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model in a folder whose templates a test may write."""
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    return tmp_path


def chosen(model: Path, **options: object) -> str:
    config = EngineConfig(model=str(model), **options)
    return choose_tool_parser(config, discover({}), resolve_source(str(model))).name


@pytest.mark.parametrize("name", SHOWN)
def test_a_format_is_known_by_the_template_that_shows_it(model: Path, name: str) -> None:
    (model / "chat_template.jinja").write_text(SHOWN[name])
    assert chosen(model) == name


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_of_no_known_format_leaves_json(model: Path, name: str) -> None:
    (model / "chat_template.jinja").write_text(OTHERS[name])
    assert chosen(model) == "json"


def test_a_named_format_is_taken_whatever_the_template_says(model: Path) -> None:
    (model / "chat_template.jinja").write_text(SHOWN["hermes"])
    assert chosen(model, tool_call_parser="llama3_json") == "llama3_json"


def test_the_template_that_conversations_with_tools_go_through_decides(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model's own `tool_use` one, before one that the configuration names, before the default one."""
    settings = model / "tokenizer_config.json"
    config = json.loads(settings.read_text()) if settings.exists() else {}
    settings.unlink(missing_ok=True)
    named = tmp_path_factory.mktemp("named") / "named.jinja"
    named.write_text(SHOWN["llama3_json"])
    settings.write_text(json.dumps({**config, "chat_template": SHOWN["deepseek_v31"]}))
    assert chosen(model) == "deepseek_v31"
    assert chosen(model, chat_template=str(named)) == "llama3_json"
    both = [{"name": "default", "template": SHOWN["deepseek_v31"]}, {"name": "tool_use", "template": SHOWN["hermes"]}]
    settings.write_text(json.dumps({**config, "chat_template": both}))
    assert chosen(model) == "hermes"
    assert chosen(model, chat_template=str(named)) == "hermes"


def test_the_example_template_is_of_the_format_that_it_names() -> None:
    example = Path(__file__).parents[2] / "examples" / "chatml_tools.jinja"
    assert chosen(Path("demo"), chat_template=str(example)) == "hermes"
    assert chosen(Path("demo")) == "json"
