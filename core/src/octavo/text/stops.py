"""StopMatcher: finds stop strings in a growing text, a character at a time.

Owns the automaton and what must be held back. Never cuts text: it reports positions.
"""

from __future__ import annotations

import functools
from collections import deque


class StopAutomaton:
    """The Aho-Corasick automaton of a set of stop strings (Aho and Corasick, 1975). Immutable, shared.

    State 0 is the start. goto[s] maps a character to the next state, fail[s] is the longest other
    suffix that is some stop's prefix, ends[s] are the lengths of the stops that end here, and
    held[s] the length of the longest suffix that more text could still complete to a stop.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.ends: list[tuple[int, ...]] = [()]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.goto[state]:
                    self.goto[state][char] = len(self.goto)
                    self.goto.append({})
                    self.ends.append(())
                    depth.append(depth[state] + 1)
                state = self.goto[state][char]
            self.ends[state] = (len(stop),)
        self.fail, self.held = [0] * len(self.goto), [0] * len(self.goto)
        order = deque(self.goto[0].values())
        while order:
            state = order.popleft()
            fail = self.fail[state]
            self.ends[state] += self.ends[fail]
            self.held[state] = depth[state] if self.goto[state] else self.held[fail]
            for char, target in self.goto[state].items():
                back = fail
                while back and char not in self.goto[back]:
                    back = self.fail[back]
                self.fail[target] = self.goto[back].get(char, 0)
                order.append(target)


@functools.lru_cache(maxsize=256)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopMatcher:
    """One text's walk through the automaton. `position` counts the characters seen, `held` how many of
    the last ones may still become part of a stop."""

    __slots__ = ("_automaton", "_state", "position")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._state = 0
        self.position = 0

    @property
    def held(self) -> int:
        return self._automaton.held[self._state]

    def feed(self, text: str) -> tuple[int, int] | None:
        """The match (start, end) that starts earliest, and then is shortest, among those that end in
        `text`; None if there is none. Positions count from the beginning of everything fed."""
        goto, fail, ends = self._automaton.goto, self._automaton.fail, self._automaton.ends
        state, best = self._state, None
        for at, char in enumerate(text, self.position + 1):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if ends[state]:
                match = (at - ends[state][0], at)
                best = match if best is None else min(best, match)
        self._state = state
        self.position += len(text)
        return best
