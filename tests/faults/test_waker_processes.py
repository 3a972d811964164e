"""Wakes of processes that end right after their commit, that fork, and that begin a second event loop."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest
from support.databases import Database, Databases
from support.wakes import Ear, listening

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alkstore_sa.embedded import LocalServer

ENDS_WITHIN: Final = 5.0
DRIVERS: Final = ("asyncpg", "psycopg")

PRELUDE: Final = """
import asyncio, gc, os, sys, time
from sqlalchemy import NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from alkstore_sa import Store, SyncStore
url = sys.argv[1]
print("begun", flush=True)
"""

# A program that ends in the line after its commit, in each of the ways that there are. It keeps no store or engine
# in a global variable: what is to be sent at the end must not depend on that.
SYNC_ENDS: Final = f"""{PRELUDE}
def main():
    engine = create_engine(url)
    store = SyncStore(engine)
    with Session(engine) as session:
        store.queue("emails").enqueue_tx(session, 1)
        session.commit()
    if "dispose" in sys.argv:
        engine.dispose()
main()
"""

ASYNC_MAIN: Final = f"""{PRELUDE}
async def main(queue="emails", pause=0.0):
    engine = create_async_engine(url)
    store = Store(engine)
    if "enqueue" in sys.argv:
        await store.queue(queue).enqueue(1)
    else:
        async with AsyncSession(engine) as session:
            store.queue(queue).enqueue_tx(session, 1)
            await session.commit()
    if pause:
        await asyncio.sleep(pause)
    if "dispose" in sys.argv:
        await engine.dispose()
"""

ASYNC_ENDS: Final = f"""{ASYNC_MAIN}
asyncio.run(main())
"""

# Event loops that end at every point of a wake's way.
LOOPS_RUN: Final = f"""{ASYNC_MAIN}
for number in range(20):
    asyncio.run(main(f"emails {{number}}", number * 0.0001))
"""

LOOPS_CLOSED: Final = f"""{ASYNC_MAIN}
for number in range(20):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main(f"emails {{number}}", number * 0.0001))
    loop.close()
"""

# An event loop that ends in the middle of sending a wake.
ENDS_MIDWAY: Final = f"""{PRELUDE}
from sqlalchemy.util import await_only
async def main():
    engine = create_async_engine(url)
    under_way = []
    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def hold(connection, cursor, statement, *rest):
        if "pg_notify(wake" in statement:
            under_way.append(statement)
            await_only(asyncio.sleep(3600))
    store = Store(engine)
    await store.queue("emails").enqueue(1)
    while not under_way:
        await asyncio.sleep(0.001)
    return store if "close" in sys.argv else None
if "run" in sys.argv:
    asyncio.run(main())
else:
    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(main())
    loop.close()
    if store is not None:
        asyncio.run(store.close())
        os._exit(0)  # so that nothing is left to the end of the interpreter
"""

# These commit, let the test stop the server before a wake is sent, and end.
SYNC_ENDS_WITHOUT_SERVER: Final = f"""{PRELUDE}
engine = create_engine(url)
def hold(connection, cursor, statement, *rest):
    if "pg_notify(wake" in statement:
        while not gone:
            time.sleep(0.01)
gone = []
event.listen(engine, "before_cursor_execute", hold)
SyncStore(engine).queue("emails").enqueue(1)
print("committed", flush=True)
sys.stdin.readline()
gone.append(True)
"""

ASYNC_ENDS_WITHOUT_SERVER: Final = f"""{PRELUDE}
async def main():
    await Store(create_async_engine(url)).queue("emails").enqueue(1)
    print("committed", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""

TWO_LOOPS: Final = f"""{PRELUDE}
engine = create_async_engine(url, **({{"poolclass": NullPool}} if "NullPool" in sys.argv else {{}}))
store = Store(engine)
async def main(queue):
    await store.queue(queue).enqueue(1)
    if "NullPool" not in sys.argv:
        await engine.dispose()
asyncio.run(main("emails"))
asyncio.run(main("letters"))
"""

LOOP_GOES_ON: Final = f"""{PRELUDE}
engine = create_async_engine(url)
store = Store(engine)
loop = asyncio.new_event_loop()
for queue in ("emails", "letters"):
    loop.run_until_complete(store.queue(queue).enqueue(1))
loop.run_until_complete(engine.dispose())
loop.close()
"""

FORKS: Final = f"""{PRELUDE}
engine = create_engine(url)
store = SyncStore(engine)
def commit(queue):
    with Session(engine) as session:
        store.queue(queue).enqueue_tx(session, 1)
        session.commit()
commit("before")
if "settled" in sys.argv:
    store.close()
child = os.fork()
if child == 0:
    engine.dispose(close=False)
    commit("child")
    sys.exit()
_, status = os.waitpid(child, 0)
assert status == 0, status
commit("parent")
"""

# The child collects its garbage, and begins an event loop and a listening connection of its own. There is no pool: what
# becomes of one that asyncpg's connections are in, when a process forks, is SQLAlchemy's affair.
LISTENER_FORKS: Final = f"""{PRELUDE}
async def in_child(store, engine):
    async with store.listen("to the child") as notifications:
        await store.notify("to the child", "x")
        async for notification in notifications:
            break
    await store.queue("child").enqueue(1)
    await store.close()
    await engine.dispose()
async def main():
    engine = create_async_engine(url, poolclass=NullPool)
    async with Store(engine) as store:
        async with store.listen("prices") as notifications:
            await store.notify("prices", "before")
            assert (await anext(notifications)).payload == "before"
            child = os.fork()
            if child == 0:
                try:
                    gc.collect()
                    asyncio.run(in_child(store, engine))
                    gc.collect()
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert status == 0, status
            await store.notify("prices", "after")
            notification = await asyncio.wait_for(anext(notifications), 10)
            assert notification.payload == "after", notification
            await store.queue("parent").enqueue(1)
    await engine.dispose()
asyncio.run(main())
"""

CLEAN: Final = f"""{PRELUDE}
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60
    engine = create_async_engine(url, pool_size=2)
    async with Store(engine) as store:
        consumer = store.queue("emails").consume("w", poll=3600)
        await store.queue("emails").enqueue(1)
        job = await anext(consumer)
        await job.ack()
        async with AsyncSession(engine) as session:
            store.queue("emails").enqueue_tx(session, 1)
            await session.commit()
        await consumer.aclose()
    await engine.dispose()
    left = asyncio.all_tasks() - {{asyncio.current_task()}}
    assert not left, left
for _ in range(5):
    asyncio.run(main(), debug=True)
    gc.collect()
"""

DISPOSES: Final = f"""{PRELUDE}
import psycopg
async def main(pause):
    engine = create_async_engine(url)
    await Store(engine).queue("emails").enqueue(1)
    if pause:
        await asyncio.sleep(pause)
    await engine.dispose()
for pause in (0, 0.0003, 0.0006, 0.001):
    for _ in range(10):
        asyncio.run(main(pause))
    gc.collect()
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
with psycopg.connect(sys.argv[2], autocommit=True) as look:
    end = time.monotonic() + 10
    while (left := look.execute(OTHERS).fetchone()[0]) and time.monotonic() < end:
        time.sleep(0.01)
gc.collect()
print(left, flush=True)
sys.stdin.readline()
"""


class Script:
    """A program of its own, and the ways to wait for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        """Wait for its next line of output, which is empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def end(self, within: float = 30.0) -> str:
        """Let it go on to its end, be there in time and without a failure, and return what it has complained of."""
        _, errors = self._process.communicate("\n", timeout=within)
        assert self._process.returncode == 0, errors
        return errors


@contextmanager
def script(source: str, *arguments: str) -> Iterator[Script]:
    """Run `source`, with every warning shown, and see to it that it is gone afterwards.

    It has imported what it needs by the time that the block begins, so that this does not count for the time it takes.
    """
    command = [sys.executable, "-W", "always", "-c", source, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            program = Script(process)
            assert program.line() == "begun"
            yield program
        finally:
            process.kill()


@pytest.fixture
def ear(database: Database) -> Iterator[Ear]:
    with listening(database) as ear:
        for name in ("before", "child", "parent"):
            ear.listen("queue", name)
        yield ear


# -- a process that ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["", "dispose"])
def test_a_process_without_an_event_loop_has_sent_its_wakes_when_it_has_ended(
    database: Database, ear: Ear, way: str
) -> None:
    with script(SYNC_ENDS, database.url("psycopg"), way) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue emails"}


@pytest.mark.parametrize("operation", ["enqueue", "enqueue_tx"])
@pytest.mark.parametrize("way", ["", "dispose"])
def test_a_process_with_an_event_loop_has_sent_its_wakes_when_it_has_ended(
    database: Database, driver: str, ear: Ear, way: str, operation: str
) -> None:
    with script(ASYNC_ENDS, database.url(driver), operation, way) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue emails"}


@pytest.mark.parametrize("way", ["run", "closed", "close"])
def test_a_wake_that_was_under_way_when_its_event_loop_ended_has_been_sent_when_the_process_has_ended(
    database: Database, driver: str, ear: Ear, way: str
) -> None:
    with script(ENDS_MIDWAY, database.url(driver), way) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue emails"}


@pytest.mark.parametrize("loops", [LOOPS_RUN, LOOPS_CLOSED], ids=["run", "closed"])
@pytest.mark.parametrize("way", ["", "dispose"])
def test_no_wake_is_lost_with_its_event_loop_whenever_that_ends(
    database: Database, driver: str, ear: Ear, way: str, loops: str
) -> None:
    queues = [f"emails {number}" for number in range(20)]
    for queue in queues:
        ear.listen("queue", queue)
    with script(loops, database.url(driver), way) as program:
        program.end()
    assert set(ear.heard()) == {f"queue {queue}" for queue in queues}


@pytest.mark.parametrize(
    ("source", "driver"),
    [
        (SYNC_ENDS_WITHOUT_SERVER, "psycopg"),
        (ASYNC_ENDS_WITHOUT_SERVER, "psycopg"),
        (ASYNC_ENDS_WITHOUT_SERVER, "asyncpg"),
    ],
    ids=["sync", "psycopg", "asyncpg"],
)
def test_a_process_whose_server_is_gone_ends_in_a_bounded_time(
    own_server: LocalServer, source: str, driver: str
) -> None:
    with script(source, Database(own_server.dsn).url(driver)) as program:
        assert program.line() == "committed"
        own_server.kill()
        program.end(ENDS_WITHIN)


# -- a process with several event loops --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["NullPool", "disposed"])
def test_a_store_wakes_on_a_second_event_loop_as_on_the_first(
    database: Database, driver: str, ear: Ear, way: str
) -> None:
    with script(TWO_LOOPS, database.url(driver), way) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue emails", "queue letters"}


def test_a_store_wakes_on_an_event_loop_that_is_paused_after_each_commit(
    database: Database, driver: str, ear: Ear
) -> None:
    with script(LOOP_GOES_ON, database.url(driver)) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue emails", "queue letters"}


# -- a process that forks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["settled", "at once"])
def test_parent_and_child_both_announce_what_they_commit_after_a_fork(database: Database, ear: Ear, way: str) -> None:
    with script(FORKS, database.url("psycopg"), way) as program:
        program.end(ENDS_WITHIN)
    assert set(ear.heard()) == {"queue before", "queue child", "queue parent"}


def test_a_forked_child_listens_for_itself_and_leaves_the_parents_listening_connection_alone(
    database: Database, driver: str, ear: Ear
) -> None:
    with script(LISTENER_FORKS, database.url(driver)) as program:
        program.end()
    assert set(ear.heard()) == {"queue child", "queue parent"}


# -- what is left ------------------------------------------------------------------------------------------------------


def test_a_closed_store_leaves_no_task_and_no_connection(database: Database, driver: str) -> None:
    with script(CLEAN, database.url(driver)) as program:
        assert program.end() == ""


def test_an_engine_disposed_of_while_a_wake_is_under_way_leaves_no_connection(
    database: Database, databases: Databases, driver: str
) -> None:
    with script(DISPOSES, database.url(driver), database.dsn) as program:
        assert program.line() == "0"
        begin = time.monotonic()
        databases.drop(database)
        assert time.monotonic() - begin < ENDS_WITHIN
        assert program.end() == ""
