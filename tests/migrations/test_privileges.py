"""The rights that suffice after the migration; the docs name the same ones."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.roles import acting_as, make_role
from support.rows import expire, job_row, lapse

from alkstore_sa import Store, SyncStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql

USAGE = "USAGE ON SCHEMA alkstore"
VERSION = "SELECT ON alkstore.schema_version"
IN_TRANSACTION = [USAGE, "INSERT ON alkstore.job", "SELECT (id) ON alkstore.job"]
PRODUCER = [*IN_TRANSACTION, VERSION]
WORKER = [
    *(USAGE, VERSION, "USAGE ON SEQUENCE alkstore.job_lease"),
    *("SELECT, UPDATE, DELETE ON alkstore.job", "SELECT, INSERT, UPDATE, DELETE ON alkstore.dead"),
]
PUBLISH_IN_TRANSACTION = [USAGE, "INSERT ON alkstore.stream_event", "SELECT (id) ON alkstore.stream_event"]
PUBLISHER = [*PUBLISH_IN_TRANSACTION, VERSION]
SUBSCRIBER = [
    *(USAGE, VERSION, "USAGE ON SEQUENCE alkstore.job_lease", "SELECT, UPDATE ON alkstore.stream_event"),
    *("SELECT, INSERT, UPDATE ON alkstore.stream", "SELECT, INSERT, UPDATE ON alkstore.stream_offset"),
]
OPTIONS: dict[str, Any] = {"delay": 5, "expires": 50, "priority": 1, "headers": {"a": 1}}


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    yield from make_role(database)


@pytest.fixture
async def limited(database: Database, driver: str, role: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url(driver), connect_args=acting_as(role, driver))
    yield engine
    await engine.dispose()


@pytest.fixture
def limited_sync(database: Database, role: str) -> Iterator[Engine]:
    engine = create_engine(database.url("psycopg"), connect_args=acting_as(role, "psycopg"))
    yield engine
    engine.dispose()


def grant(sql: Sql, role: str, rights: list[str]) -> None:
    for right in rights:
        sql.execute(f'GRANT {right} TO "{role}"'.encode())


async def test_a_producer_enqueues_in_its_transaction_with_insert_and_select_on_the_id(
    limited: AsyncEngine, sql: Sql, role: str
) -> None:
    grant(sql, role, IN_TRANSACTION)
    async with AsyncSession(limited) as session:
        queue = Store(limited).queue("q")
        one = queue.enqueue_tx(session, {"n": 1}, **OPTIONS)
        many = queue.enqueue_many_tx(session, [2, 3])
        plain = queue.enqueue_tx(session, 4)
        await session.commit()
    for job in (one, *many, plain):
        assert job_row(sql, job.id) is not None


def test_a_producer_enqueues_in_its_sync_transaction_with_the_same_rights(
    limited_sync: Engine, sql: Sql, role: str
) -> None:
    grant(sql, role, IN_TRANSACTION)
    with Session(limited_sync) as session:
        jobs = SyncStore(limited_sync).outbox("o").enqueue_many_tx(session, [1, 2], **OPTIONS)
        session.commit()
    for job in jobs:
        assert job_row(sql, job.id) is not None


async def test_a_producer_enqueues_by_itself_if_it_may_read_the_version_too(
    limited: AsyncEngine, sql: Sql, role: str
) -> None:
    grant(sql, role, PRODUCER)
    store = Store(limited)
    ids = await store.queue("q").enqueue_many([1, 2], **OPTIONS)
    ids.append(await store.outbox("o").enqueue(3))
    for job_id in ids:
        assert job_row(sql, job_id) is not None


@pytest.mark.parametrize("right", range(len(PRODUCER)))
async def test_each_of_a_producers_rights_is_needed(limited: AsyncEngine, sql: Sql, role: str, right: int) -> None:
    grant(sql, role, [other for number, other in enumerate(PRODUCER) if number != right])
    with pytest.raises(ProgrammingError, match="permission denied"):
        await Store(limited).queue("q").enqueue(1)


async def test_a_producer_can_neither_read_nor_claim_nor_delete(limited: AsyncEngine, sql: Sql, role: str) -> None:
    grant(sql, role, PRODUCER)
    queue = Store(limited).queue("q")
    job_id = await queue.enqueue(1)
    for forbidden in (queue.claim("w"), queue.get_job(job_id), queue.cancel(job_id), queue.sweep_expired()):
        with pytest.raises(ProgrammingError, match="permission denied"):
            await forbidden


async def test_a_worker_does_all_that_workers_do_without_the_right_to_insert_jobs(
    limited: AsyncEngine, store: Store, sql: Sql, role: str
) -> None:
    grant(sql, role, WORKER)
    ids = await store.queue("q").enqueue_many(range(9))
    work = Store(limited)
    queue = work.queue("q")
    await work.check()
    jobs = await queue.claim("w", 9)
    assert [job.id for job in jobs] == ids
    await jobs[0].ack()
    assert await jobs[1].retry("again") == "pending"
    await jobs[2].fail("no")
    await jobs[3].heartbeat()
    await jobs[4].release()
    async with AsyncSession(limited) as session:
        await jobs[5].ack_tx(session)
        await session.commit()
    assert await queue.cancel(ids[4])
    assert await queue.heartbeat_many(jobs[6:8]) == []
    assert await queue.ack_many(jobs[6:7]) == []
    assert await queue.get_job(ids[2]) is not None
    lapse(sql, ids[7])
    expire(sql, ids[7], ids[1])
    assert await work.sweep_expired() == 2
    assert await queue.sweep_dead(0) == 3
    await queue.next_due()
    assert (await queue.stats()).processing == 2


async def test_a_worker_runs_an_outbox_with_the_same_rights(
    limited: AsyncEngine, store: Store, sql: Sql, role: str
) -> None:
    grant(sql, role, WORKER)
    await store.outbox("o").enqueue(1, max_attempts=1)
    seen: list[object] = []
    assert await Store(limited).outbox("o").run_once("w", lambda job: seen.append(job.payload))
    assert seen == [1]


async def test_a_publisher_publishes_in_its_transaction_with_insert_and_select_on_the_id(
    limited: AsyncEngine, store: Store, sql: Sql, role: str
) -> None:
    grant(sql, role, PUBLISH_IN_TRANSACTION)
    async with AsyncSession(limited) as session:
        event = Store(limited).stream("s").publish_tx(session, {"n": 1}, key="k")
        await session.commit()
    assert [read.id for read in await store.stream("s").read()] == [event.id]


@pytest.mark.parametrize("right", [None, *range(len(PUBLISHER))])
async def test_a_publisher_publishes_by_itself_with_just_these_rights(
    limited: AsyncEngine, sql: Sql, role: str, right: int | None
) -> None:
    grant(sql, role, [other for number, other in enumerate(PUBLISHER) if number != right])
    async with Store(limited) as store:
        if right is None:
            assert len(await store.stream("s").publish_many([1, 2])) == 2
        else:
            with pytest.raises(ProgrammingError, match="permission denied"):
                await store.stream("s").publish(1)


@pytest.mark.parametrize("right", [None, *range(len(SUBSCRIBER))])
async def test_a_subscriber_subscribes_with_just_these_rights(
    limited: AsyncEngine, store: Store, sql: Sql, role: str, right: int | None
) -> None:
    grant(sql, role, [other for number, other in enumerate(SUBSCRIBER) if number != right])
    await store.stream("s").publish_many([1, 2])

    async def follow() -> None:
        async with Store(limited) as subscriber:
            stream = subscriber.stream("s")
            async with aclosing(stream.subscribe("c")) as events:
                async for event in events:
                    async with AsyncSession(limited) as session:
                        await event.save_offset_tx(session)
                        await session.commit()
                    if event.offset == 2:
                        break
            assert (await stream.get_offset("c"), await stream.save_offset("d", 1)) == (2, True)

    if right is None:
        await follow()
    else:
        with pytest.raises(ProgrammingError, match="permission denied"):
            await follow()


async def test_who_trims_needs_the_right_to_delete_events_too(
    limited: AsyncEngine, store: Store, sql: Sql, role: str
) -> None:
    grant(sql, role, SUBSCRIBER)
    await store.stream("s").publish(1)
    await store.stream("s").head()
    with pytest.raises(ProgrammingError, match="permission denied"):
        await Store(limited).stream("s").trim(keep=0)
    grant(sql, role, ["DELETE ON alkstore.stream_event"])
    assert await Store(limited).stream("s").trim(keep=0) == 1


async def test_neither_role_can_change_the_tables(limited: AsyncEngine, sql: Sql, role: str) -> None:
    grant(sql, role, [*PRODUCER, *WORKER])
    for statement in ("DROP TABLE alkstore.job", "TRUNCATE alkstore.job", "CREATE TABLE alkstore.x (id int)"):
        async with limited.connect() as connection:
            with pytest.raises(ProgrammingError):
                await connection.exec_driver_sql(statement)
