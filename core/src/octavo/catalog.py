"""The catalogue: Provider, Accept, Reject, Needs, and how one provider is chosen.

Owns the value types of the plugin contract and the resolution rule (the result is an
`octavo.decision.Decision`). Imports no provider's class; holds no global state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.decision import Decision, OperatorDecision, Verdict
from octavo.errors import ConfigError, OctavoError, PluginError
from octavo.first_party import owner
from octavo.wording import complaints, hint, normalise

CONTRACT = 1
"""Version of the plugin contract that this core implements; a Provider states the one it was written for."""

Kind = Literal["allocator", "scheduler", "attention", "quantizer", "model", "operators", "executor", "grammar", "tool_parser"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Options(BaseModel):
    """Base of a provider's typed options (config key ``plugins.<kind>.<name>``). Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of the device that the parts will run on. capability is (major, minor) on CUDA, else (0, 0)."""

    type: str = "cpu"  # "cpu" | "cuda"
    index: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    memory: int = 0  # bytes, total
    free_memory: int = 0  # bytes, what other processes hold already subtracted
    driver: str = ""
    features: frozenset[str] = frozenset()  # CPU flags such as "avx512_bf16", "amx_bf16"; "fp8" on CUDA


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part must be able to do, asked before anything is allocated.

    facts holds kind-specific values; the names are fixed by `octavo.interfaces` (for attention:
    head_dims, num_heads, num_kv_heads, windows, sinks, softcap, kv_dtype, block_size (None where
    it is free); for quantizer: method, config; for model: architecture, config).
    """

    kind: Kind
    device: Device
    dtype: str = "float32"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accept:
    """Yes; with preferences, such as block_sizes (best first) or alignment, and why."""

    preferences: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """No, because of `reason`: a sentence that names the need that cannot be met and its value."""

    reason: str


def always(needs: Needs, options: Any) -> Accept | Reject:
    """The `accepts` of a part that runs anywhere."""
    return Accept()


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of one kind of part.

    name: unique per kind. load: "module:Class", imported only when chosen, and called as
    ``cls(options, parts)``. accepts: pure and cheap; must not import anything heavy.
    priority: among those that accept, `auto` takes the highest (core's own are 0 to 10).
    quantize: for a quantizer that can make checkpoints, "module:function" of type
    `octavo.interfaces.Quantize`, imported when `octavo quantize NAME` names it; quantize_options are
    its options (`--set key=value`).
    """

    name: str
    kind: Kind
    load: str
    api: int = CONTRACT
    priority: int = 0
    accepts: Callable[[Needs, Any], Accept | Reject] = always
    options: type[Options] = Options
    summary: str = ""
    quantize: str = ""
    quantize_options: type[Options] = Options


# ---------------------------------------------------------------- the inventory

State = Literal["ok", "failed", "rejected", "duplicate"]
"""ok: can be chosen. failed: importing it or calling its hook raised. rejected: breaks the contract
(misspelt hook, wrong contract version, malformed provider). duplicate: its kind and name are taken twice."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a provider comes from. first_party: `auto` may choose it without plugins.enable."""

    distribution: str
    version: str
    module: str
    first_party: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the inventory. kind is a Kind, "observer" (a plugin that only watches), or "plugin"
    for a plugin that supplied nothing because it failed or was rejected; provider is None for both."""

    kind: str
    name: str
    origin: Origin
    state: State = "ok"
    reason: str = ""
    provider: Provider | None = None
    traceback: str = ""

    @property
    def contract(self) -> int | None:
        return self.provider.api if self.provider else None


# ---------------------------------------------------------------- the catalogue


@dataclass(frozen=True)
class Catalog:
    """Everything that was discovered, and the rule by which one of it is chosen. Frozen; see
    `octavo.plugins.discover` for how it comes to be and `configured` for plugin options."""

    entries: tuple[Entry, ...]
    enabled: frozenset[str] = frozenset()  # normalised distribution names
    options: Mapping[tuple[str, str], BaseModel] = field(default_factory=dict)
    announce: Callable[[Catalog, object], None] = field(default=lambda catalog, engine: None, repr=False)

    def ready(self, engine: object) -> None:
        """Call `engine_ready` of every active plugin; once, in the engine's process, after the build."""
        self.announce(self, engine)

    # -- what there is

    def active(self, entry: Entry) -> bool:
        """Whether `auto` may choose it: first-party, or listed in plugins.enable."""
        return entry.origin.first_party or normalise(entry.origin.distribution) in self.enabled

    def names(self, kind: str) -> list[str]:
        return sorted({e.name for e in self.entries if e.kind == kind})

    def problems(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.state != "ok")

    def inventory(self) -> list[dict[str, Any]]:
        """Every line as plain data: what `octavo plugins list --json` prints."""
        return [
            {
                "kind": e.kind,
                "name": e.name,
                "distribution": e.origin.distribution,
                "version": e.origin.version,
                "contract_version": e.contract,
                "state": e.state,
                "reason": e.reason or ("" if self.active(e) else _dormant(e)),
                "auto": e.state == "ok" and self.active(e),
                "priority": e.provider.priority if e.provider else None,
                "module": e.origin.module,
                "summary": e.provider.summary if e.provider else "",
                "traceback": e.traceback,
            }
            for e in self.entries
        ]

    def fingerprint(self) -> str:
        """Equal in two processes that would choose alike: over everything that can be chosen and how."""
        lines = sorted(
            [e.kind, e.name, str(e.origin), e.state, e.provider.load, e.provider.priority, e.provider.api]
            for e in self.entries
            if e.provider
        )
        chosen = sorted([kind, name, value.model_dump(mode="json")] for (kind, name), value in self.options.items())
        text = json.dumps([CONTRACT, lines, sorted(self.enabled), chosen], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    # -- configuration

    def configured(self, plugins: Mapping[str, Any]) -> Catalog:
        """This catalogue with `EngineConfig.plugins` applied: distributions to enable, and typed options.
        ConfigError for an unknown distribution, kind, provider or option, or a value of the wrong type."""
        installed = {normalise(e.origin.distribution): e.origin.distribution for e in self.entries}
        enabled = set(self.enabled)
        listed = plugins.get("enable", ())
        if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
            raise ConfigError(f"plugins.enable must be a list of distribution names, got {listed!r}")
        for name in listed:
            if normalise(name) not in installed:
                raise ConfigError(
                    f"plugins.enable names {name!r}, which is not an installed plugin{hint(name, installed.values())}"
                )
            enabled.add(normalise(name))
        options = dict(self.options)
        for kind, providers in plugins.items():
            if kind == "enable":
                continue
            if kind not in KINDS:
                raise ConfigError(f"plugins.{kind}: no such kind of part{hint(kind, (*KINDS, 'enable'))}")
            if not isinstance(providers, Mapping):
                raise ConfigError(f"plugins.{kind} must map provider names to options, got {providers!r}")
            for name, values in providers.items():
                options[kind, name] = self._parse(kind, name, values)
        return replace(self, enabled=frozenset(enabled), options=options)

    def _parse(self, kind: str, name: str, values: Any) -> BaseModel:
        where = f"plugins.{kind}.{name}"
        provider = self._named(kind, name, ConfigError, where).provider
        assert provider is not None
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must map option names to values, got {values!r}")
        try:
            return provider.options.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(complaints(f"{where}.", provider.options, error)) from error

    # -- resolution

    def resolve(self, kind: Kind, needs: Needs, name: str = "auto") -> Decision:
        """Choose one provider of `kind`. Raises PluginError: a named one that is unknown, broken or
        rejects; under "auto", nothing that accepts, or two that accept at one priority."""
        if name != "auto":
            return self._resolve_named(kind, needs, name)
        accepted, verdicts = self._ask_all(kind, needs)
        if not accepted:
            listed = "".join(f"\n  {v.name} ({v.distribution}): {v.reason}" for v in verdicts)
            raise PluginError(f"no {kind} provider accepts {_describe(needs)}:{listed or ' none is installed'}{self._suspects()}")
        best = accepted[0]
        tied = [d for d in accepted[1:] if d.provider.priority == best.provider.priority]
        if tied:
            both = " and ".join(f"{d.name!r} ({d.origin})" for d in (best, *tied))
            raise PluginError(
                f"{kind}: {both} accept at the same priority {best.provider.priority}; name the one to use in the configuration"
            )
        why = f"accepts, priority {best.provider.priority}; " + (
            "the only one that accepts" if len(accepted) == 1 else "the highest of those that accept"
        )
        lower = [
            Verdict(
                d.name, d.origin.distribution, f"accepts, but its priority {d.provider.priority} is lower than {best.name!r}'s"
            )
            for d in accepted[1:]
        ]
        return replace(best, reason=_join(why, best.accept.reason), others=(*lower, *verdicts))

    def resolve_operators(self, needs: Needs) -> OperatorDecision:
        """Every active operator provider that accepts, highest priority first; PluginError if none does."""
        accepted, verdicts = self._ask_all("operators", needs)
        if not accepted:
            listed = "".join(f"\n  {v.name} ({v.distribution}): {v.reason}" for v in verdicts)
            raise PluginError(
                f"no operators provider accepts {_describe(needs)}:{listed or ' none is installed'}{self._suspects()}"
            )
        reasoned = [replace(d, reason=_join(f"accepts, priority {d.provider.priority}", d.accept.reason)) for d in accepted]
        return OperatorDecision(tuple(reasoned), verdicts)

    def _resolve_named(self, kind: Kind, needs: Needs, name: str) -> Decision:
        entry = self._named(kind, name, PluginError, f"{kind} {name!r}")
        answer = self._ask(entry, needs)
        if isinstance(answer, Reject):
            raise PluginError(f"{kind} {name!r} of {entry.origin} was named but rejects {_describe(needs)}: {answer.reason}")
        others = []
        for other in self.entries:
            if other.kind != kind or other.name == name:
                continue
            if other.state != "ok":
                reason = other.reason
            elif not self.active(other):
                reason = f"{name!r} was named"
            else:
                verdict = self._ask(other, needs)
                would = f"would reject: {verdict.reason}" if isinstance(verdict, Reject) else "would accept"
                reason = f"{name!r} was named; {would}"
            others.append(Verdict(other.name, other.origin.distribution, reason))
        return replace(answer, asked=name, reason=_join("named in the configuration", answer.accept.reason), others=tuple(others))

    def _named(self, kind: str, name: str, error: type[OctavoError], where: str) -> Entry:
        found = [e for e in self.entries if e.kind == kind and e.name == name]
        for entry in found:
            if entry.state != "ok":
                raise error(f"{where}: {entry.origin} has it, but it is {entry.state}: {entry.reason}")
        if not found:
            raise error(f"{where}: no such {kind} provider{owner(kind, name) or hint(name, self.names(kind))}{self._suspects()}")
        return found[0]

    def _ask_all(self, kind: Kind, needs: Needs) -> tuple[list[Decision], tuple[Verdict, ...]]:
        """Acceptors, highest priority first, and a verdict for each of the rest."""
        accepted: list[Decision] = []
        verdicts: list[Verdict] = []
        for entry in self.entries:
            if entry.kind != kind:
                continue
            if entry.state == "duplicate" and any(
                self.active(e) for e in self.entries if (e.kind, e.name) == (entry.kind, entry.name)
            ):
                raise PluginError(f"{kind} {entry.name!r}: {entry.reason}")
            if entry.state != "ok":
                verdicts.append(Verdict(entry.name, entry.origin.distribution, f"{entry.state}: {entry.reason}"))
            elif not self.active(entry):
                verdicts.append(Verdict(entry.name, entry.origin.distribution, _dormant(entry)))
            else:
                answer = self._ask(entry, needs)
                if isinstance(answer, Reject):
                    verdicts.append(Verdict(entry.name, entry.origin.distribution, answer.reason))
                else:
                    accepted.append(answer)
        accepted.sort(key=lambda d: (-(d.provider.priority), d.name))
        return accepted, tuple(verdicts)

    def _ask(self, entry: Entry, needs: Needs) -> Decision | Reject:
        """Ask one provider. An `accepts` that raises or answers nonsense is a Reject that says so."""
        provider = entry.provider
        assert provider is not None
        options = self.options.get((entry.kind, entry.name))
        if options is None:
            try:
                options = provider.options()
            except ValidationError as error:
                return Reject(complaints(f"plugins.{entry.kind}.{entry.name}.", provider.options, error))
        try:
            answer = provider.accepts(needs, options)
        except Exception as error:
            return Reject(f"its accepts() raised {type(error).__name__}: {error}")
        if isinstance(answer, Accept):
            return Decision(provider.kind, "auto", provider, entry.origin, answer, options, answer.reason)
        return answer if isinstance(answer, Reject) else Reject(f"its accepts() returned {answer!r}, not an Accept or a Reject")

    def _suspects(self) -> str:
        """Plugins whose providers are unknown because they failed: the missing one may be theirs."""
        lost = [e for e in self.entries if e.kind == "plugin"]
        return "".join(f"\n  (plugin {e.name!r} of {e.origin} {e.state}: {e.reason})" for e in lost)


def _dormant(entry: Entry) -> str:
    return f"installed but not active: name it, or add {entry.origin.distribution!r} to plugins.enable"


def _join(why: str, more: str) -> str:
    return f"{why}: {more}" if more else why


def _describe(needs: Needs) -> str:
    facts = [f"{key} {value!r}" for key, value in needs.facts.items() if isinstance(value, (str, int, float)) and value != ""]
    return ", ".join([f"device {needs.device.type}", f"dtype {needs.dtype}", *facts])
