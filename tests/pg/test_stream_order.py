"""No event is ever skipped, and all readers see one order, whoever publishes, commits and reads at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg import sql as composing
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.waiting import DEADLINE, until

from alkstore_sa import SyncStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import Event, Store

PUBLISHERS: Final = 6
ROUNDS: Final = 25


@pytest.fixture
def other(database: Database) -> Iterator[Sql]:
    """A connection whose transactions are its own, to get in the way with."""
    with psycopg.connect(database.dsn) as connection:
        yield connection
        connection.rollback()


def seen(events: list[Event[Any]]) -> list[tuple[int, Any]]:
    return [(event.offset, event.payload) for event in events]


# -- two transactions --------------------------------------------------------------------------------------------------


async def test_an_event_published_early_and_committed_late_reaches_every_consumer(
    store: Store, engine: AsyncEngine
) -> None:
    stream = store.stream("s")
    async with AsyncSession(engine) as early, AsyncSession(engine) as late:
        first, second = stream.publish_tx(early, "early"), stream.publish_tx(late, "late")
        await early.flush()
        await late.flush()
        assert first.id < second.id
        await late.commit()
        assert seen(await stream.read()) == [(1, "late")]
        await early.commit()
    assert seen(await stream.read(after=1)) == [(2, "early")]
    assert seen(await stream.read()) == [(1, "late"), (2, "early")]


async def test_events_that_nobody_has_read_yet_keep_the_order_of_their_publishing(
    store: Store, engine: AsyncEngine
) -> None:
    stream = store.stream("s")
    async with AsyncSession(engine) as early, AsyncSession(engine) as late:
        stream.publish_tx(early, "early")
        await early.flush()
        stream.publish_tx(late, "late")
        await late.commit()
        await early.commit()
    assert seen(await stream.read()) == [(1, "early"), (2, "late")]


async def test_an_offset_never_changes_once_it_was_read(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    stream = store.stream("s")
    read: dict[int, Any] = {}
    for number in range(10):
        async with AsyncSession(engine) as early, AsyncSession(engine) as late:
            stream.publish_tx(early, (number, "early"))
            await early.flush()
            stream.publish_tx(late, (number, "late"))
            await late.commit()
            for event in await stream.read(limit=number + 1):
                assert read.setdefault(event.offset, event.id) == event.id
            await early.commit()
    assert {event.offset: event.id for event in await stream.read()} | read == dict(
        sql.execute('SELECT "offset", id FROM alkstore.stream_event').fetchall()  # type: ignore[arg-type]
    )
    assert sorted(read) == list(range(1, len(read) + 1))


@pytest.mark.parametrize(
    "statements",
    [
        ["SELECT pg_current_xact_id()"],
        ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT count(*) FROM alkstore.stream_event"],
        ["INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '\"open\"')"],
        ["INSERT INTO alkstore.stream_event (stream, payload) VALUES ('another', '\"open\"')"],
    ],
    ids=["that has an id", "with an old snapshot", "that has published here", "that has published elsewhere"],
)
async def test_readers_are_not_held_up_by_a_transaction(store: Store, other: Sql, statements: list[str]) -> None:
    stream = store.stream("s")
    await stream.publish("before")
    for statement in statements:
        other.execute(statement.encode())
    await stream.publish("after")
    events = await asyncio.wait_for(stream.read(), DEADLINE)
    assert seen(events) == [(1, "before"), (2, "after")]
    assert await asyncio.wait_for(stream.head(), DEADLINE) == 2


async def test_publishers_do_not_wait_for_each_other(store: Store, engine: AsyncEngine) -> None:
    stream = store.stream("s")
    async with AsyncSession(engine) as one, AsyncSession(engine) as another:
        for number in range(3):
            for session in (one, another):
                stream.publish_tx(session, number)
                await asyncio.wait_for(session.flush(), DEADLINE)
        await asyncio.wait_for(stream.publish("between"), DEADLINE)
        await one.commit()
        await another.commit()
    assert len(await stream.read()) == 7


async def test_publishers_do_not_wait_for_a_reader_who_gives_places(store: Store, sql: Sql, other: Sql) -> None:
    stream = store.stream("s")
    await stream.publish("first")
    await stream.read()
    other.execute("SELECT FROM alkstore.stream WHERE name = 's' FOR UPDATE")  # what a reader holds while it does
    assert await asyncio.wait_for(stream.publish("second"), DEADLINE)
    reading = asyncio.create_task(stream.read())
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await until(lambda: sql.execute(waiting.encode()).fetchone() is not None)
    await asyncio.wait_for(stream.publish("third"), DEADLINE)
    assert seen(await asyncio.wait_for(stream.read(limit=1), DEADLINE)) == [(1, "first")]
    other.rollback()
    events = await asyncio.wait_for(reading, DEADLINE)
    assert seen(events)[:2] == [(1, "first"), (2, "second")]
    assert seen(await stream.read(after=2)) == [(3, "third")]


async def test_a_reader_that_waited_for_another_goes_on_behind_its_places(store: Store, sql: Sql, other: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(["first", "second"])
    await stream.read()
    await stream.publish("third")
    other.execute("SELECT FROM alkstore.stream WHERE name = 's' FOR UPDATE")
    reading = asyncio.create_task(stream.read(after=2))
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await until(lambda: sql.execute(waiting.encode()).fetchone() is not None)
    # Meanwhile the other one places an event that the waiting statement's snapshot cannot show.
    other.execute("INSERT INTO alkstore.stream_event (stream, payload, \"offset\") VALUES ('s', '\"fast\"', 3)")
    other.execute("UPDATE alkstore.stream SET head = 3 WHERE name = 's'")
    other.commit()
    assert seen(await asyncio.wait_for(reading, DEADLINE)) == [(3, "fast"), (4, "third")]


# -- random load -------------------------------------------------------------------------------------------------------


class Load:
    """What publishers have committed, and what readers have seen."""

    def __init__(self) -> None:
        self.committed: set[str] = set()
        self.readers: list[list[tuple[int, Any]]] = [[], [], []]
        self.publishing = True

    def check(self, everything: list[tuple[int, Any]]) -> None:
        """See that every reader has seen what was committed, all of it, once, in one order."""
        assert len(self.committed) > PUBLISHERS * ROUNDS / 2
        for read in self.readers:
            assert read == everything
        assert [offset for offset, _ in everything] == list(range(1, len(everything) + 1))
        payloads = [payload for _, payload in everything]
        assert len(payloads) == len(set(payloads))
        assert set(payloads) == self.committed


LIMITS: Final = (1, 7, 100)


async def publish_async(store: Store, engine: AsyncEngine, load: Load, number: int) -> None:
    draw = random.Random(number)
    stream = store.stream("s")
    for step in range(ROUNDS):
        name = f"{number}-{step}"
        kind = draw.choice(["alone", "many", "session", "session", "rolled back", "savepoint"])
        if kind == "alone":
            await stream.publish(name)
            load.committed.add(name)
            continue
        if kind == "many":
            names = [f"{name}-{place}" for place in range(5)]
            await stream.publish_many(names)
            load.committed.update(names)
            continue
        async with AsyncSession(engine) as session:
            stream.publish_tx(session, name)
            await session.flush()
            await asyncio.sleep(draw.choice([0, 0, 0.005, 0.03]))
            if kind == "rolled back":
                await session.rollback()
                continue
            if kind == "savepoint":
                savepoint = await session.begin_nested()
                stream.publish_tx(session, f"{name}-undone")
                await session.flush()
                await savepoint.rollback()
                stream.publish_tx(session, f"{name}-later")
            await session.commit()
        load.committed.add(name)
        if kind == "savepoint":
            load.committed.add(f"{name}-later")


async def follow_async(store: Store, load: Load, number: int) -> None:
    stream, read = store.stream("s"), load.readers[number]
    while True:
        finished = not load.publishing
        events = await stream.read(after=read[-1][0] if read else 0, limit=LIMITS[number])
        read += seen(events)
        if finished and not events:
            return


async def run_load(store: Store, engine: AsyncEngine) -> Load:
    load = Load()
    readers = [asyncio.create_task(follow_async(store, load, number)) for number in range(3)]
    try:
        await asyncio.gather(*(publish_async(store, engine, load, number) for number in range(PUBLISHERS)))
    finally:
        load.publishing = False
    await asyncio.wait_for(asyncio.gather(*readers), DEADLINE)
    return load


async def test_under_random_load_readers_miss_nothing_and_repeat_nothing(store: Store, engine: AsyncEngine) -> None:
    load = await run_load(store, engine)
    load.check(seen(await store.stream("s").read(limit=100_000)))


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_under_random_load_a_stricter_default_of_the_database_changes_nothing(
    store: Store, engine: AsyncEngine, sql: Sql, database: Database, level: str
) -> None:
    name = composing.Identifier(str(make_url(database.dsn).database))
    sql.execute(composing.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(name, level))
    async with engine.connect() as connection:
        assert await connection.scalar(text("SHOW default_transaction_isolation")) == level
    # The publishers' own sessions say what they want: their conflicts would be their own business.
    load = await run_load(store, engine.execution_options(isolation_level="READ COMMITTED"))
    load.check(seen(await store.stream("s").read(limit=100_000)))


def publish_in_thread(engine: Engine, store: SyncStore, load: Load, number: int) -> None:
    draw = random.Random(number)
    stream = store.stream("s")
    for step in range(ROUNDS):
        name = f"{number}-{step}"
        kind = draw.choice(["alone", "session", "rolled back"])
        if kind == "alone":
            stream.publish(name)
        else:
            with Session(engine) as session:
                stream.publish_tx(session, name)
                session.flush()
                time.sleep(draw.choice([0, 0, 0.005, 0.03]))
                if kind == "rolled back":
                    session.rollback()
                    continue
                session.commit()
        load.committed.add(name)


def follow_in_thread(store: SyncStore, load: Load, number: int) -> None:
    stream, read = store.stream("s"), load.readers[number]
    while True:
        finished = not load.publishing
        events = stream.read(after=read[-1][0] if read else 0, limit=LIMITS[number])
        read += seen(events)
        if finished and not events:
            return


def test_under_random_load_threads_miss_nothing_and_repeat_nothing(database: Database) -> None:
    load = Load()
    engine = create_engine(database.url("psycopg"), pool_size=10)
    with contextlib.ExitStack() as ends:
        ends.callback(engine.dispose)
        store = ends.enter_context(SyncStore(engine))
        readers = [threading.Thread(target=follow_in_thread, args=(store, load, number)) for number in range(3)]
        publishers = [
            threading.Thread(target=publish_in_thread, args=(engine, store, load, number))
            for number in range(PUBLISHERS)
        ]
        for thread in (*readers, *publishers):
            thread.start()
        for thread in publishers:
            thread.join(DEADLINE)
        load.publishing = False
        for thread in readers:
            thread.join(DEADLINE)
        load.check(seen(store.stream("s").read(limit=100_000)))


async def test_the_first_readers_of_a_new_stream_agree(store: Store) -> None:
    for number in range(10):
        stream = store.stream(f"s{number}")
        await stream.publish_many(range(20))
        answers = await asyncio.wait_for(asyncio.gather(*(stream.read() for _ in range(8))), DEADLINE)
        for events in answers:
            assert seen(events) == [(offset, offset - 1) for offset in range(1, 21)]
