"""Consumers of a stream that are killed, suspended, or cut off from the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database
from support.plain_sql import number
from support.processes import running
from support.waiting import DEADLINE, until

from alkstore_sa import Store

if TYPE_CHECKING:
    from support.processes import Program
    from support.rows import Sql

    from alkstore_sa import Stream, SyncStore
    from alkstore_sa.embedded import LocalServer

EVENTS: Final = 500
KILLS: Final = 10

PRELUDE: Final = """
import asyncio, os, sys, time
from contextlib import aclosing
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from alkstore_sa import LeaseLost, Store

async def main():
    engine = create_async_engine(sys.argv[1])
    async with Store(engine) as store:
        async with aclosing(store.stream("s").subscribe("c", poll=0.05, lease=float(sys.argv[2]), page=7)) as events:
            print("ready", flush=True)
            await consume(engine, events)
"""
MAIN: Final = """
asyncio.run(main())
"""

# Says where it is, and stays at the third event.
STAYS: Final = f"""{PRELUDE}
async def consume(engine, events):
    async for event in events:
        print(event.offset, flush=True)
        if event.offset == 3:
            await asyncio.Event().wait()
{MAIN}"""

# The event's effect and its offset in one transaction.
EXACTLY_ONCE: Final = f"""{PRELUDE}
async def consume(engine, events):
    async for event in events:
        async with AsyncSession(engine) as session:
            await session.execute(text("INSERT INTO effect VALUES (:place, :pid)"),
                {{"place": event.offset, "pid": os.getpid()}})
            await event.save_offset_tx(session)
            await session.commit()
{MAIN}"""

# Its beginning and its end, by the server's clock, each committed by itself.
BEGIN_AND_END: Final = f"""{PRELUDE}
async def consume(engine, events):
    async for event in events:
        parameters = {{"place": event.offset, "pid": os.getpid()}}
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO span (place, pid) VALUES (:place, :pid)"), parameters)
        await asyncio.sleep(event.offset % 3 / 1000)
        async with engine.begin() as connection:
            await connection.execute(
                text("UPDATE span SET until = clock_timestamp() WHERE place = :place AND pid = :pid AND until IS NULL"),
                parameters)
{MAIN}"""

# Waits at an event until it may go on, and tries to commit the effect then.
SUSPENDED: Final = f"""{PRELUDE}
async def may_go_on(engine):
    async with engine.connect() as connection:
        return await connection.scalar(text("SELECT count(*) FROM go_on"))

async def consume(engine, events):
    async for event in events:
        print(event.offset, flush=True)
        while not await may_go_on(engine):
            await asyncio.sleep(0.01)
        async with AsyncSession(engine) as session:
            await session.execute(text("INSERT INTO effect VALUES (:place, 0)"), {{"place": event.offset}})
            try:
                await event.save_offset_tx(session)
                await session.commit()
            except LeaseLost:
                print("refused", flush=True)
                return
        print("committed", flush=True)
        return
{MAIN}"""


@pytest.fixture
def stream(sync_store: SyncStore, sql: Sql) -> Any:
    """A stream with a few events, and tables for what their handling has done."""
    sql.execute("CREATE TABLE effect (place bigint, pid integer)")
    sql.execute(
        "CREATE TABLE span (place bigint, pid integer, since timestamptz DEFAULT clock_timestamp(), until timestamptz)"
    )
    stream = sync_store.stream("s")
    stream.publish_many(range(5))
    return stream


def consumer(program: str, database: Database, driver: str, lease: float) -> contextlib.AbstractContextManager[Program]:
    return running(program, database.url(driver), str(lease))


def lapse(sql: Sql) -> None:
    """Let the consumer's lease have lapsed, if it is held."""
    sql.execute(
        "UPDATE alkstore.stream_offset SET lease_expires_at = statement_timestamp() - interval '1 second'"
        " WHERE lease_expires_at IS NOT NULL"
    )


def test_events_between_the_delivery_and_the_saved_offset_of_a_killed_process_come_again(
    stream: Any, database: Database, driver: str, sql: Sql
) -> None:
    with consumer(STAYS, database, driver, 3600) as doomed:
        assert [doomed.line() for _ in range(4)] == ["ready", "1", "2", "3"]
        doomed.kill()
    assert stream.get_offset("c") == 0
    lapse(sql)
    with consumer(STAYS, database, driver, 3600) as successor:
        assert [successor.line() for _ in range(4)] == ["ready", "1", "2", "3"]


def test_another_process_goes_on_by_itself_when_the_lease_of_a_killed_one_has_lapsed(
    stream: Any, database: Database, driver: str
) -> None:
    with consumer(STAYS, database, driver, 1) as doomed:
        assert [doomed.line() for _ in range(4)] == ["ready", "1", "2", "3"]
        with consumer(STAYS, database, driver, 1) as successor:
            assert successor.line() == "ready"
            doomed.kill()
            # What its renewals have saved does not come again. What was never done does.
            lines = [successor.line()]
            while lines[-1] != "3":
                lines.append(successor.line())
            assert lines in (["1", "2", "3"], ["3"])


async def test_with_the_offset_in_the_transaction_of_the_effects_kills_cost_no_event_and_repeat_none(
    stream: Any, database: Database, driver: str, sql: Sql
) -> None:
    draw = random.Random(1)

    def has_handled(events: int) -> bool:
        return number(sql, "SELECT count(*) FROM effect") >= events

    with contextlib.ExitStack() as ends:
        programs = [ends.enter_context(consumer(EXACTLY_ONCE, database, driver, 3600)) for _ in range(KILLS + 1)]
        for program in programs:
            program.line()
        by_pid = {program._process.pid: program for program in programs}
        stream.publish_many(range(EVENTS - 5))
        for kill in range(KILLS):
            moment = kill * EVENTS // (KILLS + 2) + draw.randrange(1, EVENTS // (KILLS + 2))
            await until(partial(has_handled, moment))
            await asyncio.sleep(draw.uniform(0, 0.01))  # anywhere between two events' commits
            by_pid[number(sql, "SELECT pid FROM effect ORDER BY place DESC LIMIT 1")].kill()
            lapse(sql)
        await until(lambda: stream.get_offset("c") == EVENTS)
    assert sql.execute("SELECT place FROM effect ORDER BY place").fetchall() == [
        (place,) for place in range(1, EVENTS + 1)
    ]
    assert number(sql, "SELECT count(DISTINCT pid) FROM effect") == KILLS + 1


async def test_two_processes_under_one_name_never_handle_an_event_at_the_same_time(
    stream: Any, database: Database, driver: str, sql: Sql
) -> None:
    stream.publish_many(range(95))
    with consumer(BEGIN_AND_END, database, driver, 5) as one, consumer(BEGIN_AND_END, database, driver, 5) as another:
        one.line()
        another.line()
        await until(lambda: stream.get_offset("c") >= 30)
        (holder,) = (row[0] for row in sql.execute("SELECT pid FROM span ORDER BY since DESC LIMIT 1"))
        (one if holder == one._process.pid else another).kill()
        lapse(sql)
        await until(lambda: stream.get_offset("c") == 100)
    overlaps = """
        SELECT one.place FROM span AS one JOIN span AS another ON one.ctid <> another.ctid
        WHERE one.since < coalesce(another.until, another.since) AND another.since < coalesce(one.until, one.since)"""
    assert sql.execute(overlaps).fetchall() == []
    assert number(sql, "SELECT count(DISTINCT place) FROM span") == 100
    assert number(sql, "SELECT count(DISTINCT pid) FROM span") == 2


async def test_what_a_process_suspended_past_its_lease_commits_late_is_refused(
    stream: Any, database: Database, driver: str, sql: Sql
) -> None:
    sql.execute("CREATE TABLE go_on (n integer)")
    engine = create_async_engine(database.url(driver))
    with consumer(SUSPENDED, database, driver, 1) as stale:
        assert [stale.line(), stale.line()] == ["ready", "1"]
        os.kill(stale._process.pid, signal.SIGSTOP)
        async with Store(engine) as store:
            events = store.stream("s").subscribe("c", poll=0.05)
            async with contextlib.aclosing(events):
                event = await asyncio.wait_for(anext(events), DEADLINE)  # once the lease has lapsed by itself
                assert event.offset == 1
                sql.execute("INSERT INTO go_on VALUES (1)")
                os.kill(stale._process.pid, signal.SIGCONT)
                assert await asyncio.to_thread(stale.line) == "refused"
                assert (await asyncio.wait_for(anext(events), DEADLINE)).offset == 2
    await engine.dispose()
    assert sql.execute("SELECT * FROM effect").fetchall() == []
    assert stream.get_offset("c") == 1


# -- the server goes away ----------------------------------------------------------------------------------------------


async def follow(stream: Stream[Any], into: list[int], stay: asyncio.Event) -> None:
    async with contextlib.aclosing(stream.subscribe("c", poll=0.05, lease=1)) as events:
        async for event in events:
            into.append(event.offset)
            if event.offset == 3:
                await stay.wait()


@pytest.mark.parametrize(("how", "at_an_event"), [("killed", False), ("killed", True), ("frozen", True)])
async def test_closing_is_bounded_when_the_server_is_gone(
    own_server: LocalServer, driver: str, how: str, at_an_event: bool
) -> None:
    engine = create_async_engine(Database(own_server.dsn).url(driver))
    store, stay = Store(engine), asyncio.Event()
    if not at_an_event:
        stay.set()
    await store.stream("s").publish_many(range(3))
    begun: list[int] = []
    following = asyncio.create_task(follow(store.stream("s"), begun, stay))
    await until(lambda: begun == [1, 2, 3])
    with psycopg.connect(own_server.dsn, autocommit=True) as look:
        pids = [
            row[0] for row in look.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")
        ]
    frozen = []
    if how == "killed":
        own_server.kill()
    else:
        frozen = [own_server.pid, *pids]
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):  # the one that has looked
                os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        await store.close()
        took = time.monotonic() - begin
        stay.set()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(following, DEADLINE)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    await engine.dispose()
    assert took < 10
