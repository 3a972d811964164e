"""A store behind PgBouncer. In transaction mode nothing can listen through it, and all the rest works."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool
from support.pgbouncer import find_pgbouncer, pgbouncer
from support.waiting import DEADLINE, until

from alkstore_sa import BindError, Store, SyncStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database

AN_HOUR: Final = 3600


@pytest.fixture
def program() -> str:
    """The path of PgBouncer, which must be there where the tests are counted on."""
    found = find_pgbouncer()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("pgbouncer is not installed, and CI is set")
        pytest.skip("pgbouncer is not installed")
    return found


@pytest.fixture
def by_transaction(program: str, database: Database) -> Iterator[Database]:
    """The database by way of a pooler that gives each transaction another connection."""
    with pgbouncer(program, database, "transaction") as pooled:
        yield pooled


@pytest.fixture
def by_session(program: str, database: Database) -> Iterator[Database]:
    """The database by way of a pooler that gives each client a connection for as long as it stays."""
    with pgbouncer(program, database, "session") as pooled:
        yield pooled


@pytest.fixture
async def engine(by_transaction: Database, driver: str) -> AsyncIterator[AsyncEngine]:
    """An engine by way of the pooler in transaction mode, with the settings that SQLAlchemy's documentation advises."""
    options: dict[str, Any] = {"connect_args": {"prepare_threshold": None}}
    if driver == "asyncpg":
        options = {
            "poolclass": NullPool,
            "connect_args": {
                "statement_cache_size": 0,
                "prepared_statement_cache_size": 0,
                "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
            },
        }
    engine = create_async_engine(by_transaction.url(driver), **options)
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store by way of the pooler, which does not wait as long as usual for what never comes."""
    monkeypatch.setattr("alkstore_sa._listener.PROBE_TIME", 0.1)
    async with Store(engine) as store:
        yield store


@pytest.fixture
async def direct_engine(database: Database, driver: str) -> AsyncIterator[AsyncEngine]:
    """An engine on the database itself."""
    engine = create_async_engine(database.url(driver))
    yield engine
    await engine.dispose()


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what the library has warned of."""
    caplog.set_level(logging.WARNING, "alkstore_sa")

    def messages() -> list[str]:
        return [f"{record.name}: {record.getMessage()}" for record in caplog.records]

    return messages


async def refused(store: Store) -> None:
    """See that the store does not listen."""
    with pytest.raises(BindError, match="listen_engine"):
        async with store.listen("prices"):
            pass


async def consume(store: Store, n: int, poll: float = 0.05) -> list[Any]:
    """Consume `n` jobs of the queue."""
    found: list[Any] = []
    async with aclosing(store.queue("emails").consume("w", poll=poll)) as jobs:
        async for job in jobs:
            await job.ack()
            found.append(job.payload)
            if len(found) == n:
                break
    return found


async def hears(store: Store) -> bool:
    """Tell whether a subscriber hears what the store notifies."""
    async with store.listen("prices") as notifications:
        await store.notify("prices", "42")
        return (await asyncio.wait_for(anext(notifications), DEADLINE)).payload == "42"


# -- transaction mode --------------------------------------------------------------------------------------------------


async def test_listen_is_refused_with_the_remedy(engine: AsyncEngine) -> None:
    async with Store(engine) as store:
        with pytest.raises(BindError, match=r"PgBouncer in transaction mode.*listen_engine"):
            async with store.listen("prices"):
                pass


async def test_it_stays_refused_at_once(store: Store) -> None:
    for _ in range(3):
        await refused(store)
    assert store._core.hub.channels() == set()


async def test_the_store_says_once_that_it_polls(store: Store, warned: Callable[[], list[str]]) -> None:
    consuming = asyncio.create_task(consume(store, 1))
    await asyncio.gather(*(refused(store) for _ in range(3)))
    await store.queue("emails").enqueue(1)
    await asyncio.wait_for(consuming, DEADLINE)
    await refused(store)
    (warning,) = warned()
    assert warning.startswith("alkstore_sa.listener: this store polls")
    assert "listen_engine" in warning


async def test_jobs_of_other_processes_are_consumed_by_polling(store: Store, sync_store: SyncStore) -> None:
    await refused(store)
    consuming = asyncio.create_task(consume(store, 3))
    for n in range(3):
        sync_store.queue("emails").enqueue(n)
    assert await asyncio.wait_for(consuming, DEADLINE) == [0, 1, 2]


async def test_jobs_of_this_process_wake_its_consumers_all_the_same(store: Store) -> None:
    await refused(store)
    consuming = asyncio.create_task(consume(store, 1, poll=AN_HOUR))
    await until(store._core.hub.channels)
    await store.queue("emails").enqueue("a")
    assert await asyncio.wait_for(consuming, DEADLINE) == ["a"]


async def test_a_subscriber_is_refused_also_where_it_is_the_first_of_many_clients(
    store: Store, engine: AsyncEngine
) -> None:
    # Other clients keep the pooler's connections busy, so that the probe may get any of them.
    async with engine.connect() as one, engine.connect() as other:
        await one.exec_driver_sql("SELECT 1")
        await other.exec_driver_sql("SELECT 1")
        await refused(store)


async def test_other_stores_hear_what_is_notified_through_it(store: Store, direct_engine: AsyncEngine) -> None:
    async with Store(direct_engine) as direct, direct.listen("prices") as notifications:
        await store.notify("prices", "1")
        async with store.begin() as session:
            await store.notify_tx(session, "prices", "2")
        found = [(await asyncio.wait_for(anext(notifications), DEADLINE)).payload for _ in range(2)]
    assert found == ["1", "2"]


async def test_jobs_that_are_enqueued_through_it_wake_the_consumers_of_others(
    store: Store, direct_engine: AsyncEngine
) -> None:
    async with Store(direct_engine) as direct:
        consuming = asyncio.create_task(consume(direct, 2, poll=AN_HOUR))
        await until(lambda: direct._listener._listening)
        await store.queue("emails").enqueue("a")
        async with store.begin() as session:
            store.queue("emails").enqueue_tx(session, "b")
        assert sorted(await asyncio.wait_for(consuming, DEADLINE)) == ["a", "b"]


async def test_with_a_direct_listen_engine_everything_works_with_wakes(
    engine: AsyncEngine, direct_engine: AsyncEngine, sync_store: SyncStore, warned: Callable[[], list[str]]
) -> None:
    async with Store(engine, listen_engine=direct_engine) as store:
        assert await hears(store)
        consuming = asyncio.create_task(consume(store, 2, poll=AN_HOUR))
        await until(lambda: store._listener._listening >= store._core.hub.channels() != set())
        sync_store.queue("emails").enqueue("from another process")
        await store.queue("emails").enqueue("from this one")
        assert sorted(await asyncio.wait_for(consuming, DEADLINE)) == ["from another process", "from this one"]
    assert warned() == []


async def test_jobs_go_through_it_from_the_enqueue_to_the_end(store: Store, engine: AsyncEngine) -> None:
    queue = store.queue("emails")
    ids = await queue.enqueue_many(range(20))
    async with AsyncSession(engine) as session:
        job = queue.enqueue_tx(session, "in a transaction")
        await session.commit()
    claimed = await queue.claim("w", 21)
    assert [one.id for one in claimed] == [*ids, job.id]
    retried, failed, released, in_transaction, *others = claimed
    await retried.retry("no route", delay=AN_HOUR)
    await failed.fail("no such address")
    await released.release()
    await in_transaction.heartbeat()
    async with AsyncSession(engine) as session:
        await in_transaction.ack_tx(session)
        await session.commit()
    assert await queue.ack_many(others) == []
    stats = await queue.stats()
    assert (stats.pending, stats.processing, stats.dead) == (2, 0, 1)


async def test_many_clients_at_once_go_through_it(store: Store) -> None:
    queue = store.queue("emails")

    async def work(n: int) -> list[Any]:
        await queue.enqueue(n)
        done: list[Any] = []
        for job in await queue.claim(f"w{n}", 2):
            await job.ack()
            done.append(job.payload)
        return done

    done = [payload for payloads in await asyncio.gather(*map(work, range(20))) for payload in payloads]
    left = [job.payload for job in await queue.claim("w", 20)]
    assert sorted(done + left) == list(range(20))


async def test_streams_go_through_it(store: Store, engine: AsyncEngine) -> None:
    stream = store.stream("orders")
    await stream.publish("a")
    async with AsyncSession(engine) as session:
        stream.publish_tx(session, "b")
        await session.commit()
    assert [event.payload for event in await stream.read(0, 10)] == ["a", "b"]
    found: list[Any] = []
    async with aclosing(stream.subscribe("mailer", poll=0.05)) as events:
        async for event in events:
            found.append(event.payload)
            if len(found) == 2:
                break
    assert found == ["a", "b"]


def test_a_sync_store_works_through_it(by_transaction: Database) -> None:
    engine = create_engine(by_transaction.url("psycopg"), connect_args={"prepare_threshold": None})
    with SyncStore(engine) as store:
        store.notify("prices", "x")
        queue = store.queue("emails")
        queue.enqueue("a")
        (job,) = queue.claim("w")
        assert job.payload == "a"
        job.ack()
        store.stream("orders").publish("b")
        assert [event.payload for event in store.stream("orders").read(0, 10)] == ["b"]
    engine.dispose()


async def test_with_prepared_statements_left_on_it_is_refused_with_the_same_remedy(
    by_transaction: Database, driver: str
) -> None:
    engine = create_async_engine(by_transaction.url(driver))
    async with Store(engine) as store:
        await refused(store)
    await engine.dispose()


# -- session mode ------------------------------------------------------------------------------------------------------


async def test_in_session_mode_listening_works(
    by_session: Database, driver: str, warned: Callable[[], list[str]]
) -> None:
    engine = create_async_engine(by_session.url(driver))
    async with Store(engine) as store:
        assert await hears(store)
    await engine.dispose()
    assert warned() == []


async def test_in_session_mode_other_processes_wake_a_consumer(
    by_session: Database, driver: str, sync_store: SyncStore
) -> None:
    engine = create_async_engine(by_session.url(driver))
    async with Store(engine) as store:
        consuming = asyncio.create_task(consume(store, 1, poll=AN_HOUR))
        await until(lambda: store._listener._listening)
        sync_store.queue("emails").enqueue("a")
        assert await asyncio.wait_for(consuming, DEADLINE) == ["a"]
    await engine.dispose()
