"""Contract section 3: enqueueing, by the library and by plain SQL."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.both_doors import BOTH_DOORS, open_store
from support.plain_sql import count, insert_job, number, server_time
from support.rows import job_row

from alkstore_sa import PayloadError, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy import Engine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


# -- the handle and its options ----------------------------------------------------------------------------------------


async def test_a_queue_handle_costs_no_io() -> None:
    engine = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")
    assert Store(engine).queue("emails", max_attempts=7).name == "emails"


async def test_the_handles_options_are_stamped_onto_the_row(door: Store, sql: Sql) -> None:
    queue = door.queue("q", visibility_timeout=1.5, max_attempts=7, backoff_base=timedelta(milliseconds=250))
    row = job_row(sql, await queue.enqueue(1))
    assert row is not None
    assert (row["visibility_timeout"], row["max_attempts"], row["backoff_base"]) == (
        timedelta(seconds=1.5),
        7,
        timedelta(milliseconds=250),
    )


async def test_the_enqueues_options_win_over_the_handles(door: Store, sql: Sql) -> None:
    queue = door.queue("q", visibility_timeout=60, max_attempts=7, backoff_base=8)
    row = job_row(sql, await queue.enqueue(1, visibility_timeout=0.001, max_attempts=1, backoff_base=2))
    assert row is not None
    assert (row["visibility_timeout"], row["max_attempts"], row["backoff_base"]) == (
        timedelta(milliseconds=1),
        1,
        timedelta(seconds=2),
    )


async def test_a_later_handle_with_other_options_changes_no_existing_job(store: Store, sql: Sql) -> None:
    job_id = await store.queue("q", visibility_timeout=60, max_attempts=2, backoff_base=9).enqueue(1)
    before = job_row(sql, job_id)
    other = store.queue("q", visibility_timeout=1, max_attempts=50, backoff_base=1)
    await other.enqueue(2, priority=-1)
    assert job_row(sql, job_id) == before
    (job,) = await other.claim("w")
    after = job_row(sql, job_id)
    assert after is not None
    assert (job.max_attempts, after["visibility_timeout"], after["backoff_base"]) == (
        2,
        timedelta(seconds=60),
        timedelta(seconds=9),
    )


async def test_the_defaults_are_300_seconds_3_attempts_and_5_seconds(store: Store, sql: Sql) -> None:
    row = job_row(sql, await store.queue("q").enqueue(1))
    assert row is not None
    assert (row["visibility_timeout"], row["max_attempts"], row["backoff_base"], row["priority"]) == (
        timedelta(seconds=300),
        3,
        timedelta(seconds=5),
        0,
    )
    assert (row["state"], row["attempts"], row["headers"], row["expires_at"], row["last_error"]) == (
        "pending",
        0,
        {},
        None,
        None,
    )


async def test_headers_travel_with_the_payload(door: Store) -> None:
    queue = door.queue("q")
    await queue.enqueue("hello", headers={"trace": "a-1", "n": [1, None]})
    (job,) = await queue.claim("w")
    assert (job.payload, job.headers) == ("hello", {"trace": "a-1", "n": [1, None]})


# -- when --------------------------------------------------------------------------------------------------------------


async def test_a_job_is_due_from_its_enqueue_on_by_the_servers_clock(door: Store, sql: Sql) -> None:
    before = server_time(sql)
    row = job_row(sql, await door.queue("q").enqueue(1))
    assert row is not None
    assert before <= row["run_at"] <= server_time(sql)
    assert before <= row["created_at"] <= server_time(sql)


async def test_a_delay_counts_from_the_enqueue_to_the_microsecond(door: Store, sql: Sql) -> None:
    row = job_row(sql, await door.queue("q").enqueue(1, delay=timedelta(days=1, microseconds=7)))
    assert row is not None
    assert row["run_at"] - row["created_at"] == timedelta(days=1, microseconds=7)


async def test_run_at_is_stored_as_it_is_whatever_its_time_zone(door: Store, sql: Sql) -> None:
    at = datetime(2100, 1, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=-7)))
    row = job_row(sql, await door.queue("q").enqueue(1, run_at=at))
    assert row is not None
    assert row["run_at"] == at


async def test_a_relative_expiry_counts_from_the_enqueue_and_not_from_the_run_time(door: Store, sql: Sql) -> None:
    row = job_row(sql, await door.queue("q").enqueue(1, delay=60, expires=90.5))
    assert row is not None
    assert row["expires_at"] - row["created_at"] == timedelta(seconds=90.5)


async def test_an_absolute_expiry_is_stored_as_it_is(door: Store, sql: Sql) -> None:
    at = datetime(2100, 1, 1, tzinfo=timezone.utc)
    row = job_row(sql, await door.queue("q").enqueue(1, expires=at))
    assert row is not None
    assert row["expires_at"] == at


async def test_in_a_long_transaction_the_times_are_those_of_the_flush(store: Store, sql: Sql) -> None:
    async with store.begin() as session:
        await session.execute(text("SELECT 1"))
        later = server_time(sql)
        job = store.queue("q").enqueue_tx(session, 1, expires=60)
        await session.flush()
    row = job_row(sql, job.id)
    assert row is not None
    assert min(row["run_at"], row["created_at"], row["expires_at"] - timedelta(seconds=60)) >= later


SOON = datetime(2100, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 1, "run_at": SOON},
        {"delay": 0},
        {"delay": -1},
        {"delay": timedelta(days=3651)},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"run_at": datetime(2100, 1, 1)},  # noqa: DTZ001  (naive on purpose)
        {"expires": datetime(2100, 1, 1)},  # noqa: DTZ001  (naive on purpose)
        {"expires": 0},
        {"expires": timedelta(seconds=-1)},
        {"delay": 10, "expires": 10},
        {"delay": 10, "expires": 9},
        {"run_at": SOON, "expires": SOON},
        {"run_at": SOON, "expires": SOON - timedelta(microseconds=1)},
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 2**31},
        {"max_attempts": True},
        {"visibility_timeout": 0},
        {"visibility_timeout": -1},
        {"visibility_timeout": timedelta(days=3650, microseconds=1)},
        {"visibility_timeout": 1e-9},
        {"backoff_base": 0},
        {"backoff_base": timedelta(seconds=-5)},
        {"backoff_base": 1e300},
        {"priority": 2**15},
        {"priority": -(2**15) - 1},
        {"priority": 1.5},
    ],
)
def test_a_bad_option_is_a_value_error_at_the_call_and_stores_nothing(
    sync_store: SyncStore, sql: Sql, options: dict[str, Any]
) -> None:
    queue = sync_store.queue("q")
    with pytest.raises(ValueError):
        queue.enqueue(1, **options)
    with pytest.raises(ValueError):
        queue.enqueue_many([1, 2], **options)
    with sync_store.begin() as session, pytest.raises(ValueError):
        queue.enqueue_tx(session, 1, **options)
    assert count(sql) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"visibility_timeout": 0},
        {"visibility_timeout": timedelta(days=4000)},
        {"backoff_base": -1},
    ],
)
def test_a_handle_with_bad_options_is_a_value_error(sync_store: SyncStore, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        sync_store.queue("q", **options)


async def test_an_unknown_option_is_refused(store: Store, sql: Sql) -> None:
    with pytest.raises(TypeError, match="dealy"):
        await store.queue("q").enqueue(1, dealy=5)  # type: ignore[call-arg]
    assert count(sql) == 0


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_enqueue_many_returns_the_ids_in_the_payloads_order(door: Store, sql: Sql) -> None:
    ids = await door.queue("q").enqueue_many([{"n": n} for n in range(50)], priority=3)
    rows = [job_row(sql, job_id) for job_id in ids]
    assert [row["payload"]["n"] for row in rows if row] == list(range(50))
    assert {row["priority"] for row in rows if row} == {3}


async def test_enqueue_many_of_nothing_stores_nothing(door: Store, sql: Sql) -> None:
    assert await door.queue("q").enqueue_many([]) == []
    assert count(sql) == 0


async def test_enqueue_many_takes_one_round_trip_for_thousands(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    queue = store.queue("q")
    await store.check()
    await queue.enqueue(0)
    sent: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    ids = await queue.enqueue_many(range(5000))
    await store.close()  # the wakes have been sent
    inserts = [statement for statement in sent if "pg_notify" not in statement]
    assert (len(inserts), len(set(ids)), count(sql)) == (1, 5000, 5001)


async def test_enqueue_many_stores_all_or_none(door: Store, sql: Sql) -> None:
    with pytest.raises(PayloadError):
        await door.queue("q").enqueue_many([1, object(), 3])
    assert count(sql) == 0


# -- in the caller's transaction ---------------------------------------------------------------------------------------


async def test_enqueue_tx_needs_no_await_and_does_no_io(store: Store, engine: AsyncEngine) -> None:
    sent: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    async with AsyncSession(engine) as session:
        job = store.queue("q").enqueue_tx(session, {"a": 1}, priority=4)
        assert job in session.new
        assert sent == []
        await session.commit()
        assert job.id > 0


async def test_a_commit_brings_the_job_and_a_rollback_leaves_nothing(store: Store, engine: AsyncEngine) -> None:
    queue = store.queue("q")
    async with AsyncSession(engine) as session:
        queue.enqueue_tx(session, "rolled back")
        await session.flush()
        await session.rollback()
        (job,) = queue.enqueue_many_tx(session, ["committed"])
        await session.commit()
    (claimed,) = await queue.claim("w", 5)
    assert (claimed.id, claimed.payload) == (job.id, "committed")


def test_the_id_stays_readable_after_the_commit_without_io(sync_store: SyncStore, sync_engine: Engine) -> None:
    queue = sync_store.queue("q")
    with Session(sync_engine, expire_on_commit=True) as session:
        job = queue.enqueue_tx(session, 1)
        session.commit()
        queue.claim("w")[0].ack()
        assert job.id > 0
        assert not session.in_transaction()


# -- other writers -----------------------------------------------------------------------------------------------------


async def test_a_plain_insert_is_a_valid_enqueue_with_the_engines_defaults(door: Store, sql: Sql) -> None:
    mine = await door.queue("q").enqueue({"by": "library"})
    theirs = number(sql, "INSERT INTO alkstore.job (queue, payload) VALUES ('q', '{\"by\": \"sql\"}') RETURNING id")
    expected, found = job_row(sql, mine), job_row(sql, theirs)
    assert expected is not None
    assert found is not None
    own = {"id", "payload", "run_at", "created_at"}
    assert {key: value for key, value in found.items() if key not in own} == {
        key: value for key, value in expected.items() if key not in own
    }
    assert found["run_at"] == found["created_at"]
    first, second = await door.queue("q").claim("w", 2)
    assert (first.id, second.id, second.payload) == (mine, theirs, {"by": "sql"})


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("max_attempts", "0"),
        ("max_attempts", "-1"),
        ("attempts", "-1"),
        ("visibility_timeout", "'0'"),
        ("visibility_timeout", "'-1 second'"),
        ("visibility_timeout", "'3651 days'"),
        ("visibility_timeout", "'200000 years'"),
        ("backoff_base", "'0'"),
        ("backoff_base", "'-1 microsecond'"),
        ("backoff_base", "'1000 years'"),
        ("state", "'dead'"),
        ("state", "'processing'"),
        ("lease", "5"),
        ("headers", "'[]'"),
        ("run_at", "'infinity'"),
        ("run_at", "'-infinity'"),
        ("queue", ""),
    ],
)
def test_the_tables_checks_refuse_what_no_job_can_have(sql: Sql, column: str, expression: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        insert_job(sql, **{"queue": "q", column: expression})
    assert count(sql) == 0
