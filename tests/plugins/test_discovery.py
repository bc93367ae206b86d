"""Discovery never crashes on a plugin, and never loses one: each fault is a line of the inventory with its reason.

The faults that authors complain about elsewhere are the list here: typos ignored, import errors swallowed, no
version check, the last registration overwriting in silence, installed meaning active.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from octavo import hookimpl, hookspecs
from octavo.catalog import CONTRACT, Catalog, Device, Entry, Needs, Provider
from octavo.errors import ConfigError, PluginError
from octavo.plugins import KIND_OF_HOOK, discover

from tests.plugins.conftest import Install, provider

CPU = Device()


def line(catalog: Catalog, distribution: str) -> Entry:
    (found,) = [e for e in catalog.entries if e.origin.distribution == distribution]
    return found


def test_core_registers_every_kind_through_the_same_door() -> None:
    entries = discover().entries
    core = {e.kind for e in entries if e.origin.distribution == "octavo" and e.origin.module == "octavo.builtin"}
    assert core == set(KIND_OF_HOOK.values())
    assert all(e.state == "ok" and e.contract == CONTRACT for e in entries if e.origin.distribution == "octavo")


def test_every_register_hook_has_a_kind() -> None:
    assert set(KIND_OF_HOOK) == {name for name in vars(hookspecs) if name.startswith("register_")}


def test_an_installed_plugin_is_listed_with_its_distribution_and_version(install: Install) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends"), version="2.5")
    entry = line(discover(), "acme-attention")
    assert (entry.kind, entry.name, entry.origin.version, entry.state) == ("attention", "acme", "2.5", "ok")


def test_installed_does_not_mean_active(install: Install) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends", ", priority=999"))
    needs = Needs("attention", CPU)
    decision = discover().resolve("attention", needs)
    assert decision.name == "torch"
    (verdict,) = [v for v in decision.others if v.name == "acme"]
    assert "plugins.enable" in verdict.reason and "acme-attention" in verdict.reason
    assert discover(enable=["Acme_Attention"]).resolve("attention", needs).name == "acme"  # names compare as on an index
    assert discover({"enable": ["acme-attention"]}).resolve("attention", needs).name == "acme"
    assert discover().resolve("attention", needs, "acme").name == "acme"  # naming it is enough


def test_a_distribution_that_is_not_installed_cannot_be_enabled(install: Install) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends"))
    with pytest.raises(ConfigError, match=r"acme-atention.*did you mean 'acme-attention'"):
        discover(enable=["acme-atention"])


@pytest.mark.parametrize("value", ["acme-attention", [3], 3, {"a": 1.0}])
def test_plugins_enable_must_be_a_list_of_names(value: Any, install: Install) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends"))
    with pytest.raises(ConfigError, match=r"plugins\.enable"):
        discover({"enable": value})


def test_an_import_error_is_kept_with_its_traceback_and_the_others_still_load(install: Install) -> None:
    install("acme-broken", "import a_module_that_is_nowhere\n")
    install("acme-good", provider("attention", "good", "register_attention_backends"))
    catalog = discover()
    entry = line(catalog, "acme-broken")
    assert (entry.kind, entry.state) == ("plugin", "failed")
    assert "ModuleNotFoundError when imported" in entry.reason and "a_module_that_is_nowhere" in entry.reason
    assert "acme_broken.py" in entry.traceback
    assert line(catalog, "acme-good").state == "ok"


def test_naming_a_provider_of_a_plugin_that_failed_says_what_failed(install: Install) -> None:
    install("acme-broken", "import a_module_that_is_nowhere\n")
    with pytest.raises(PluginError, match=r"(?s)no such attention provider.*acme-broken.*a_module_that_is_nowhere"):
        discover().resolve("attention", Needs("attention", CPU), "acme")


def test_a_hook_that_raises_is_a_failure_with_its_traceback(install: Install) -> None:
    install("acme-raises", "@hookimpl\ndef register_executors():\n    raise RuntimeError('no driver 535')\n")
    entry = line(discover(), "acme-raises")
    assert entry.state == "failed" and "no driver 535" in entry.reason and "register_executors" in entry.traceback


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "@hookimpl\ndef register_atention_backends():\n    return []\n",
            ("register_atention_backends", "did you mean 'register_attention_backends'"),
        ),
        ("@hookimpl\ndef attention():\n    return []\n", ("no hook 'attention'",)),
        ("@hookimpl(specname='register_executor')\ndef mine():\n    return []\n", ("did you mean 'register_executors'",)),
        ("@hookimpl\ndef register_executors(config):\n    return []\n", ("takes config", "no arguments")),
        ("@hookimpl\ndef engine_ready(engin):\n    pass\n", ("takes engin", "only the argument engine")),
        ("@hookimpl(wrapper=True)\ndef register_executors():\n    return (yield)\n", ("wraps 'register_executors'",)),
        ("def register_attention_backend():\n    return []\n", ("hookimpl", "'register_attention_backends'")),
        ("x = 1\n", ("hookimpl", "supplies nothing")),
        ("@hookimpl\ndef register_executors():\n    return None\n", ("must return a list", "NoneType")),
        ("@hookimpl\ndef register_executors():\n    return ['inline']\n", ("must return Providers", "'inline'")),
    ],
)
def test_a_plugin_that_misuses_a_hook_is_rejected_with_the_likely_meaning(
    source: str, words: tuple[str, ...], install: Install
) -> None:
    install("acme-wrong", source)
    entry = line(discover(), "acme-wrong")
    assert entry.state == "rejected"
    assert all(word in entry.reason for word in words), entry.reason


def test_one_misspelt_hook_rejects_the_whole_plugin(install: Install) -> None:
    source = provider("executor", "fast", "register_executors") + provider("scheduler", "fair", "register_scheduler")
    install("acme-half", source)
    assert line(discover(), "acme-half").state == "rejected"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("Provider('x', 'executor', 'a:B', api=2)", ("contract 2", f"implements {CONTRACT}", "update Octavo")),
        ("Provider('x', 'executor', 'a:B', api=0)", ("contract 0", "update the plugin")),
        ("Provider('x', 'attention', 'a:B')", ("register_executors", "'executor'", "'attention'")),
        ("Provider('x', 'executor', 'a.B')", ("module:Class", "a.B")),
        ("Provider('auto', 'executor', 'a:B')", ("'auto'",)),
        ("Provider('', 'executor', 'a:B')", ("''",)),
        ("Provider('x', 'executor', 'a:B', accepts=None)", ("accepts",)),
        ("Provider('x', 'executor', 'a:B', options=dict)", ("options", "dict")),
    ],
)
def test_a_provider_that_breaks_the_contract_is_rejected_and_naming_it_says_why(
    call: str, words: tuple[str, ...], install: Install
) -> None:
    install("acme-wrong", f"@hookimpl\ndef register_executors():\n    return [{call}]\n")
    catalog = discover()
    entry = line(catalog, "acme-wrong")
    assert entry.state == "rejected"
    assert all(word in entry.reason for word in words), entry.reason
    if entry.name == "x":
        with pytest.raises(PluginError, match="acme-wrong") as caught:
            catalog.resolve("executor", Needs("executor", CPU), "x")
        assert all(word in str(caught.value) for word in words)
    assert catalog.resolve("executor", Needs("executor", CPU)).name == "inline"


def test_options_that_swallow_unknown_keys_are_rejected(install: Install) -> None:
    source = """
        from pydantic import BaseModel

        class Loose(BaseModel):
            depth: int = 1

        @hookimpl
        def register_executors():
            return [Provider('x', 'executor', 'a:B', options=Loose)]
    """
    install("acme-loose", "\n".join(text.strip() if "import" in text else text[8:] for text in source.splitlines()))
    entry = line(discover(), "acme-loose")
    assert entry.state == "rejected" and "forbids unknown keys" in entry.reason


def test_two_distributions_with_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("acme-one", provider("attention", "fast", "register_attention_backends"))
    install("acme-two", provider("attention", "fast", "register_attention_backends"), version="3.1")
    catalog = discover()
    for distribution in ("acme-one", "acme-two"):
        entry = line(catalog, distribution)
        assert entry.state == "duplicate" and "acme-one 1.0" in entry.reason and "acme-two 3.1" in entry.reason
    with pytest.raises(PluginError, match=r"acme-one 1\.0.*acme-two 3\.1"):
        catalog.resolve("attention", Needs("attention", CPU), "fast")


def test_a_stranger_that_takes_the_name_of_an_active_provider_stops_auto_too(install: Install) -> None:
    install("acme-torch", provider("attention", "torch", "register_attention_backends"))
    with pytest.raises(PluginError, match=r"octavo 0.*acme-torch 1\.0|acme-torch 1\.0.*octavo 0"):
        discover().resolve("attention", Needs("attention", CPU))


def test_one_name_in_two_kinds_is_no_conflict(install: Install) -> None:
    install("acme-block", provider("executor", "block", "register_executors"))
    assert line(discover(), "acme-block").state == "ok"


def test_the_order_of_the_path_changes_nothing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-b", provider("attention", "b", "register_attention_backends", ", priority=5"))
    install("acme-a", provider("executor", "a", "register_executors", ", priority=5"))
    before = discover()
    monkeypatch.setattr(sys, "path", sys.path[1:] + sys.path[:1])
    after = discover()
    assert before.inventory() == after.inventory() and before.fingerprint() == after.fingerprint()


def test_the_fingerprint_tells_catalogues_apart(install: Install) -> None:
    bare = discover().fingerprint()
    install("acme-attention", provider("attention", "acme", "register_attention_backends"))
    installed = discover()
    assert len({bare, installed.fingerprint(), installed.configured({"enable": ["acme-attention"]}).fingerprint()}) == 3
    assert installed.fingerprint() == discover().fingerprint()


def test_observers_hear_engine_ready_only_when_active(install: Install) -> None:
    source = "heard = []\n\n@hookimpl\ndef engine_ready(engine):\n    heard.append(engine)\n"
    install("acme-watch", source)
    install("acme-quiet", source)
    catalog = discover(enable=["acme-watch"])
    assert line(catalog, "acme-watch").kind == "observer"
    catalog.ready("the engine")
    assert sys.modules["acme_watch"].heard == ["the engine"]  # type: ignore[attr-defined]
    assert sys.modules["acme_quiet"].heard == []  # type: ignore[attr-defined]


def test_an_observer_may_leave_the_argument_out(install: Install) -> None:
    install("acme-watch", "heard = []\n\n@hookimpl\ndef engine_ready():\n    heard.append(1)\n")
    discover(enable=["acme-watch"]).ready("the engine")
    assert sys.modules["acme_watch"].heard == [1]  # type: ignore[attr-defined]


def test_a_module_given_by_hand_is_active() -> None:
    module = ModuleType("by_hand")

    @hookimpl
    def register_executors() -> list[Provider]:
        return [Provider("mine", "executor", "a:B", priority=99)]

    module.register_executors = register_executors  # type: ignore[attr-defined]
    assert discover(extra_modules=[module]).resolve("executor", Needs("executor", CPU)).name == "mine"


def test_a_module_given_by_hand_and_installed_is_one_plugin(install: Install) -> None:
    install("acme-attention", provider("attention", "acme", "register_attention_backends"))
    catalog = discover(extra_modules=["acme_attention"])
    assert line(catalog, "acme-attention").state == "ok"


def test_a_module_given_by_hand_that_cannot_be_imported_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a_module_that_is_nowhere"):
        discover(extra_modules=["a_module_that_is_nowhere"])
