from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import example, given, strategies as st

from alkstore_sa._rules import MAX_DURATION, backoff_delay

HOUR = timedelta(hours=1)
BASES = st.timedeltas(min_value=timedelta(microseconds=1), max_value=MAX_DURATION)
ATTEMPTS = st.integers(min_value=1, max_value=10**6) | st.integers(min_value=1, max_value=2**31 - 1)


def longest(base: timedelta, attempts: int) -> timedelta:
    """Return d = min(base * 2**(attempts - 1), 1 hour), in exact integers of microseconds."""
    microseconds = base // timedelta(microseconds=1)
    # After 40 doublings of one microsecond the hour is far behind; more of them only cost memory.
    return timedelta(microseconds=min(microseconds * 2 ** min(attempts - 1, 40), HOUR // timedelta(microseconds=1)))


@given(BASES, ATTEMPTS)
@example(timedelta(microseconds=1), 32)
@example(timedelta(microseconds=1), 33)
@example(timedelta(microseconds=1), 10**6)
@example(timedelta(microseconds=1), 2**31 - 1)
@example(MAX_DURATION, 1)
@example(MAX_DURATION, 10**6)
@example(HOUR, 1)
@example(HOUR - timedelta(microseconds=1), 2)
@example(HOUR / 2, 2)
def test_a_delay_lies_between_half_of_d_and_d(base: timedelta, attempts: int) -> None:
    d = longest(base, attempts)
    half = timedelta(microseconds=d // timedelta(microseconds=1) // 2)
    assert half <= backoff_delay(base, attempts) <= d


@pytest.mark.parametrize(
    ("attempts", "seconds"),
    [(1, 5), (2, 10), (3, 20), (4, 40), (9, 1280), (10, 2560), (11, 3600), (12, 3600), (10**6, 3600)],
)
def test_d_doubles_with_each_attempt_up_to_an_hour(attempts: int, seconds: int) -> None:
    drawn = [backoff_delay(timedelta(seconds=5), attempts).total_seconds() for _ in range(400)]
    assert seconds / 2 <= min(drawn) < seconds * 0.55
    assert seconds * 0.95 < max(drawn) <= seconds


def test_a_delay_is_uniform_between_its_bounds() -> None:
    drawn = sorted(backoff_delay(timedelta(seconds=8), 1).total_seconds() for _ in range(4000))
    for quarter in (1, 2, 3):
        assert drawn[quarter * 1000] == pytest.approx(4 + quarter, abs=0.2)


def test_a_base_over_an_hour_is_held_to_the_hour_from_the_first_attempt_on() -> None:
    assert HOUR / 2 <= backoff_delay(timedelta(days=1), 1) <= HOUR


@given(st.integers(min_value=1, max_value=60))
def test_d_never_falls_with_the_attempts(attempts: int) -> None:
    base = timedelta(milliseconds=3)
    assert longest(base, attempts) <= longest(base, attempts + 1)
    assert backoff_delay(base, attempts + 1) >= longest(base, attempts + 1) / 2 - timedelta(microseconds=1)
