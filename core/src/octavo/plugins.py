"""Discovery: the only pluggy PluginManager in the tree, and the inventory of what loaded and what failed.

`discover` runs once per process, at start. It imports the modules named in the entry-point group
``octavo``, one by one, so that a broken one is a line of the inventory and not a crash; checks their
hooks; calls the `register_*` hooks; and returns a Catalog of ordinary objects. It must never import
a provider's class, and nothing here runs during a step.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import pluggy
from pydantic import BaseModel

from octavo import hookspecs
from octavo.catalog import CONTRACT, Catalog, Entry, Kind, Origin, Provider
from octavo.errors import ConfigError
from octavo.first_party import FIRST_PARTY
from octavo.wording import hint, normalise

GROUP = "octavo"

KIND_OF_HOOK: dict[str, Kind] = {
    "register_allocators": "allocator",
    "register_schedulers": "scheduler",
    "register_attention_backends": "attention",
    "register_quantizers": "quantizer",
    "register_model_adapters": "model",
    "register_operators": "operators",
    "register_executors": "executor",
    "register_grammars": "grammar",
    "register_tool_parsers": "tool_parser",
}


class Rejected(Exception):
    """A plugin breaks the contract; the message becomes the reason in its inventory line."""


def discover(
    plugins: Mapping[str, Any] | None = None,
    *,
    enable: Sequence[str] = (),
    extra_modules: Iterable[str | ModuleType] = (),
) -> Catalog:
    """Gather every installed plugin into a Catalog.

    plugins: `EngineConfig.plugins`, applied as by `Catalog.configured`. enable: distributions that `auto`
    may choose besides the first-party ones and those in `plugins`. extra_modules: plugins given by hand,
    as a module or its name, for tests and notebooks; they are active. Raises ConfigError for a wrong
    name or option and for an extra module that cannot be imported; a broken installed plugin raises
    nothing here and is in the inventory.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    entries: list[Entry] = []
    for name, origin, load in _installed():
        entries.extend(_enlist(manager, name, origin, load))
    by_hand: list[str] = []
    for extra in extra_modules:
        name = extra if isinstance(extra, str) else extra.__name__
        module = _by_hand(extra)
        if not manager.is_registered(module):
            entries.extend(_enlist(manager, name, Origin(name, "", name), lambda module=module: module))
            by_hand.append(name)
    entries = _mark_duplicates(entries)
    entries.sort(key=lambda e: (e.kind == "plugin", e.kind, -(e.provider.priority if e.provider else 0), e.name))
    catalog = Catalog(tuple(entries), frozenset(map(normalise, by_hand)), announce=_announcer(manager, entries))
    return catalog.configured(plugins or {}).configured({"enable": list(enable)})


def _installed() -> Iterator[tuple[str, Origin, Any]]:
    """Entry points in the order of their distributions' names: nothing may depend on the path's order."""
    points = sorted(metadata.entry_points(group=GROUP), key=lambda p: (p.dist.name if p.dist else "", p.name))
    for point in points:
        name, version = (point.dist.name, point.dist.version) if point.dist else ("(unknown distribution)", "")
        yield point.name, Origin(name, version, point.module, normalise(name) in FIRST_PARTY), point.load


def _by_hand(extra: str | ModuleType) -> ModuleType:
    if not isinstance(extra, str):
        return extra
    try:
        return import_module(extra)
    except Exception as error:
        raise ConfigError(f"plugin module {extra!r} cannot be imported: {type(error).__name__}: {error}") from error


def _enlist(manager: pluggy.PluginManager, name: str, origin: Origin, load: Any) -> list[Entry]:
    """Import one plugin, check its hooks, call its register hooks. Never raises for the plugin's faults."""
    plugin: Any = None
    try:
        plugin = load()
        if manager.is_registered(plugin):
            return []
        _check_hooks(manager, plugin, origin.module)
        manager.register(plugin, name=f"{origin.distribution}:{name}")
        entries = [
            _entry(provider, hook, origin)
            for hook in sorted(KIND_OF_HOOK)
            for provider in _call(manager, plugin, hook, origin.module)
        ]
        if not entries:
            entries = [_without_providers(manager, plugin, name, origin)]
        return entries
    except Exception as error:  # a plugin may raise anything; KeyboardInterrupt and SystemExit are the user's
        if plugin is not None and manager.is_registered(plugin):
            manager.unregister(plugin)
        if isinstance(error, (Rejected, pluggy.PluginValidationError)):
            return [Entry("plugin", name, origin, "rejected", str(error))]
        did = "imported" if plugin is None else "asked for its providers"
        reason = f"{type(error).__name__} when {did}: {error}"
        return [Entry("plugin", name, origin, "failed", reason, traceback="".join(traceback.format_exception(error)))]


def _check_hooks(manager: pluggy.PluginManager, plugin: Any, module: str) -> None:
    """Every function marked with hookimpl must be a hook, under its own name, taking only its arguments."""
    known = {name for name in vars(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None}
    for attribute in dir(plugin):
        marked = manager.parse_hookimpl_opts(plugin, attribute)
        if marked is None:
            continue
        hook = marked.get("specname") or attribute
        if hook not in known:
            if not marked.get("optionalhook"):
                raise Rejected(f"{module}.{attribute} is marked as a hook, but there is no hook {hook!r}{hint(hook, known)}")
            continue
        if marked.get("wrapper") or marked.get("hookwrapper"):
            raise Rejected(
                f"{module}.{attribute} wraps {hook!r}: Octavo calls each plugin's hooks by itself, so there is nothing to wrap"
            )
        arguments = list(inspect.signature(getattr(plugin, attribute)).parameters)
        allowed = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        if wrong := [a for a in arguments if a not in allowed]:
            raise Rejected(
                f"{module}.{attribute} takes {', '.join(wrong)}, but the hook {hook!r} has "
                + (f"only the argument {', '.join(allowed)}" if allowed else "no arguments")
            )


def _call(manager: pluggy.PluginManager, plugin: Any, hook: str, module: str) -> list[Any]:
    """One plugin's own answer to one register hook: a list, [] where it does not implement it."""
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin is plugin:
            answer = implementation.function()
            if not isinstance(answer, (list, tuple)):
                raise Rejected(f"{module}.{hook}() must return a list of Providers, got {type(answer).__name__}")
            return list(answer)
    return []


def _entry(provider: Any, hook: str, origin: Origin) -> Entry:
    kind = KIND_OF_HOOK[hook]
    if not isinstance(provider, Provider):
        raise Rejected(f"{origin.module}.{hook}() must return Providers, got {provider!r}")
    fault = _fault(provider, kind, hook)
    return Entry(kind, provider.name, origin, "rejected" if fault else "ok", fault, provider)


def _fault(provider: Provider, kind: Kind, hook: str) -> str:
    """What is wrong with a provider, or ""."""
    if provider.api != CONTRACT:
        newer = isinstance(provider.api, int) and provider.api > CONTRACT
        return f"written for plugin contract {provider.api!r}, but this Octavo implements {CONTRACT}: update " + (
            "Octavo" if newer else "the plugin"
        )
    if provider.kind != kind:
        return f"{hook} supplies kind {kind!r}, but this provider says kind {provider.kind!r}"
    if (
        not isinstance(provider.name, str)
        or not provider.name
        or provider.name == "auto"
        or provider.name != provider.name.strip()
    ):
        return f"{provider.name!r} cannot be a provider's name"
    module, colon, attribute = provider.load.partition(":")
    if not (module and colon and attribute):
        return f"load must read 'module:Class', got {provider.load!r}"
    if not callable(provider.accepts):
        return f"accepts must be a function (needs, options), got {provider.accepts!r}"
    options = provider.options
    if not (isinstance(options, type) and issubclass(options, BaseModel) and options.model_config.get("extra") == "forbid"):
        return (
            f"options must be a pydantic model that forbids unknown keys (derive it from octavo.catalog.Options), got {options!r}"
        )
    return ""


def _without_providers(manager: pluggy.PluginManager, plugin: Any, name: str, origin: Origin) -> Entry:
    """A plugin that only observes; or one that does nothing, with the likely mistake."""
    if manager.get_hookcallers(plugin):
        return Entry("observer", name, origin)
    unmarked = [n for n in dir(plugin) if n.startswith("register_") and callable(getattr(plugin, n))]
    if unmarked:
        near = [get_close_matches(n, KIND_OF_HOOK, n=1) for n in unmarked]
        raise Rejected(
            f"no function in {origin.module} is marked with octavo.hookimpl, though {unmarked[0]!r} looks like "
            + (f"the hook {near[0][0]!r}" if near[0] else "a hook")
        )
    raise Rejected(f"no function in {origin.module} is marked with octavo.hookimpl: the plugin supplies nothing")


def _mark_duplicates(entries: list[Entry]) -> list[Entry]:
    """A kind and name that is taken twice is usable by nobody: never the last one wins."""
    holders: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.provider:
            holders.setdefault((entry.kind, entry.name), []).append(entry)
    marked = []
    for entry in entries:
        rivals = holders.get((entry.kind, entry.name), []) if entry.provider else []
        if len(rivals) > 1:
            both = " and ".join(f"{r.origin} ({r.origin.module})" for r in rivals)
            reason = f"the name is taken twice, by {both}: uninstall one of them"
            entry = replace(entry, state="duplicate", reason=reason)
        marked.append(entry)
    return marked


def _announcer(manager: pluggy.PluginManager, entries: list[Entry]) -> Any:
    """engine_ready of the active plugins, bound to this manager."""

    def announce(catalog: Catalog, engine: object) -> None:
        active = {e.origin.module for e in entries if catalog.active(e)}
        dormant = [p for p in manager.get_plugins() if getattr(p, "__name__", "") not in active]
        manager.subset_hook_caller("engine_ready", remove_plugins=dormant)(engine=engine)

    return announce
