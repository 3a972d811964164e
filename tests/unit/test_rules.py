from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, strategies as st

from alkstore_sa import InvalidName, ReservedName
from alkstore_sa._rules import (
    ENGINE_PREFIX,
    MAX_DURATION,
    check_attempts,
    check_count,
    check_duration,
    check_name,
    check_priority,
    check_schema_name,
    check_time,
    error_text,
    is_bigint,
    outbox_queue_name,
    storable_text,
)

STORABLE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
NAMES = st.text(STORABLE, min_size=1, max_size=200).filter(lambda name: not name.startswith(ENGINE_PREFIX))
SECONDS_OF_THE_LONGEST = MAX_DURATION.total_seconds()


@given(NAMES)
def test_any_text_of_1_to_200_characters_is_a_name(name: str) -> None:
    assert check_name(name, "queue") == name


@pytest.mark.parametrize(
    "name", ["a'b", 'a"b', "a b", "a.b", "100%", "a:b", ":x", "a\\b", "名前", "\N{GRINNING FACE}" * 200, "\n"]
)
def test_quotes_spaces_dots_percents_colons_and_unicode_are_ordinary_characters(name: str) -> None:
    assert check_name(name, "queue") == name
    assert outbox_queue_name(name).endswith(name)


@pytest.mark.parametrize("name", ["", "a" * 201, "\0", "a\0b", "\ud800", "a\udfff", b"bytes", 7, None, True, ["a"]])
def test_anything_else_is_an_invalid_name(name: Any) -> None:
    with pytest.raises(InvalidName):
        check_name(name, "queue")


def test_an_invalid_names_message_says_what_it_names_and_the_rule() -> None:
    with pytest.raises(InvalidName, match=r"^outbox name .*1 to 200 characters.*201"):
        check_name("a" * 201, "outbox")


@given(st.text(STORABLE, max_size=180))
def test_a_name_with_the_engines_prefix_is_reserved(rest: str) -> None:
    with pytest.raises(ReservedName, match=ENGINE_PREFIX):
        check_name(ENGINE_PREFIX + rest, "queue")


@pytest.mark.parametrize("name", ["__alkstore", "_alkstore_x", " __alkstore_x", "__ALKSTORE_x"])
def test_a_name_that_only_resembles_the_prefix_is_free(name: str) -> None:
    assert check_name(name, "queue") == name


def test_an_outboxs_queue_is_named_under_the_engines_prefix() -> None:
    assert outbox_queue_name("orders") == "__alkstore_outbox:orders"


def test_an_outbox_name_follows_the_rules_of_names() -> None:
    with pytest.raises(InvalidName, match="outbox"):
        outbox_queue_name("")
    with pytest.raises(ReservedName, match="outbox"):
        outbox_queue_name("__alkstore_outbox:orders")


@pytest.mark.parametrize(
    "name", ["alkstore", "a b", 'a"b', "100%", "a:b", "$alkstore$", "Größe", "a" * 63, "pgx", "publicity"]
)
def test_a_schema_may_have_any_name_that_postgresql_takes(name: str) -> None:
    assert check_schema_name(name) == name


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "a" * 64, "ü" * 32])
def test_a_schema_name_that_postgresql_would_cut_or_refuse_is_invalid(name: str) -> None:
    with pytest.raises(InvalidName):
        check_schema_name(name)


@pytest.mark.parametrize("name", ["public", "information_schema", "pg_catalog", "pg_temp", "pg_x"])
def test_a_schema_that_is_not_the_engines_own_is_reserved(name: str) -> None:
    with pytest.raises(ReservedName):
        check_schema_name(name)


@given(st.floats(min_value=1e-6, max_value=SECONDS_OF_THE_LONGEST))
def test_a_duration_in_seconds_keeps_its_value_to_the_microsecond(seconds: float) -> None:
    assert check_duration(seconds, "delay") == timedelta(seconds=seconds)


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=MAX_DURATION))
def test_a_timedelta_is_a_duration_as_it_is(span: timedelta) -> None:
    assert check_duration(span, "delay") == span


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, -0.001, timedelta(0), timedelta(microseconds=-1), 1e-7])
def test_a_duration_that_is_not_positive_to_the_microsecond_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^delay="):
        check_duration(value, "delay")


def test_zero_is_a_duration_only_where_it_is_allowed() -> None:
    assert check_duration(0, "delay", zero=True) == timedelta(0)
    with pytest.raises(ValueError, match="zero or more"):
        check_duration(-1, "delay", zero=True)


@pytest.mark.parametrize(
    "value", [SECONDS_OF_THE_LONGEST + 1, 1e300, 10**400, float("inf"), float("-inf"), float("nan"), timedelta.max]
)
def test_a_duration_over_3650_days_or_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="at most 3650 days"):
        check_duration(value, "delay")


@pytest.mark.parametrize("value", ["5", None, True, False, b"5", 1j, [5], datetime.now(timezone.utc)])
def test_what_is_neither_a_timedelta_nor_a_number_is_no_duration(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^delay=.*a duration is"):
        check_duration(value, "delay")


def test_an_aware_datetime_is_a_time() -> None:
    moment = datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert check_time(moment, "run_at") is moment


def test_a_naive_datetime_is_refused_and_the_message_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"^run_at=.*tzinfo=timezone\.utc"):
        check_time(datetime(2026, 3, 1, 12), "run_at")  # noqa: DTZ001  (that is the point)


@pytest.mark.parametrize("value", ["2026-03-01", 0, None, timedelta(1)])
def test_what_is_no_datetime_is_no_time(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^run_at="):
        check_time(value, "run_at")


@pytest.mark.parametrize("value", [1, 2, 2**31 - 1])
def test_max_attempts_is_at_least_1_and_fits_its_column(value: int) -> None:
    assert check_attempts(value) == value


@pytest.mark.parametrize("value", [0, -1, 2**31, True, 1.0, "1", None])
def test_any_other_max_attempts_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_attempts="):
        check_attempts(value)


@pytest.mark.parametrize("value", [-(2**15), -1, 0, 1, 2**15 - 1])
def test_a_priority_is_a_smallint(value: int) -> None:
    assert check_priority(value) == value


@pytest.mark.parametrize("value", [-(2**15) - 1, 2**15, 1.5, True, None, "high"])
def test_any_other_priority_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^priority="):
        check_priority(value)


@pytest.mark.parametrize("value", [0, -1, 2**31, True, 1.0, None])
def test_a_batch_size_is_at_least_1(value: Any) -> None:
    assert check_count(1, "n") == 1
    with pytest.raises(ValueError, match=r"^n="):
        check_count(value, "n")


@pytest.mark.parametrize(
    ("value", "fits"), [(0, True), (2**63 - 1, True), (-(2**63), True), (2**63, False), (-(2**63) - 1, False)]
)
def test_only_a_bigint_can_be_a_rows_id(value: int, *, fits: bool) -> None:
    assert is_bigint(value) is fits


@given(st.text(st.characters()))
def test_any_text_becomes_one_that_a_text_column_takes(text: str) -> None:
    stored = storable_text(text)
    assert "\0" not in stored
    stored.encode()


@given(st.text(STORABLE, max_size=1000))
def test_text_that_can_be_stored_is_left_as_it_is(text: str) -> None:
    assert storable_text(text) == text


def test_a_text_of_megabytes_is_cut_and_says_how_long_it_was() -> None:
    stored = storable_text("x" * 5_000_000)
    assert len(stored) < 20_000
    assert stored.startswith("x" * 16_000)
    assert "5000000" in stored


def test_an_exception_is_stored_as_its_type_and_message() -> None:
    assert error_text(RuntimeError("no route to host")) == "RuntimeError: no route to host"


def test_an_exception_without_a_message_is_stored_as_its_type() -> None:
    assert error_text(TimeoutError()) == "TimeoutError"


def test_a_string_is_stored_as_it_is_and_nothing_as_nothing() -> None:
    assert error_text("bounced") == "bounced"
    assert error_text(None) is None


@pytest.mark.parametrize(
    "moment", [datetime(1, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)]
)
def test_a_time_at_either_end_of_the_type_is_refused(moment: datetime) -> None:
    with pytest.raises(ValueError, match="lies between"):
        check_time(moment, "run_at")
