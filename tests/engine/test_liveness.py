"""When an engine that exists counts as one that does not answer."""

from __future__ import annotations

from octavo.engine.liveness import Liveness

PATIENCE = 20.0  # a look a second


def looks(liveness: Liveness, count: int, passed: float = 1.0) -> int | None:
    """After how many looks it is given up, None if not within `count`."""
    return next((i for i in range(1, count + 1) if liveness.look(passed)), None)


def test_an_engine_that_is_idle_is_asked_and_its_answer_is_enough() -> None:
    asked: list[int] = []
    liveness = Liveness(PATIENCE, lambda: asked.append(1))
    for second in range(200):
        assert not liveness.look(1.0)
        if asked and second % 5 == 0:
            liveness.heard()
    assert 30 < len(asked) < 50  # once after every silence, not once a look


def test_silence_is_counted_from_the_question_so_that_a_step_has_all_of_the_patience() -> None:
    liveness = Liveness(PATIENCE, lambda: None)
    liveness.heard()
    assert not liveness.look(1.0)  # news came since the last look
    assert not liveness.look(1.0)  # none: it is asked
    assert looks(liveness, 100) == PATIENCE
    assert liveness.look(1.0)  # and stays given up


def test_any_message_ends_the_silence() -> None:
    liveness = Liveness(PATIENCE, lambda: None)
    assert looks(liveness, 18) is None
    liveness.heard()
    assert looks(liveness, 20) is None


def test_time_in_which_this_process_slept_is_not_held_against_the_engine() -> None:
    liveness = Liveness(PATIENCE, lambda: None)
    assert not liveness.look(1.0)
    assert not liveness.look(3600.0)  # a suspended machine: both slept
    assert looks(liveness, 100) == PATIENCE - 2
