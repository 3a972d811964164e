from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from hypothesis import given, strategies as st

from alkstore_sa._pace import Pace

NOW = timedelta(0)
SOON = timedelta(seconds=0.25)
POLLS = st.floats(min_value=1e-6, max_value=3600)
DUE_TIMES = st.none() | st.timedeltas(min_value=timedelta(days=-1), max_value=timedelta(days=1))


def within_a_tenth(pause: float, poll: float) -> bool:
    return poll * 0.9 <= pause <= poll * 1.1


@given(POLLS)
def test_with_nothing_due_the_pause_is_the_poll_give_or_take_a_tenth(poll: float) -> None:
    assert within_a_tenth(Pace(poll).pause(None), poll)


def test_the_pauses_of_several_loops_do_not_march_in_step() -> None:
    assert len({Pace(10).pause(None) for _ in range(50)}) > 40


@given(POLLS, st.lists(DUE_TIMES, min_size=1))
def test_no_pause_is_negative_or_longer_than_the_poll_and_a_tenth(poll: float, due: list[timedelta | None]) -> None:
    pace = Pace(poll)
    assert all(0 <= pace.pause(wait) <= poll * 1.1 for wait in due)


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(seconds=3000)))
def test_a_pause_ends_exactly_when_the_next_job_is_due(due: timedelta) -> None:
    assert Pace(3600).pause(due) == due.total_seconds()


def test_a_job_that_is_due_after_the_poll_does_not_lengthen_the_pause() -> None:
    assert within_a_tenth(Pace(1).pause(timedelta(hours=1)), 1)


@pytest.mark.parametrize("due", [NOW, timedelta(microseconds=-1), timedelta(days=-400)])
def test_what_fell_due_since_the_look_is_looked_for_at_once(due: timedelta) -> None:
    assert Pace(3600).pause(due) == 0


def test_what_stays_due_and_is_not_found_is_looked_for_ever_more_seldom_but_never_forgotten() -> None:
    pace = Pace(3600)
    pauses = [pace.pause(NOW) for _ in range(1000)]
    assert pauses[0] == 0
    assert all(later >= earlier for earlier, later in itertools.pairwise(pauses))
    assert pauses[1] >= 0.01  # from the second look on it is no busy loop
    assert 0.1 <= pauses[-1] < 1


def test_a_poll_shorter_than_that_stays_the_longest_pause() -> None:
    pace = Pace(0.02)
    assert max(pace.pause(NOW) for _ in range(20)) <= 0.022


@pytest.mark.parametrize("news", ["something was found", "what is next is due later", "nothing is due any more"])
def test_after_other_news_what_falls_due_is_looked_for_at_once_again(news: str) -> None:
    pace = Pace(3600)
    for _ in range(5):
        pace.pause(NOW)
    if news == "something was found":
        pace.found()
    else:
        pace.pause(SOON if news == "what is next is due later" else None)
    assert pace.pause(NOW) == 0


def test_a_loop_that_cannot_look_backs_off_from_50_ms_doubling_to_2_s() -> None:
    pace = Pace(3600)
    assert [pace.back_off() for _ in range(9)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("how", ["something", "nothing"])
def test_a_look_that_succeeds_ends_the_back_off_whether_it_finds_something_or_nothing(how: str) -> None:
    pace = Pace(3600)
    for _ in range(5):
        pace.back_off()
    if how == "something":
        pace.found()
    else:
        pace.pause(None)
    assert pace.back_off() == 0.05
