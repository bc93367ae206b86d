"""Tenants: what the file may hold, and the table of keys that is made of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.tenant_file import Limits, parse_tenants
from octavo.server.tenants import Tenants

SECRET = "sk-a-secret-that-is-shown-nowhere"


def one(text: str) -> Any:
    return parse_tenants(text, "FILE")[0]


# ------------------------------------------------------------------ the file


def test_a_tenant_has_a_name_keys_a_weight_and_limits() -> None:
    text = f"""
    tenants:
      - name: team-a
        key: [old-key, new-key]
        weight: 2.5
        limits: {{max_tokens: 64, models: small}}
      - name: team.b
        key_sha256: {hashlib.sha256(b"b-key").hexdigest()}
    """
    first, second = parse_tenants(text, "FILE")
    assert (first.name, first.key, first.weight) == ("team-a", ("old-key", "new-key"), 2.5)
    assert first.limits == Limits(max_tokens=64, models=("small",))
    assert (second.weight, second.limits) == (1.0, Limits())


def test_the_example_of_the_documents_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    example = page.split("## Tenants", 1)[1].split("```yaml", 1)[1].split("```", 1)[0]
    search, trial = parse_tenants(example, "docs/operating.md")
    assert (search.name, search.weight) == ("search", 3)
    assert set(trial.limits.model_dump(exclude_none=True)) == set(Limits.model_fields), "every limit is in the example"
    assert all(f"| `{name}`" in page or f", `{name}` |" in page for name in Limits.model_fields), "and in the table"


def test_json_is_read_too_with_tabs() -> None:
    assert one('{\t"tenants": [{"name": "a", "key": "k"}]}').name == "a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tenants"),
        ("tenants: []", "at least one"),
        ("- name: a", "tenants"),
        ("tenants: [{name: a}]", "key"),
        ("tenants: [{name: '', key: k}]", "tenants[0].name"),
        ("tenants: [{name: 'a b', key: k}]", "tenants[0].name: must be 1 to 64 letters"),
        ("tenants: [{name: a, key: ''}]", "key"),
        ("tenants: [{name: a, key: ' k'}]", "key"),
        ("tenants: [{name: a, key: 5}]", "tenants[0].key"),
        ("tenants: [{name: a, key_sha256: abc}]", "64 hexadecimal"),
        ("tenants: [{name: a, key: k, weight: 0}]", "tenants[0].weight: must be greater than 0"),
        ("tenants: [{name: a, key: k, weight: .inf}]", "tenants[0].weight"),
        ("tenants: [{name: a, key: k, limits: {max_tokens: 0}}]", "tenants[0].limits.max_tokens"),
        ("tenants: [{name: a, key: k, limits: {max_token: 1}}]", "did you mean 'max_tokens'"),
        ("tenants: [{name: a, kye: k}]", "did you mean 'key'"),
        ("tenants: [{name: a, key: k, limits: {min_priority: 2, max_priority: 1}}]", "min_priority"),
        ("tenants: [{name: a, key: k, limits: {models: []}}]", "tenants[0].limits.models"),
        ("tenants: [{name: a, name: b, key: k}]", "set twice"),
        ('{"tenants": [{"name": "a", "key": "k", "key": "l"}]}', "set twice"),
        ("tenants: [{name: a, key: k}", "not valid YAML"),
        ('{"tenants": [', "not valid JSON"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, "FILE")
    assert str(caught.value).startswith("FILE: ") and says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"tenants: [{{name: a, key: '{SECRET}', weight: x}}]",
        f"tenants: [{{name: '{SECRET} x', key: k}}]",
        f"tenants: [{{name: a, key: k, limits: {{max_tokens: '{SECRET}'}}}}]",
        f"tenants: [{{name: a, key: '{SECRET}\u0007'}}]",
        f"tenants: [{{name: a, key_sha256: '{SECRET}'}}]",
        f"tenants: [{{name: a, '{SECRET}': 1}}]",
        f"tenants: [{{name: a, key: '{SECRET}]",
        f"{SECRET}: {{limits: 1}}",
        f"tenants:\n  - name: a\n    key: {SECRET}\n   weight: 1",
        f'{{"tenants": [{{"name": "a", "key": "{SECRET}" ',
        f"tenants: [{{'{SECRET}': 1, '{SECRET}': 2}}]",
    ],
)
def test_no_error_about_the_file_shows_what_may_be_a_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, "FILE")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__, "a traceback would show it"


def test_keys_are_not_in_a_tenants_repr() -> None:
    entry = one(f"tenants: [{{name: a, key: {SECRET}}}]")
    assert SECRET not in repr(entry) and SECRET not in str(entry)


# ------------------------------------------------------------------ the table of keys


def table(tmp_path: Path, text: str, **config: Any) -> Tenants:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return Tenants(ServerConfig(api_keys_file=str(path), **config))


def test_a_key_or_its_digest_finds_its_tenant(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"two").hexdigest().upper()
    tenants = table(tmp_path, f"tenants: [{{name: a, key: one, weight: 3}}, {{name: b, key_sha256: {digest}}}]")
    assert [tenants.find(key).tenant for key in ("one", "two")] == ["a", "b"]  # type: ignore[union-attr]
    assert tenants.find("one").weight == 3  # type: ignore[union-attr]
    assert tenants.find("three") is None and tenants.find(digest) is None


def test_keys_of_flags_file_and_environment_stand_side_by_side(tmp_path: Path) -> None:
    tenants = table(
        tmp_path, "tenants: [{name: a, key: one}]", api_key=("flag",), api_keys='{"tenants": [{"name": "e", "key": "env"}]}'
    )
    assert tenants.names == ["key-0", "e", "a"]
    assert [tenants.find(key).tenant for key in ("flag", "env", "one")] == ["key-0", "e", "a"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "config", "says"),
    [
        ("tenants: [{name: a, key: x}, {name: a, key: y}]", {}, "'a' is defined twice"),
        ("tenants: [{name: a, key: x}, {name: b, key: x}]", {}, "'a' and 'b' have a key in common"),
        ("tenants: [{name: a, key: x}]", {"api_key": ("x",)}, "have a key in common"),
        ("tenants: [{name: key-0, key: x}]", {"api_key": ("y",)}, "'key-0' is defined twice"),
        ("tenants: [{name: a, key: adm}]", {"admin_api_key": ("adm",)}, "administrator"),
    ],
)
def test_what_would_mix_tenants_up_stops_the_start(tmp_path: Path, text: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        table(tmp_path, text, **config)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants(ServerConfig(api_keys_file=str(tmp_path / "none")))


def test_cache_domains_come_from_the_key_and_differ_between_keys_and_servers(tmp_path: Path) -> None:
    text = "tenants: [{name: a, key: [one, two]}, {name: b, key: three}]"
    tenants, another = table(tmp_path, text), table(tmp_path, text)
    domains = [tenants.find(key).domain for key in ("one", "two", "three")]  # type: ignore[union-attr]
    assert len(set(domains)) == 3 and all(domains)
    assert another.find("one").domain != domains[0]  # type: ignore[union-attr]
    tenants.reload()
    assert tenants.find("one").domain == domains[0]  # type: ignore[union-attr]


def test_a_reload_replaces_the_table_whole_or_not_at_all(tmp_path: Path) -> None:
    tenants = table(tmp_path, "tenants: [{name: a, key: one}, {name: b, key: two}]")
    path = tmp_path / "keys.yaml"
    for broken in ("", "tenants: [{name: a, key: three}, {name: a, key: four}]", "tenants: [{name: c, key: '"):
        path.write_text(broken)
        with pytest.raises(ConfigError):
            tenants.reload()
        assert tenants.names == ["a", "b"] and tenants.find("two") is not None
    path.write_text("tenants: [{name: a, key: three}, {name: c, key: two}]")
    tenants.reload()
    assert tenants.find("one") is None
    assert tenants.find("two").tenant == "c" and tenants.find("three").tenant == "a"  # type: ignore[union-attr]


def test_what_a_tenant_has_used_survives_a_reload_and_new_limits_hold_at_once(tmp_path: Path) -> None:
    tenants = table(tmp_path, "tenants: [{name: a, key: one, limits: {requests_per_minute: 3}}]")
    quota = tenants.find("one").quota  # type: ignore[union-attr]
    for _ in range(3):
        quota.enter()
    tenants.reload()
    with pytest.raises(ApiError):
        tenants.find("one").quota.enter()  # type: ignore[union-attr]
    (tmp_path / "keys.yaml").write_text("tenants: [{name: a, key: one, limits: {requests_per_minute: 5}}]")
    tenants.reload()
    quota.enter()
    quota.enter()
    with pytest.raises(ApiError):
        quota.enter()
    (tmp_path / "keys.yaml").write_text("tenants: [{name: a, key: one}]")
    tenants.reload()
    assert quota.enter() and quota.running == 6
