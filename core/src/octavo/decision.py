"""A decision: one provider chosen for one kind of part, why, and why each other was not.

What `Catalog.resolve` returns, what Engine.build creates parts from, and what explain prints: the
same objects. Owns the import of a chosen provider's class; nothing else in the tree does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import PluginError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from octavo.catalog import Accept, Kind, Origin, Provider


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one provider was not chosen."""

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One provider chosen for one kind: what Engine.build creates, and what explain prints."""

    kind: Kind
    asked: str  # "auto", or the name in the configuration
    provider: Provider
    origin: Origin
    accept: Accept
    options: BaseModel
    reason: str
    others: tuple[Verdict, ...] = ()

    @property
    def name(self) -> str:
        return self.provider.name

    def __str__(self) -> str:
        """One line for the start-up log: what, from where, why, and why not the others."""
        return f"{self.name} ({self.origin}; {self.reason}){_besides(self.others)}"

    def create(self, parts: Any) -> Any:
        """Import `load` and call it as cls(options, parts). PluginError if it cannot be imported; what the
        constructor raises passes through, with a note that names the provider."""
        what = f"{self.kind} {self.name!r} of {self.origin}"
        module, _, attribute = self.provider.load.partition(":")
        try:
            cls = getattr(import_module(module), attribute)
        except Exception as error:
            raise PluginError(f"{what} cannot be loaded from {self.provider.load!r}: {type(error).__name__}: {error}") from error
        try:
            return cls(self.options, parts)
        except Exception as error:
            error.add_note(f"while building {what}")
            raise

    def explain(self) -> dict[str, Any]:
        """The decision as plain data (JSON types)."""
        return {
            "kind": self.kind,
            "chosen": self.name,
            "distribution": self.origin.distribution,
            "version": self.origin.version,
            "load": self.provider.load,
            "asked": self.asked,
            "why": self.reason,
            "preferences": {key: _plain(value) for key, value in self.accept.preferences.items()},
            "options": self.options.model_dump(mode="json"),
            "not_chosen": [{"name": v.name, "distribution": v.distribution, "reason": v.reason} for v in self.others],
        }


@dataclass(frozen=True, slots=True)
class OperatorSet:
    """Operators of several providers, merged: call it as op(name, format) to get one."""

    table: Mapping[tuple[str, str], Callable[..., Any]]
    served_by: Mapping[tuple[str, str], str]

    def find(self, name: str, format: str = "plain") -> Callable[..., Any] | None:
        """An operator that nobody has to offer; None where nobody does."""
        return self.table.get((name, format))

    def __call__(self, name: str, format: str = "plain") -> Callable[..., Any]:
        try:
            return self.table[name, format]
        except KeyError:
            known = sorted(f"{n} ({f})" for n, f in self.table)
            raise PluginError(f"no operator {name!r} for format {format!r}; there are: {', '.join(known)}") from None


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    """Every operator provider that accepts, highest priority first."""

    chosen: tuple[Decision, ...]
    others: tuple[Verdict, ...] = ()

    def __str__(self) -> str:
        return ", then ".join(f"{d.name} ({d.origin}; {d.reason})" for d in self.chosen) + _besides(self.others)

    def create(self, parts: Any) -> OperatorSet:
        """Build each provider once; each (name, format) goes to the highest priority that offers it.
        PluginError if two of equal priority offer the same one."""
        table: dict[tuple[str, str], Callable[..., Any]] = {}
        owner: dict[tuple[str, str], Decision] = {}
        for decision in self.chosen:
            for key, op in decision.create(parts).ops.items():
                held = owner.get(key)
                if held is None:
                    table[key], owner[key] = op, decision
                elif held.provider.priority == decision.provider.priority:
                    raise PluginError(
                        f"operator {key[0]!r} for format {key[1]!r} is offered by {held.name!r} ({held.origin}) and {decision.name!r} "
                        f"({decision.origin}) at the same priority {held.provider.priority}: give one of them another priority"
                    )
        return OperatorSet(table, {key: decision.name for key, decision in owner.items()})

    def explain(self) -> dict[str, Any]:
        return {
            "kind": "operators",
            "chosen": [d.name for d in self.chosen],
            "asked": "auto",
            "why": "each operator is served by the first of these that offers it",
            "decisions": [d.explain() for d in self.chosen],
            "not_chosen": [{"name": v.name, "distribution": v.distribution, "reason": v.reason} for v in self.others],
        }


def _besides(others: tuple[Verdict, ...]) -> str:
    return "".join(f"; not {v.name} ({v.distribution}): {v.reason}" for v in others)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
