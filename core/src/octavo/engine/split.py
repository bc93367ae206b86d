"""Split: an alias over several models, in exact proportion to their weights.

Owns the turn-taking. Smooth weighted round robin: every target gains its weight a turn, the richest is
taken and pays the total, so 90:10 means 9 of any 10 requests in a row, without a coin being tossed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from octavo.errors import ConfigError


class Split:
    """weights: target -> weight, as given. Raises ConfigError for weights that are no proportion."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ConfigError("an alias needs at least one model")
        for target, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
                raise ConfigError(f"alias: the weight of {target!r} must be a number of 0 or more, got {weight!r}")
        if not any(weights.values()):
            raise ConfigError("alias: at least one weight must be above 0")
        self.weights = {target: float(weight) for target, weight in weights.items()}
        self._credit = dict.fromkeys(self.weights, 0.0)

    @property
    def heaviest(self) -> str:
        return max(self.weights, key=self.weights.__getitem__)

    def next(self, able: Callable[[str], bool]) -> str:
        """Whose turn it is among the `able` targets; the heaviest where none is, for the caller to refuse by."""
        among = {target: weight for target, weight in self.weights.items() if weight and able(target)}
        if not among:
            return self.heaviest
        for target, weight in among.items():
            self._credit[target] += weight
        chosen = max(among, key=self._credit.__getitem__)
        self._credit[chosen] -= sum(among.values())
        return chosen
