"""The rules for arguments, as functions without I/O: names, durations, times, ranges, and the backoff curve.

Every entry point asks here before it talks to the database, so bad input stores nothing.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from typing import Final, TypeAlias

from alkstore_sa.errors import InvalidName, ReservedName

__all__ = [
    "ENGINE_PREFIX",
    "MAX_DURATION",
    "MAX_NAME_LENGTH",
    "Duration",
    "backoff_delay",
    "check_attempts",
    "check_count",
    "check_duration",
    "check_name",
    "check_offset",
    "check_priority",
    "check_schema_name",
    "check_text",
    "check_time",
    "error_text",
    "is_bigint",
    "is_encodable",
    "outbox_queue_name",
    "storable_text",
]

Duration: TypeAlias = "timedelta | float"
"""A span of time: a `timedelta`, or a number of seconds."""

ENGINE_PREFIX: Final = "__alkstore_"
MAX_NAME_LENGTH: Final = 200
MAX_SCHEMA_NAME_BYTES: Final = 63
MAX_DURATION: Final = timedelta(days=3650)
MAX_BACKOFF: Final = timedelta(hours=1)
EARLIEST: Final = datetime(1, 1, 3, tzinfo=timezone.utc)
LATEST: Final = datetime(9999, 12, 29, tzinfo=timezone.utc)
MAX_ERROR_LENGTH: Final = 16_384
SMALLINT: Final = range(-(2**15), 2**15)
INTEGER: Final = range(-(2**31), 2**31)
BIGINT: Final = range(-(2**63), 2**63)


def check_name(name: object, what: str) -> str:
    """Return a caller's `name` of a `what` ("queue", "outbox", "worker", ...), or raise.

    Raises:
        InvalidName: it is no `str`, is empty, is longer than 200 characters, or holds a NUL or a lone surrogate.
        ReservedName: it begins with the engine's own prefix.
    """
    if not isinstance(name, str):
        raise InvalidName(f"{what} name {name!r}: a name is a str, not {type(name).__name__}")
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidName(
            f"{what} name {name[:40]!r}: a name has 1 to {MAX_NAME_LENGTH} characters, this one has {len(name)}"
        )
    if "\0" in name or not is_encodable(name):
        raise InvalidName(
            f"{what} name {name!r}: a name holds no NUL and no lone surrogate, PostgreSQL cannot store them"
        )
    if name.startswith(ENGINE_PREFIX):
        raise ReservedName(
            f"{what} name {name!r}: names that begin with {ENGINE_PREFIX!r} are the engine's own; choose another"
        )
    return name


def check_schema_name(name: str) -> str:
    """Return the name of the schema that holds the engine's tables, or raise `InvalidName` or `ReservedName`.

    It must be the engine's own: in a schema shared with the application, Alembic's autogenerate would take
    the engine's tables for dropped tables of the application.
    """
    if not name or "\0" in name or not is_encodable(name) or len(name.encode()) > MAX_SCHEMA_NAME_BYTES:
        raise InvalidName(f"schema {name!r}: a schema name has 1 to {MAX_SCHEMA_NAME_BYTES} bytes and no NUL")
    if name in {"public", "information_schema"} or name.startswith("pg_"):
        raise ReservedName(
            f"schema {name!r}: the engine needs a schema of its own; choose another name, such as 'alkstore'"
        )
    return name


def outbox_queue_name(name: str) -> str:
    """Return the name of the queue behind the outbox `name`, which callers cannot open as a queue."""
    return f"{ENGINE_PREFIX}outbox:{check_name(name, 'outbox')}"


def check_duration(value: object, what: str, *, zero: bool = False) -> timedelta:
    """Return `value` as a `timedelta`: positive (or zero, where `zero` says so) and at most 3650 days.

    The upper bound is what keeps an addition to the clock from overflowing inside a claim, where one such row
    would block its whole queue.
    """
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float)):
        raise ValueError(f"{what}={value!r}: a duration is a timedelta or a number of seconds")
    try:
        span = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        span = None
    if span is None or span > MAX_DURATION:
        raise ValueError(f"{what}={value!r}: a duration is at most {MAX_DURATION.days} days")
    if span < timedelta(0) or (not zero and span == timedelta(0)):
        raise ValueError(
            f"{what}={value!r}: a duration must be {'zero or more' if zero else 'more than zero'}, to the microsecond"
        )
    return span


def check_time(value: object, what: str) -> datetime:
    """Return `value` if it is an aware `datetime`, not within days of the type's two ends, else raise `ValueError`."""
    if not isinstance(value, datetime):
        raise ValueError(f"{what}={value!r}: a point in time is a datetime")
    if value.utcoffset() is None:
        raise ValueError(
            f"{what}={value!r}: a datetime needs a time zone; add tzinfo=timezone.utc if it is meant as UTC"
        )
    if not EARLIEST <= value <= LATEST:
        raise ValueError(f"{what}={value!r}: a point in time lies between {EARLIEST} and {LATEST}")
    return value


def check_integer(value: object, what: str, lowest: int, highest: int) -> int:
    """Return `value` if it is an `int` within the two bounds, else raise `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{what}={value!r}: needs an int from {lowest} to {highest}")
    return value


def check_attempts(value: object) -> int:
    """Return `max_attempts` if it is at least 1, else raise `ValueError`."""
    return check_integer(value, "max_attempts", 1, INTEGER[-1])


def check_priority(value: object) -> int:
    """Return `priority` if it fits a `smallint`, else raise `ValueError`."""
    return check_integer(value, "priority", SMALLINT[0], SMALLINT[-1])


def check_offset(value: object, what: str) -> int:
    """Return a place in a stream, or a number of places, from 0 on, else raise `ValueError`."""
    return check_integer(value, what, 0, BIGINT[-1])


def check_text(value: object, what: str) -> str | None:
    """Return a text that a column can hold, or None, else raise `ValueError`."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{what}={value!r}: needs a str, not {type(value).__name__}")
    if value is not None and ("\0" in value or not is_encodable(value)):
        raise ValueError(f"{what}={value!r}: PostgreSQL stores no NUL and no lone surrogate")
    return value


def check_count(value: object, what: str) -> int:
    """Return a batch size or concurrency of at least 1, else raise `ValueError`."""
    return check_integer(value, what, 1, INTEGER[-1])


def is_bigint(value: int) -> bool:
    """Tell whether a row could have `value` as its id."""
    return value in BIGINT


def backoff_delay(base: timedelta, attempts: int) -> timedelta:
    """Draw the delay before the next attempt: exponential, with equal jitter.

    With `d = min(base * 2**(attempts - 1), 1 hour)` the delay is uniform in `[d/2, d]`. The doubling stops as soon as
    it has reached the hour, so no attempt number overflows.
    """
    ceiling = MAX_BACKOFF
    doublings = attempts - 1
    # 2**32 microseconds are more than an hour: no positive base stays below the ceiling after that many doublings.
    if doublings < 32:  # noqa: PLR2004  (explained in the line above)
        ceiling = min(base * 2**doublings, MAX_BACKOFF) if base < MAX_BACKOFF else MAX_BACKOFF
    return ceiling * random.uniform(0.5, 1.0)  # noqa: S311  (jitter, no secret)


def is_encodable(text: str) -> bool:
    """Tell whether `text` has a UTF-8 form, which a lone surrogate has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable_text(text: str) -> str:
    """Return `text` as a `text` column takes it: NUL and lone surrogates written as escapes, bounded in length."""
    if len(text) > MAX_ERROR_LENGTH:
        text = text[:MAX_ERROR_LENGTH] + f" [cut: {len(text)} characters in all]"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def error_text(error: BaseException | str | None) -> str | None:
    """Return what `last_error` stores for `error`: `Type: message` for an exception, a string as it is."""
    if error is None:
        return None
    if isinstance(error, BaseException):
        try:
            message = str(error)
        except Exception:  # noqa: BLE001  (an exception whose message cannot be shown is still an exception)
            message = "(its message cannot be shown)"
        error = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return storable_text(error)
