"""Orders: questions to the engine's process that it answers, as against requests, whose answers stream.

Owns which order an answer belongs to. One event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine.client import EngineProcess
from octavo.engine.messages import PrefixOrder, PrefixState, Resize, Resized
from octavo.errors import ConfigError


class Orders:
    """`refuse` raises where the engine has ended and will answer nothing. Each order also raises what `fail` is given before
    its answer has come."""

    def __init__(self, engine: EngineProcess, refuse: Callable[[], None]) -> None:
        self._engine, self._refuse = engine, refuse
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def prefix(self, action: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        """messages.PrefixOrder; the plain values of its answer."""
        order = PrefixOrder(next(self._ids), action, list(tokens))
        state: PrefixState = await self._answer(order.id, lambda: self._engine.prefix(order))
        return state.answer

    async def resize(self, blocks: int | None, *, rest: bool) -> int:
        """messages.Resize; the blocks that there are then. Raises ConfigError where the size is fixed."""
        order = Resize(next(self._ids), blocks, rest)
        answer: Resized = await self._answer(order.id, lambda: self._engine.resize(order))
        if answer.error is not None:
            raise ConfigError(answer.error)
        return answer.blocks

    def take(self, answer: PrefixState | Resized) -> None:
        """An answer has come. Nobody may be waiting for it any more."""
        if (place := self._answers.get(answer.id)) is not None and not place.done():
            place.set_result(answer)

    def fail(self, error: Exception) -> None:
        """No answer will come to what is asked now."""
        for place in self._answers.values():
            if not place.done():
                place.set_exception(error)

    async def _answer(self, own_id: int, send: Callable[[], None]) -> Any:
        self._refuse()
        place: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[own_id] = place
        try:
            send()
            return await place
        finally:
            self._answers.pop(own_id, None)
