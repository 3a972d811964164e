"""Consumers while connections break, the server dies, or the database refuses something."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql as composed
from sqlalchemy import event, make_url
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only
from support.databases import Database
from support.loops import NEVER, consuming, until_asleep
from support.plain_sql import insert_job, number
from support.roles import acting_as, make_role
from support.rows import count
from support.waiting import DEADLINE, until

from alkstore_sa import LeaseLost, SchemaMissing, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

    from sqlalchemy import Connection
    from support.loops import Naps
    from support.rows import Sql

    from alkstore_sa import JobHandle, Queue, SyncStore
    from alkstore_sa.embedded import LocalServer


@pytest.fixture
def queue(store: Store) -> Queue[Any]:
    return store.queue("q")


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    yield from make_role(database)


@pytest.fixture
async def own_engine(own_server: LocalServer, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(Database(own_server.dsn).url(driver))
    yield engine
    await engine.dispose()


async def ack_in_the_end(job: JobHandle[Any]) -> None:
    """Finish a job, over whatever connections it takes."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            await job.ack()
        except LeaseLost:
            return  # it was done, and only the answer was lost
        except (DBAPIError, OSError):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        else:
            return


def handling(queue: Queue[Any], *, poll: float = NEVER) -> AbstractAsyncContextManager[list[Any]]:
    """Consume, and finish each job in the end."""
    return consuming(queue, ack_in_the_end, poll=poll)


def terminate_others(sql: Sql) -> int:
    """Terminate every other connection to the test's database and return how many there were."""
    return len(
        sql.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    )


# -- Connections -------------------------------------------------------------------------------------------------------


async def test_an_idle_consumer_finds_what_was_committed_while_every_connection_was_gone(
    store: Store, queue: Queue[Any], sql: Sql, naps: Naps
) -> None:
    async with handling(queue) as seen:
        for round_ in range(4):
            await until_asleep(naps, (store, queue))
            # Nothing of this process runs in between, so it cannot have heard of the job.
            assert terminate_others(sql) >= 2
            insert_job(sql, "q", payload=f"'{round_}'")
            await until(lambda: len(seen) > round_)  # noqa: B023  (called at once)
            await until(lambda: count(sql) == 0)
    assert seen == [0, 1, 2, 3]


async def test_a_busy_consumer_goes_on_over_the_termination_of_its_connections(
    queue: Queue[Any], sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    for payload in range(60):  # the answer to a claim may get lost, which leaves the job to its lease
        insert_job(sql, "q", payload=f"'{payload}'", visibility_timeout="interval '1 s'", max_attempts="10")
    async with handling(queue) as seen:
        for done in (10, 20, 30, 40):
            await until(lambda: len(set(seen)) >= done)  # noqa: B023  (called at once)
            terminate_others(sql)
        await until(lambda: len(set(seen)) == 60 and count(sql) == 0)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_wakes_arrive_again_after_the_listening_connection_was_lost(
    store: Store, queue: Queue[Any], sql: Sql, sync_store: SyncStore, naps: Naps
) -> None:
    async with handling(queue) as seen:
        await until_asleep(naps, (store, queue))
        lost = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert len(sql.execute(lost).fetchall()) == 1
        await until(lambda: not store._listener._listening)
        await until_asleep(naps, (store, queue))
        await asyncio.to_thread(sync_store.queue("q").enqueue, "after")
        await until(lambda: seen == ["after"])


async def test_a_consumer_may_be_the_first_to_use_an_engine_whose_first_connection_takes_its_time(
    engine: AsyncEngine, queue: Queue[Any], sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = engine.sync_engine.dialect
    initialize = dialect.initialize

    def slowly(connection: Connection) -> None:
        await_only(asyncio.sleep(0.2))
        initialize(connection)

    monkeypatch.setattr(dialect, "initialize", slowly)
    insert_job(sql, "q", payload="'7'")
    async with handling(queue) as seen:
        await until(lambda: seen == [7])


# -- The server --------------------------------------------------------------------------------------------------------


async def test_a_killed_server_costs_a_consumer_no_job(own_server: LocalServer, own_engine: AsyncEngine) -> None:
    def restart() -> None:
        own_server.kill()
        own_server.start_again()

    async with Store(own_engine) as store:
        queue = store.queue("q")
        # The answer to a claim may get lost, which leaves the job to its lease.
        await queue.enqueue_many(range(40), visibility_timeout=2, max_attempts=10)
        async with handling(queue) as seen:
            for done in (5, 20):
                await until(lambda: len(set(seen)) >= done)  # noqa: B023  (called at once)
                await asyncio.to_thread(restart)
            await until(lambda: len(set(seen)) == 40)
            with psycopg.connect(own_server.dsn, autocommit=True) as sql:
                await until(lambda: count(sql) == 0)
                assert count(sql, "dead") == 0


async def test_an_idle_consumer_outlasts_a_server_that_is_away_and_finds_what_came_before_it_could_listen(
    own_server: LocalServer, own_engine: AsyncEngine, naps: Naps
) -> None:
    async with Store(own_engine) as store:
        queue = store.queue("q")
        async with handling(queue) as seen:
            await until_asleep(naps, (store, queue))
            await asyncio.to_thread(own_server.kill)
            own_server.start_again()  # on this thread, so that the consumer learns of it only after the next line
            with psycopg.connect(own_server.dsn, autocommit=True) as sql:
                insert_job(sql, "q", payload="'7'")
            await until(lambda: seen == [7])


async def test_while_the_server_is_away_a_consumer_tries_a_few_times_a_second(
    own_server: LocalServer, own_engine: AsyncEngine, naps: Naps
) -> None:
    tries: list[object] = []
    event.listen(own_engine.sync_engine, "do_connect", lambda *_: tries.append(None))
    async with Store(own_engine, wakes="poll") as store:
        queue = store.queue("q")
        async with handling(queue, poll=0.001) as seen:
            await until(lambda: naps.under_way)
            await asyncio.to_thread(own_server.kill)
            tries.clear()
            await until(lambda: tries)
            await asyncio.sleep(1)  # the time that is measured
            assert 2 <= len(tries) <= 10
            await asyncio.to_thread(own_server.start_again)
            await queue.enqueue("after")
            await until(lambda: seen == ["after"])


# -- What does not pass by itself --------------------------------------------------------------------------------------


async def first_of(queue: Queue[Any]) -> JobHandle[Any]:
    async with aclosing(queue.consume("w", poll=NEVER)) as jobs:
        return await asyncio.wait_for(anext(jobs), DEADLINE)


async def test_a_database_without_the_tables_ends_a_consumer(queue: Queue[Any], sql: Sql) -> None:
    sql.execute("DROP SCHEMA alkstore CASCADE")
    with pytest.raises(SchemaMissing, match="alembic upgrade head"):
        await first_of(queue)


async def test_tables_that_are_dropped_meanwhile_end_a_consumer_with_the_databases_error(
    store: Store, queue: Queue[Any], sql: Sql, naps: Naps
) -> None:
    waiting = asyncio.create_task(first_of(queue))
    await until_asleep(naps, (store, queue))
    sql.execute("DROP SCHEMA alkstore CASCADE")
    sql.execute("SELECT pg_notify(%s, '')", [queue._core.announcement.channel])
    with pytest.raises(ProgrammingError, match="does not exist"):
        await waiting


async def test_a_missing_right_ends_a_consumer_with_the_databases_error(
    database: Database, driver: str, role: str, sql: Sql
) -> None:
    sql.execute(f"GRANT USAGE ON SCHEMA alkstore TO {role}")
    sql.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA alkstore TO {role}")
    engine = create_async_engine(database.url(driver), connect_args=acting_as(role, driver))
    try:
        async with Store(engine) as store:
            with pytest.raises(ProgrammingError, match="permission denied"):
                await first_of(store.queue("q"))
    finally:
        await engine.dispose()


# -- A listening connection that cannot be had -------------------------------------------------------------------------


@pytest.fixture
async def narrow(database: Database, driver: str, role: str, sql: Sql) -> AsyncIterator[AsyncEngine]:
    """An engine of a role that may have one connection, which is in the engine's pool already."""
    name = composed.Identifier(role)
    sql.execute(composed.SQL("ALTER ROLE {} LOGIN PASSWORD 'narrow' CONNECTION LIMIT 1").format(name))
    sql.execute(composed.SQL("GRANT USAGE ON SCHEMA alkstore TO {}").format(name))
    sql.execute(composed.SQL("GRANT ALL ON ALL TABLES IN SCHEMA alkstore TO {}").format(name))
    sql.execute(composed.SQL("GRANT ALL ON ALL SEQUENCES IN SCHEMA alkstore TO {}").format(name))
    url = make_url(database.url(driver)).set(username=role, password="narrow")
    engine = create_async_engine(url, pool_size=1, max_overflow=0)
    async with engine.connect():
        pass
    yield engine
    await engine.dispose()


async def test_a_consumer_polls_while_the_listening_connection_cannot_be_opened(
    narrow: AsyncEngine, sql: Sql, sync_store: SyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with Store(narrow) as store, handling(store.queue("q"), poll=0.1) as seen:
        await until(lambda: any("cannot listen" in record.message for record in caplog.records))
        await asyncio.to_thread(sync_store.queue("q").enqueue, "x")
        await until(lambda: seen == ["x"])
        assert store._listener._listening == set()


async def test_a_consumer_looks_again_when_the_listening_connection_can_be_opened_at_last(
    narrow: AsyncEngine, role: str, sql: Sql, caplog: pytest.LogCaptureFixture, naps: Naps
) -> None:
    async with Store(narrow) as store, handling(store.queue("q")) as seen:
        await until(lambda: any("cannot listen" in record.message for record in caplog.records) and naps.under_way)
        insert_job(sql, "q", payload="'7'")
        assert seen == []
        sql.execute(composed.SQL("ALTER ROLE {} CONNECTION LIMIT -1").format(composed.Identifier(role)))
        await until(lambda: seen == [7])
        await until(lambda: number(sql, "SELECT count(*) FROM alkstore.job") == 0)
