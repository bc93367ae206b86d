"""Resolution: one provider by name or by priority, never by load order, and a reason for every other one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.catalog import Accept, Catalog, Device, Entry, Needs, Options, Origin, Provider, Reject, always
from octavo.errors import ConfigError, PluginError

NEEDS = Needs("attention", Device(), "float32", {"kv_dtype": "float32"})
Answer = Callable[[Needs, Any], Accept | Reject]


class Tuning(Options):
    """Options of the provider under test."""

    splits: int = 4
    mode: str = "fast"


class Demanding(Options):
    """Options without a default."""

    license_file: str


def accept(preferences: dict[str, Any] | None = None, reason: str = "") -> Answer:
    return lambda needs, options: Accept(preferences or {}, reason)


def reject(reason: str) -> Answer:
    return lambda needs, options: Reject(reason)


def entry(name: str, priority: int = 0, accepts: Answer = always, *, mine: bool = True, **kw: Any) -> Entry:
    load = kw.pop("load", "tests.plugins.parts:Part")
    made = Provider(name, "attention", load, priority=priority, accepts=accepts, **kw)
    return Entry("attention", name, Origin(f"dist-{name}", "1.0", name, first_party=mine), provider=made)


def catalog(*entries: Entry) -> Catalog:
    return Catalog(entries)


def test_auto_takes_the_highest_priority_that_accepts() -> None:
    decision = catalog(entry("low", 1), entry("high", 9), entry("top", 50, reject("needs a GPU, got cpu"))).resolve(
        "attention", NEEDS
    )
    assert decision.name == "high"
    reasons = {v.name: v.reason for v in decision.others}
    assert reasons["top"] == "needs a GPU, got cpu"
    assert "priority 1 is lower" in reasons["low"]


@given(st.permutations([("a", 3), ("b", 7), ("c", 7.5), ("d", -1)]))
def test_the_order_of_registration_never_matters(order: list[tuple[str, Any]]) -> None:
    decision = catalog(*(entry(name, priority) for name, priority in order)).resolve("attention", NEEDS)
    assert decision.name == "c"
    assert {v.name for v in decision.others} == {"a", "b", "d"}


def test_a_tie_is_an_error_that_names_both() -> None:
    with pytest.raises(PluginError, match=r"'a' \(dist-a 1.0\) and 'b' \(dist-b 1.0\).*same priority 5"):
        catalog(entry("a", 5), entry("b", 5), entry("c", 1)).resolve("attention", NEEDS)


def test_a_tie_below_the_winner_is_none() -> None:
    assert catalog(entry("a", 5), entry("b", 5), entry("c", 6)).resolve("attention", NEEDS).name == "c"


def test_a_named_provider_that_rejects_is_an_error_with_its_reason_and_no_other_is_taken() -> None:
    parts = catalog(entry("named", 1, reject("head_dim 96 is not a multiple of 64")), entry("other", 9))
    with pytest.raises(
        PluginError, match=r"'named' of dist-named 1\.0 was named but rejects .*head_dim 96 is not a multiple of 64"
    ):
        parts.resolve("attention", NEEDS, "named")


def test_a_named_provider_wins_over_a_higher_priority_and_the_others_are_explained() -> None:
    parts = catalog(entry("named", 1), entry("other", 9), entry("third", 5, reject("no")))
    decision = parts.resolve("attention", NEEDS, "named")
    assert (decision.name, decision.asked) == ("named", "named")
    assert {v.name: v.reason for v in decision.others} == {
        "other": "'named' was named; would accept",
        "third": "'named' was named; would reject: no",
    }


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(PluginError, match="no such attention provider; did you mean 'triton'"):
        catalog(entry("triton"), entry("torch")).resolve("attention", NEEDS, "tritn")


def test_when_nothing_accepts_every_reason_is_listed() -> None:
    parts = catalog(entry("a", 1, reject("reason one")), entry("b", 2, reject("reason two")), entry("c", 3, mine=False))
    with pytest.raises(PluginError, match=r"(?s)no attention provider accepts.*reason one.*reason two.*plugins\.enable"):
        parts.resolve("attention", NEEDS)


def test_an_accepts_that_raises_or_answers_nonsense_is_a_reason_and_not_a_crash() -> None:
    def broken(needs: Needs, options: Any) -> Accept | Reject:
        raise KeyError("sm_90")

    parts = catalog(entry("good", 1), entry("raises", 5, broken), entry("nonsense", 6, lambda n, o: True))  # type: ignore[arg-type,return-value]
    reasons = {v.name: v.reason for v in parts.resolve("attention", NEEDS).others}
    assert "raised KeyError" in reasons["raises"] and "returned True" in reasons["nonsense"]
    with pytest.raises(PluginError, match="sm_90"):
        parts.resolve("attention", NEEDS, "raises")


def test_options_are_typed_and_reach_accepts_and_the_constructor() -> None:
    seen = []

    def accepts(needs: Needs, options: Tuning) -> Accept | Reject:
        seen.append(options.splits)
        return Accept()

    parts = catalog(entry("a", 1, accepts, options=Tuning)).configured({"attention": {"a": {"splits": 8}}})
    built = parts.resolve("attention", NEEDS).create("the parts")
    assert seen == [8]
    assert built.options == Tuning(splits=8) and built.parts == "the parts"


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({"attention": {"a": {"spits": 8}}}, (r"plugins.attention.a.spits: unknown option", "did you mean 'splits'")),
        ({"attention": {"a": {"splits": "many"}}}, ("plugins.attention.a.splits", "'many'")),
        ({"attention": {"b": {}}}, ("plugins.attention.b", "no such attention provider", "there are: a")),
        ({"atention": {}}, ("plugins.atention", "did you mean 'attention'")),
        ({"attention": 3}, ("plugins.attention", "3")),
        ({"attention": {"a": 3}}, ("plugins.attention.a", "3")),
        ({"enabled": ["x"]}, ("plugins.enabled", "did you mean 'enable'")),
    ],
)
def test_a_wrong_option_key_is_an_error_that_says_where(plugins: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        catalog(entry("a", options=Tuning)).configured(plugins)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_required_option_that_is_missing_is_a_reason_not_to_choose_it() -> None:
    parts = catalog(entry("free", 1), entry("paid", 9, options=Demanding))
    decision = parts.resolve("attention", NEEDS)
    assert decision.name == "free"
    assert "plugins.attention.paid.license_file" in decision.others[0].reason
    configured = parts.configured({"attention": {"paid": {"license_file": "x"}}})
    assert configured.resolve("attention", NEEDS).name == "paid"


def test_configuring_leaves_the_catalogue_it_came_from_alone() -> None:
    bare = catalog(entry("a", options=Tuning))
    configured = bare.configured({"attention": {"a": {"splits": 8}}})
    assert bare.options == {} and configured.fingerprint() != bare.fingerprint()
    assert configured.configured({}).fingerprint() == configured.fingerprint()


@pytest.mark.parametrize("load", ["no.such.module:Part", "tests.plugins.parts:Absent"])
def test_a_class_that_cannot_be_imported_is_an_error_that_names_the_provider(load: str) -> None:
    decision = catalog(entry("a", load=load)).resolve("attention", NEEDS)
    with pytest.raises(PluginError, match=rf"attention 'a' of dist-a 1\.0 cannot be loaded from '{load}'"):
        decision.create(None)


def test_what_a_constructor_raises_passes_through_and_says_whose_it_is() -> None:
    decision = catalog(entry("a", load="tests.plugins.parts:Refusing")).resolve("attention", NEEDS)
    with pytest.raises(ZeroDivisionError) as caught:
        decision.create(None)
    assert "while building attention 'a' of dist-a 1.0" in caught.value.__notes__


def test_a_decision_is_plain_data() -> None:
    decision = catalog(entry("a", 1, accept({"block_sizes": (16, 32), "align": 8}, "fits")), entry("b", 0)).resolve(
        "attention", NEEDS
    )
    told = json.loads(json.dumps(decision.explain()))
    assert told["chosen"] == "a" and told["preferences"] == {"block_sizes": [16, 32], "align": 8} and "fits" in told["why"]
    assert told["not_chosen"][0]["name"] == "b"
    assert "a (dist-a 1.0" in str(decision) and "not b (dist-b)" in str(decision)


# ---------------------------------------------------------------- operators: a set, merged


def operators(name: str, priority: int, accepts: Answer = always) -> Entry:
    made = Provider(name, "operators", f"tests.plugins.parts:Ops{name.title()}", priority=priority, accepts=accepts)
    return Entry("operators", name, Origin(f"dist-{name}", "1.0", name, first_party=True), provider=made)


def test_each_operator_is_served_by_the_highest_priority_that_offers_it() -> None:
    decision = catalog(operators("torch", 1), operators("fused", 9)).resolve_operators(Needs("operators", Device()))
    ops = decision.create(None)
    assert [d.name for d in decision.chosen] == ["fused", "torch"]
    assert ops.served_by == {("norm", "plain"): "fused", ("rope", "plain"): "torch", ("norm", "fp8"): "fused"}
    assert ops("norm")() == "fused norm" and ops("rope")() == "torch rope" and ops("norm", "fp8")() == "fused norm fp8"


def test_an_operator_that_nobody_offers_is_an_error_that_lists_what_there_is() -> None:
    ops = catalog(operators("torch", 1)).resolve_operators(Needs("operators", Device())).create(None)
    with pytest.raises(PluginError, match=r"no operator 'gelu' for format 'plain'; there are: norm \(plain\), rope \(plain\)"):
        ops("gelu")


def test_two_that_offer_one_operator_at_one_priority_are_an_error() -> None:
    decision = catalog(operators("torch", 5), operators("fused", 5)).resolve_operators(Needs("operators", Device()))
    with pytest.raises(PluginError, match=r"'norm' for format 'plain'.*dist-fused.*dist-torch"):
        decision.create(None)


def test_operators_that_reject_are_explained_and_not_built() -> None:
    decision = catalog(operators("torch", 1), operators("fused", 9, reject("no GPU"))).resolve_operators(
        Needs("operators", Device())
    )
    assert [d.name for d in decision.chosen] == ["torch"] and decision.others[0].reason == "no GPU"
    with pytest.raises(PluginError, match="no GPU"):
        catalog(operators("fused", 9, reject("no GPU"))).resolve_operators(Needs("operators", Device()))
