from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from alkstore_sa._marks import COST_FACTOR, LONGEST_INTERVAL, SHORTEST_INTERVAL, Marks

if TYPE_CHECKING:
    from collections.abc import Iterator

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


@dataclass
class Row:
    """What a claim's row tells the marks."""

    id: int
    minute: int
    priority: int = 0
    now: datetime = NOON
    levels: list[int] = field(default_factory=lambda: [0])

    @property
    def run_at(self) -> datetime:
        return NOON + timedelta(minutes=self.minute)


class Clock:
    """A monotonic clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    yield clock
    monkeypatch.undo()


@pytest.fixture
def marks(clock: Clock) -> Marks:
    """Marks after a walk that took all of the two jobs it wanted."""
    marks = Marks()
    marks.walked([Row(1, -5), Row(2, -4)], 2, 0.0)
    return marks


def test_without_marks_a_claim_starts_at_the_head() -> None:
    assert not Marks().usable()


def test_after_a_full_walk_a_claim_starts_behind_the_last_job(marks: Marks) -> None:
    assert marks.usable()
    assert marks.parameters() == {"priorities": [0], "run_ats": [NOON - timedelta(minutes=4)], "ids": [2]}


def test_after_a_walk_that_came_short_a_claim_starts_at_the_head(marks: Marks) -> None:
    marks.walked([Row(3, -3)], 2, 0.0)
    assert not marks.usable()


def test_after_a_walk_that_found_nothing_a_claim_starts_at_the_head(marks: Marks) -> None:
    marks.walked([], 1, 0.0)
    assert not marks.usable()


def test_marks_hold_for_a_second_and_no_longer(marks: Marks, clock: Clock) -> None:
    clock.now += SHORTEST_INTERVAL - 0.01
    assert marks.usable()
    clock.now += 0.01
    assert not marks.usable()


def test_after_a_costly_walk_marks_hold_for_twenty_times_its_cost(clock: Clock) -> None:
    marks = Marks()
    marks.walked([Row(1, -5)], 1, 0.125)
    clock.now += 0.125 * COST_FACTOR - 0.01
    assert marks.usable()
    clock.now += 0.01
    assert not marks.usable()


def test_after_a_walk_that_had_to_wait_marks_hold_for_three_seconds_and_no_longer(clock: Clock) -> None:
    marks = Marks()
    marks.walked([Row(1, -5)], 1, 60.0)
    clock.now += LONGEST_INTERVAL - 0.01
    assert marks.usable()
    clock.now += 0.01
    assert not marks.usable()


def test_claims_from_the_marks_do_not_put_the_next_walk_off(marks: Marks, clock: Clock) -> None:
    clock.now += SHORTEST_INTERVAL / 2
    marks.advance([Row(3, -3)])
    clock.now += SHORTEST_INTERVAL / 2
    assert not marks.usable()


def test_a_claim_moves_the_place_of_its_priority(marks: Marks) -> None:
    marks.advance([Row(3, -3), Row(4, -3)])
    assert marks.parameters() == {"priorities": [0], "run_ats": [NOON - timedelta(minutes=3)], "ids": [4]}


def test_a_place_never_moves_back(marks: Marks) -> None:
    marks.advance([Row(1, -60)])
    assert marks.parameters()["ids"] == [2]


def test_in_each_priority_above_the_last_one_taken_from_the_place_is_the_walks_time(clock: Clock) -> None:
    marks = Marks()
    marks.walked([Row(1, -5, priority=5, levels=[9, 5, 1])], 1, 0.0)
    assert marks.places == {9: (NOON, 0), 5: (NOON - timedelta(minutes=5), 1)}


def test_a_priority_below_the_last_one_taken_from_is_not_looked_into(clock: Clock) -> None:
    marks = Marks()
    marks.walked([Row(1, -5, priority=5, levels=[5, 1])], 1, 0.0)
    assert 1 not in marks.places


def test_priorities_are_asked_in_their_order(clock: Clock) -> None:
    marks = Marks()
    rows = [Row(n, -n, priority=p, levels=[7, 3, 0, -2]) for n, p in enumerate([3, 7, 0, -2], 1)]
    marks.walked(rows, 4, 0.0)
    assert marks.parameters()["priorities"] == [7, 3, 0, -2]


def test_a_job_enqueued_for_now_is_not_behind_its_priorities_place(marks: Marks) -> None:
    assert not marks.behind(0, None)


def test_a_job_of_a_priority_without_a_place_is_behind(marks: Marks) -> None:
    assert marks.behind(5, None)
    assert marks.behind(-5, None)


def test_a_job_for_a_time_before_the_place_is_behind(marks: Marks) -> None:
    assert marks.behind(0, NOON - timedelta(hours=1))
    assert marks.behind(0, NOON - timedelta(minutes=4))
    assert not marks.behind(0, NOON + timedelta(hours=1))


def test_without_marks_no_job_is_behind() -> None:
    assert not Marks().behind(5, NOON)


def test_forgotten_marks_are_not_used(marks: Marks) -> None:
    marks.forget()
    assert not marks.usable()


@given(
    st.lists(
        st.lists(st.builds(Row, st.integers(1, 50), st.integers(-50, 0), st.integers(-3, 3)), min_size=1, max_size=5),
        max_size=8,
    )
)
def test_places_are_the_furthest_that_each_priority_was_taken_from(claims: list[list[Row]]) -> None:
    marks = Marks()
    for rows in claims:
        marks.advance(rows)
    taken = [row for rows in claims for row in rows]
    assert marks.places == {
        priority: max((row.run_at, row.id) for row in taken if row.priority == priority)
        for priority in {row.priority for row in taken}
    }
