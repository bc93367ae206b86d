"""How many requests begin in one turn of the event loop, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter

from octavo.engine.turns import LONG, SHORT, Portion
from octavo.server.pace import Pace, Rank


async def begin(pace: Pace, name: str, rank: Rank, begun: list[str], turn: list[int], turns: Counter[int]) -> None:
    await pace.turn(rank)
    begun.append(name)
    turns[turn[0]] += 1


async def arrive(each: int, asks: list[tuple[str, Rank]]) -> tuple[list[str], Counter[int], Pace]:
    """Everybody at once; the order in which they began, and how many in each turn of the loop."""
    pace, begun, turns, turn = Pace(Portion(each, each)), list[str](), Counter[int](), [0]
    work = [asyncio.create_task(begin(pace, name, rank, begun, turn, turns)) for name, rank in asks]
    while len(begun) < len(asks):
        await asyncio.sleep(0)
        turn[0] += 1
        assert turn[0] < 1000
    await asyncio.gather(*work)
    return begun, turns, pace


def test_a_thousand_requests_of_one_instant_begin_a_few_at_a_time_in_the_order_of_arrival() -> None:
    asks = [(str(i), Rank.NEW) for i in range(1000)]
    begun, turns, pace = asyncio.run(arrive(16, asks))
    assert begun == [name for name, _ in asks] and pace.waiting == 0
    assert max(turns.values()) <= 16 and len(turns) >= 1000 / 16


def test_probes_pass_requests_that_wait_and_complete_requests_pass_new_ones() -> None:
    asks = [(f"new{i}", Rank.NEW) for i in range(6)] + [("complete", Rank.COMPLETE), ("probe", Rank.AHEAD)]
    begun, _, _ = asyncio.run(arrive(2, asks))
    assert begun == ["new0", "new1", "probe", "complete", "new2", "new3", "new4", "new5"]


def test_whoever_asks_alone_waits_for_nothing() -> None:
    async def alone() -> list[float]:
        pace = Pace(Portion(1, 1))
        waits = []
        for _ in range(3):
            waits.append(await pace.turn(Rank.NEW))
            await asyncio.sleep(0.001)
        return waits

    assert asyncio.run(alone()) == [0.0, 0.0, 0.0]


def test_a_client_that_went_away_takes_nobodys_turn() -> None:
    async def leave() -> list[str]:
        pace, begun = Pace(Portion(1, 1)), list[str]()
        work = {name: asyncio.create_task(begin(pace, name, Rank.NEW, begun, [0], Counter())) for name in ("a", "gone", "b", "c")}
        await asyncio.sleep(0)
        work["gone"].cancel()
        await asyncio.wait_for(asyncio.gather(*work.values(), return_exceptions=True), 5)
        return begun

    assert asyncio.run(leave()) == ["a", "b", "c"]


def test_a_portion_shrinks_after_a_long_turn_and_grows_after_a_short_one() -> None:
    now = 0.0
    portion = Portion(4, 64, lambda: now)

    def turn(seconds: float) -> int:
        nonlocal now
        now += seconds
        return portion.next()

    assert portion.first() == 4
    assert [turn(SHORT / 2) for _ in range(6)] == [5, 6, 7, 8, 10, 12]
    assert [turn(SHORT / 2) for _ in range(20)][-3:] == [64, 64, 64]
    assert [turn((SHORT + LONG) / 2) for _ in range(2)] == [64, 64]
    assert [turn(LONG * 2) for _ in range(6)] == [32, 16, 8, 4, 4, 4]
    now += 100  # nothing to do for long: that was no turn
    assert portion.first() == 4
    assert turn(SHORT / 2) == 5
