from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql as composing
from sqlalchemy import create_engine, make_url, select, text
from sqlalchemy.exc import DBAPIError
from support.rows import job_row
from support.sessions import DOORS, NOTHING, Door, Order, begun, done, open_door, stored, until

from alkstore_sa import SyncStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from support.databases import Database
    from support.rows import Sql

STRICT = ("SERIALIZABLE", "REPEATABLE READ")


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


@pytest.fixture
def other(database: Database) -> Iterator[Sql]:
    """A connection whose transactions are its own, to get in the way with."""
    with psycopg.connect(database.dsn) as connection:
        yield connection
        connection.rollback()


def make_default(database: Database, sql: Sql, level: str) -> None:
    """Make `level` what transactions and single statements get when they ask for none."""
    name = composing.Identifier(str(make_url(database.dsn).database))
    sql.execute(composing.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(name, level.lower()))


async def all_of(*calls: Awaitable[Any]) -> list[Any]:
    """Wait for all of them to end, also if one fails."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def while_held(door: Door, sql: Sql, other: Sql, *calls: Callable[[], Any]) -> list[Any]:
    """Make calls that have to wait for rows which `other` has changed; `other` commits when they all wait."""

    def all_wait() -> bool:
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return len(sql.execute(waiting).fetchall()) == len(calls)

    tasks = [asyncio.ensure_future(call() if door.is_async else asyncio.to_thread(call)) for call in calls]
    await until(all_wait)
    other.commit()
    return await all_of(*tasks)


def strict_store(door: Door, database: Database, sql: Sql, where: str, level: str) -> Any:
    """Return a store whose engine, or whose database, is set to a stricter level."""
    if where == "engine":
        return door.new_store(door.new_engine(isolation_level=level))
    if where == "engine's options":
        return door.new_store(door.new_engine().execution_options(isolation_level=level))
    make_default(database, sql, level)
    return door.new_store(door.new_engine())


# -- the engine's own operations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["engine", "engine's options", "database"])
@pytest.mark.parametrize("operation", ["ack", "retry", "fail", "release"])
async def test_an_operation_goes_through_although_its_row_was_changed_meanwhile(
    door: Door, database: Database, sql: Sql, other: Sql, where: str, operation: str
) -> None:
    store = strict_store(door, database, sql, where, "SERIALIZABLE")
    queue = store.queue("orders")
    await done(queue.enqueue({}))
    (job,) = await done(queue.claim("w"))
    other.execute("UPDATE alkstore.job SET last_error = 'changed meanwhile'")
    await while_held(door, sql, other, getattr(job, operation))
    row = job_row(sql, job.id)
    assert row is None or row["state"] == "pending"


@pytest.mark.parametrize("where", ["engine", "engine's options", "database"])
async def test_a_cancel_goes_through_although_its_row_was_changed_meanwhile(
    door: Door, database: Database, sql: Sql, other: Sql, where: str
) -> None:
    store = strict_store(door, database, sql, where, "REPEATABLE READ")
    job_id = await done(store.queue("orders").enqueue({}))
    other.execute("UPDATE alkstore.job SET last_error = 'changed meanwhile'")
    assert await while_held(door, sql, other, lambda: store.queue("orders").cancel(job_id)) == [True]


async def test_two_operations_that_fail_together_both_go_through(
    door: Door, database: Database, sql: Sql, other: Sql
) -> None:
    queue = strict_store(door, database, sql, "database", "SERIALIZABLE").queue("orders")
    await done(queue.enqueue_many([1, 2]))
    jobs = await done(queue.claim("w", 2))
    other.execute("UPDATE alkstore.job SET last_error = 'changed meanwhile'")
    await while_held(door, sql, other, *(job.ack for job in jobs))
    assert stored(sql) == NOTHING


@pytest.mark.parametrize("where", ["engine", "engine's options", "database"])
@pytest.mark.parametrize("level", STRICT)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_concurrent_tasks_meet_no_serialization_failure(
    database: Database, sql: Sql, driver: str, where: str, level: str
) -> None:
    async with open_door(database, driver) as door:
        store = strict_store(door, database, sql, where, level)
        queue = store.queue("orders")
        acknowledged: list[int] = []

        async def work(worker: int) -> None:
            for _ in range(3):
                await queue.enqueue_many([worker] * 4)
                await store.sweep_expired()
                while jobs := await queue.claim(f"w{worker}", 3):
                    await queue.heartbeat_many(jobs)
                    await jobs[0].retry(delay=0)
                    assert await queue.ack_many(jobs[1:]) == []
                    acknowledged.extend(job.id for job in jobs[1:])

        with_last_attempts = store.queue("orders", max_attempts=1)
        await with_last_attempts.enqueue("a first one")
        await all_of(*(work(worker) for worker in range(4)))
        stats = await queue.stats()
        assert len(acknowledged) + stats.dead == 3 * 4 * 4 + 1
        assert len(set(acknowledged)) == len(acknowledged)


@pytest.mark.parametrize("where", ["engine", "engine's options", "database"])
@pytest.mark.parametrize("level", STRICT)
def test_concurrent_threads_meet_no_serialization_failure(database: Database, sql: Sql, where: str, level: str) -> None:
    if where == "database":
        make_default(database, sql, level)
    engine = create_engine(database.url("psycopg"), **({"isolation_level": level} if where == "engine" else {}))
    queue = SyncStore(engine).queue("orders")
    acknowledged: list[int] = []

    def work(worker: int) -> None:
        for _ in range(3):
            queue.enqueue_many([worker] * 4)
            while jobs := queue.claim(f"w{worker}", 3):
                assert queue.ack_many(jobs) == []
                acknowledged.extend(job.id for job in jobs)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, worker) for worker in range(4)]
    engine.dispose()
    for result in results:
        result.result()
    assert len(acknowledged) == len(set(acknowledged)) == 3 * 4 * 4


@pytest.mark.parametrize("where", ["engine", "engine's options", "database"])
async def test_begin_hands_out_a_read_committed_transaction(
    door: Door, database: Database, sql: Sql, where: str
) -> None:
    store = strict_store(door, database, sql, where, "SERIALIZABLE")
    async with begun(store) as session:
        assert await done(session.scalar(text("SHOW transaction_isolation"))) == "read committed"


async def test_the_callers_own_sessions_keep_the_engines_level(door: Door) -> None:
    engine = door.new_engine(isolation_level="SERIALIZABLE")
    store = door.new_store(engine)
    for _ in range(2):
        await done(store.queue("orders").enqueue({}))
        session = door.session(engine)
        assert await done(session.scalar(text("SHOW transaction_isolation"))) == "serializable"
        await done(session.close())


# -- in the caller's transaction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", STRICT)
async def test_in_a_callers_stricter_session_a_serialization_failure_passes_through(
    door: Door, sql: Sql, level: str
) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": "job"}))
    (job,) = await done(queue.claim("w"))
    session = door.session(door.engine.execution_options(isolation_level=level))
    await done(session.scalar(text("SELECT 1")))
    sql.execute("UPDATE alkstore.job SET last_error = 'changed meanwhile'")
    with pytest.raises(DBAPIError) as raised:
        await done(job.ack_tx(session))
    assert raised.value.orig is not None
    assert getattr(raised.value.orig, "sqlstate", None) == "40001"
    await done(session.rollback())
    await done(job.ack_tx(session))
    await done(session.commit())
    assert stored(sql) == NOTHING


async def test_a_commit_refused_for_serialization_leaves_neither_job_nor_business_row(door: Door, sql: Sql) -> None:
    sessions = [door.session(door.engine.execution_options(isolation_level="SERIALIZABLE")) for _ in range(2)]
    for session, reference in zip(sessions, "AB", strict=True):
        assert (await done(session.scalars(select(Order)))).all() == []
        session.add(Order(reference=reference))
        door.store.queue("orders").enqueue_tx(session, {"order": reference})
        await done(session.flush())
    await done(sessions[0].commit())
    with pytest.raises(DBAPIError) as raised:
        await done(sessions[1].commit())
    assert getattr(raised.value.orig, "sqlstate", None) == "40001"
    await done(sessions[1].rollback())
    assert stored(sql) == (["A"], ["A"])


# -- reading in the transaction ----------------------------------------------------------------------------------------


async def test_get_job_sees_what_the_own_transaction_has_enqueued_and_nobody_else_does(door: Door) -> None:
    queue = door.store.queue("orders")
    session = door.session()
    job = queue.enqueue_tx(session, {"order": "A"})
    await done(session.flush())
    found = await done(queue.get_job(job.id, session=session))
    assert (found.state, found.payload) == ("pending", {"order": "A"})
    assert await done(queue.get_job(job.id)) is None
    assert await done(queue.get_job(job.id, session=door.session())) is None


async def test_get_job_sees_what_the_own_transaction_has_acknowledged_and_nobody_else_does(door: Door) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({}))
    (job,) = await done(queue.claim("w"))
    session = door.session()
    await done(job.ack_tx(session))
    assert await done(queue.get_job(job.id, session=session)) is None
    assert (await done(queue.get_job(job.id))).state == "processing"


async def test_get_job_in_a_session_is_scoped_to_the_queue(door: Door) -> None:
    session = door.session()
    job = door.store.queue("orders").enqueue_tx(session, {"order": "A"})
    await done(session.flush())
    assert await done(door.store.queue("others").get_job(job.id, session=session)) is None


async def test_get_job_returns_its_value_to_a_sync_session_and_an_awaitable_to_an_async_one(door: Door) -> None:
    session = door.session()
    result = door.store.queue("orders").get_job(1, session=session)
    assert (await result if door.is_async else result) is None


async def test_get_job_flushes_what_the_session_flushes_by_itself_and_nothing_else(door: Door) -> None:
    for autoflush in (True, False):
        session = door.session(autoflush=autoflush)
        session.add(Order(reference="A"))
        await done(door.store.queue("orders").get_job(1, session=session))
        assert bool(session.new) is not autoflush


# -- time --------------------------------------------------------------------------------------------------------------


async def test_a_long_business_transaction_shortens_no_delay(door: Door, sql: Sql) -> None:
    session = door.session()
    await done(session.execute(text("SELECT pg_sleep(0.2)")))
    began = await done(session.scalar(text("SELECT now()")))
    before = await done(session.scalar(text("SELECT clock_timestamp()")))
    job = door.store.queue("orders").enqueue_tx(session, {}, delay=3600, expires=7200)
    await done(session.commit())
    row = job_row(sql, job.id)
    assert row is not None
    assert before - began >= timedelta(seconds=0.2)
    assert row["run_at"] >= before + timedelta(hours=1)
    assert row["expires_at"] >= before + timedelta(hours=2)
    assert row["created_at"] >= before


async def test_a_job_without_a_delay_is_due_at_the_flush_not_at_the_begin(door: Door, sql: Sql) -> None:
    session = door.session()
    await done(session.execute(text("SELECT pg_sleep(0.2)")))
    before = await done(session.scalar(text("SELECT clock_timestamp()")))
    job = door.store.queue("orders").enqueue_tx(session, {})
    await done(session.commit())
    row = job_row(sql, job.id)
    assert row is not None
    assert row["run_at"] >= before
