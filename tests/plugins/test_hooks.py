"""Documentation is law: every hook has a heading with its exact signature, an example that runs in an engine, and a test here."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from octavo import hookspecs
from octavo.catalog import Catalog, Device, Needs
from octavo.config import EngineConfig
from octavo.errors import AdmissionRefused
from octavo.grammar import Grammar
from octavo.interfaces import CallPiece, Tool
from octavo.plugins import KIND_OF_HOOK, discover
from octavo.request import Request, SamplingParams
from octavo.text.tokenizer import Tokenizer

from tests.tiny import tiny_llama

DOC = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
HOOKS = [*KIND_OF_HOOK, "engine_ready"]
PROMPTS = [list(range(8, 48)), list(range(60, 77)), [100]]

Example = Callable[[str], ModuleType]


def sections() -> dict[str, tuple[str, str]]:
    """hook -> (heading, code of its section)."""
    found = {}
    for heading, body in re.findall(r"(?ms)^## `(\w+\(.*?)`\n(.*?)(?=^## |\Z)", DOC):
        code = re.findall(r"(?ms)^```python\n(.*?)^```", body)
        found[heading.split("(")[0]] = (heading, "\n".join(code))
    return found


def test_every_hook_has_a_heading_with_its_exact_signature() -> None:
    written = {name: heading for name, (heading, _) in sections().items()}
    actual = {
        name: f"{name}{inspect.signature(getattr(hookspecs, name))}".replace("'", "")
        for name in vars(hookspecs)
        if name.startswith("register_") or name == "engine_ready"
    }
    assert written == actual


def test_every_hook_has_a_test_of_its_name() -> None:
    assert [name for name in HOOKS if f"test_{name}" not in globals()] == []


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """example(hook): the documented example as the module octavo_example."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(hook: str) -> ModuleType:
        (tmp_path / "octavo_example.py").write_text(sections()[hook][1])
        import octavo_example

        return octavo_example  # type: ignore[no-any-return]

    yield load
    sys.modules.pop("octavo_example", None)


def catalog(module: ModuleType) -> Catalog:
    found = discover(extra_modules=[module])
    assert not [e for e in found.problems() if e.origin.module == "octavo_example"]
    return found


def engine(model: Path, catalog: Catalog, **config: Any) -> Any:
    from octavo.engine.build import build_engine

    return build_engine(EngineConfig(model=str(model), max_num_batched_tokens=32, **config), catalog)


def serve(engine: Any, *, times: int = 1) -> tuple[dict[str, list[int]], int]:
    """(greedy tokens by request, prompt tokens taken from the prefix cache) of PROMPTS, `times` over."""
    tokens: dict[str, list[int]] = {}
    cached = 0
    for turn in range(times):
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            engine.add(Request(id=f"{turn}.{i}", prompt=prompt, params=params))
        while engine.busy:
            for event in engine.step().events:
                assert event.error is None
                tokens.setdefault(event.request_id, []).extend(event.tokens)
                cached += event.cached_tokens
    engine.allocator.check()
    return tokens, cached


@pytest.fixture(scope="module")
def expected(tiny: Path) -> tuple[dict[str, list[int]], int]:
    """What core's own parts answer, asked twice."""
    return serve(engine(tiny, discover()), times=2)


def chosen(built: Any, kind: str) -> str:
    name: str = built.explain["decisions"][kind]["chosen"]
    return name


def test_register_allocators(example: Example, tiny: Path, expected: Any) -> None:
    built = engine(tiny, catalog(example("register_allocators")), allocator="forgetful")
    tokens, cached = serve(built, times=2)
    assert chosen(built, "allocator") == "forgetful"
    assert tokens == expected[0] and cached == 0 < expected[1]


def test_register_schedulers(example: Example, tiny: Path, expected: Any) -> None:
    options = {"scheduler": {"short-prompts": {"longest_prompt": 40}}}
    built = engine(tiny, catalog(example("register_schedulers")), scheduler="short-prompts", plugins=options)
    assert serve(built, times=2) == expected
    with pytest.raises(AdmissionRefused, match="41 tokens; this server takes 40"):
        built.add(Request(id="long", prompt=[9] * 41, params=SamplingParams(max_tokens=1)))


def test_register_attention_backends(example: Example, tiny: Path, tmp_path: Path, expected: Any) -> None:
    found = catalog(example("register_attention_backends"))
    built = engine(tiny, found, attention_backend="small-pages")
    assert (chosen(built, "attention"), built.info.block_size) == ("small-pages", 8)
    assert serve(built, times=2)[0] == expected[0]
    wide = tiny_llama(tmp_path / "wide", layers=1, head_dim=192)
    with pytest.raises(Exception, match="head dimensions up to 128, and one layer has 192"):
        engine(wide, found, attention_backend="small-pages")


def test_register_quantizers(example: Example, tiny: Path) -> None:
    found = catalog(example("register_quantizers"))
    built = engine(tiny, found, quantization="rounded")
    assert chosen(built, "quantizer") == "rounded"
    assert all(len(tokens) == 8 for tokens in serve(built)[0].values())
    assert chosen(engine(tiny, found), "quantizer") == "none"


def test_register_model_adapters(example: Example, tmp_path: Path, expected: Any) -> None:
    model = tiny_llama(tmp_path / "acme", architectures=["AcmeForCausalLM"])
    built = engine(model, catalog(example("register_model_adapters")))
    assert chosen(built, "model") == "acme"
    assert serve(built, times=2) == expected


def test_register_operators(example: Example, tiny: Path, expected: Any) -> None:
    built = engine(tiny, catalog(example("register_operators")))
    first, *_, last = built.explain["decisions"]["operators"]["chosen"]  # between them, what is installed for this device
    assert (first, last) == ("gated", "torch")
    assert serve(built, times=2)[0] == expected[0]


def test_register_executors(example: Example, tiny: Path, expected: Any) -> None:
    built = engine(tiny, catalog(example("register_executors")), executor="timed")
    assert chosen(built, "executor") == "timed"
    assert serve(built, times=2) == expected
    assert built.stats().steps == len(built._executor.seconds) > 0


def test_register_grammars(example: Example, tiny: Path) -> None:
    built = engine(tiny, catalog(example("register_grammars")), grammar_backend="numbers")
    assert chosen(built, "grammar") == "numbers"
    params = SamplingParams(temperature=1, seed=1, max_tokens=20, grammar=Grammar.regex("[0-9]{4}"))
    built.add(Request(id="four", prompt=[9, 8, 7], params=params, eos_token_ids=(2,)))
    tokens = []
    while built.busy:
        tokens += [token for event in built.step().events for token in event.tokens]
    digits = [token for token in range(8, 264) if Tokenizer.from_path(tiny).token_bytes(token).isdigit()]
    assert len(tokens) == 5 and tokens[-1] == 2 and set(tokens[:4]) <= set(digits)
    with pytest.raises(AdmissionRefused, match=r"a pattern such as \[0-9\]\{4\} is needed, got json_object"):
        built.add(Request(id="other", prompt=[9], params=SamplingParams(grammar=Grammar.json_object())))


def test_register_tool_parsers(example: Example, tiny: Path) -> None:
    found = catalog(example("register_tool_parsers"))
    assert chosen(engine(tiny, found, tool_call_parser="slashes"), "tool_parser") == "slashes"
    made = found.resolve("tool_parser", Needs("tool_parser", Device()), "slashes").create(None)
    parser = made.parser(["add"], most=None)
    said = [parser.feed(piece) for piece in ("Sure.\n/ad", 'd {"a": 1', ', "b": 2}\n', "/sub {}\nDone.")]
    assert "".join(text for text, _ in [*said, parser.end()]) == "Sure.\n/sub {}\nDone."
    assert [piece for _, pieces in said for piece in pieces] == [CallPiece(0, "add", '{"a": 1, "b": 2}')]
    calls = made.grammar([Tool("add")], many=False, free=False)
    assert (calls.calls[0].begin, calls.calls[0].end, calls.many) == ("/add ", "\n", False)


def test_engine_ready(example: Example, tiny: Path) -> None:
    module = example("engine_ready")
    built = engine(tiny, catalog(module))
    assert module.started == [(built.info.model, chosen(built, "attention"))]


def test_no_hook_runs_after_the_build(example: Example, tiny: Path, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    """Every hook, every register function and every accepts raises once the engine is built, and steps go on."""
    import octavo.builtin
    import octavo.plugins
    import pluggy

    built = engine(tiny, catalog(example("register_executors")), executor="timed")

    def never(*args: Any, **kw: Any) -> Any:
        raise AssertionError("a hook ran after the build")

    call = pluggy.HookCaller.__call__  # pytest's own hooks come through here too
    monkeypatch.setattr(pluggy.HookCaller, "__call__", lambda self, **kw: never() if self.name in HOOKS else call(self, **kw))
    monkeypatch.setattr(octavo.plugins, "discover", never)
    for name in vars(octavo.builtin):
        if name.startswith(("register_", "accepts_")):
            monkeypatch.setattr(octavo.builtin, name, never)
    for method in ("resolve", "resolve_operators", "configured"):
        monkeypatch.setattr(Catalog, method, never)
    assert serve(built, times=2) == expected
