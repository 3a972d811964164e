"""Loops that are cancelled again while they come to an end, and signals that end them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from support.rows import job_row
from support.waiting import DEADLINE, until

from alkstore_sa import StopToken, Store

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql


def waits_for_lock(sql: Sql) -> bool:
    """Tell whether a statement of somebody else waits for a lock."""
    row = sql.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone()
    return row is not None and row[0] != 0


async def test_a_second_cancellation_of_a_claim_costs_no_job_its_only_attempt(
    store: Store, sql: Sql, database: Database
) -> None:
    queue = store.queue("q")
    job_id = await queue.enqueue(1, max_attempts=1)

    async def consume() -> None:
        async for _ in queue.consume("w"):
            raise AssertionError

    with _locked(database) as locked:
        consuming = asyncio.create_task(consume())
        await until(lambda: waits_for_lock(sql))
        consuming.cancel()
        await asyncio.sleep(0)
        consuming.cancel()
        with suppress(asyncio.CancelledError):
            await consuming
        locked.rollback()

    def is_given_back() -> bool:
        row = job_row(sql, job_id)
        return row is not None and (row["state"], row["attempts"]) == ("pending", 0)

    await until(is_given_back)


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_cancellation_of_an_outboxs_claim_costs_no_message_its_only_attempt(
    store: Store, sql: Sql, database: Database, cancellations: int
) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue(1, max_attempts=1)
    begun: list[int] = []
    with _locked(database) as locked:
        delivering = asyncio.create_task(outbox.run("w", lambda job: begun.append(job.id), StopToken(), poll=3600))
        await until(lambda: waits_for_lock(sql))
        for _ in range(cancellations):
            delivering.cancel()
            await asyncio.sleep(0)
        locked.rollback()
        with suppress(asyncio.CancelledError):
            await delivering

    def is_given_back() -> bool:
        row = job_row(sql, message_id)
        return row is not None and (row["state"], row["attempts"]) == ("pending", 0)

    await until(is_given_back)
    assert begun == []


async def test_a_subscription_that_is_cancelled_twice_gives_its_lease_back_before_the_store_is_closed(
    engine: AsyncEngine, sql: Sql, database: Database
) -> None:
    async with Store(engine) as store:
        stream = store.stream("s")
        await stream.publish(1)
        reached = asyncio.Event()

        async def subscribe() -> None:
            async for _ in stream.subscribe("c"):
                reached.set()

        subscribing = asyncio.create_task(subscribe())
        await asyncio.wait_for(reached.wait(), DEADLINE)
        with await asyncio.to_thread(_locked, database, "stream_offset"):
            subscribing.cancel()
            await asyncio.sleep(0)
            subscribing.cancel()
        with suppress(asyncio.CancelledError):
            await subscribing
    assert sql.execute("SELECT lease FROM alkstore.stream_offset").fetchall() == [(None,)]
    assert engine.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a pool that counts


async def test_a_subscription_that_is_cancelled_twice_while_it_takes_its_lease_gives_it_back(
    store: Store, sql: Sql, database: Database
) -> None:
    stream = store.stream("s")
    await stream.publish(1)
    await stream.save_offset("c", 0)

    async def subscribe() -> None:
        async for _ in stream.subscribe("c"):
            raise AssertionError

    with _locked(database, "stream_offset") as locked:
        subscribing = asyncio.create_task(subscribe())
        await until(lambda: waits_for_lock(sql))
        subscribing.cancel()
        await asyncio.sleep(0)
        subscribing.cancel()
        with suppress(asyncio.CancelledError):
            await subscribing
        locked.rollback()

    def was_given_back() -> bool:
        rows = sql.execute("SELECT lease FROM alkstore.stream_offset").fetchall()
        return rows == [(None,)] and last_lease(sql) > 0

    await until(was_given_back)


def last_lease(sql: Sql) -> int:
    """Return the number of the last lease that was drawn, 0 when there was none."""
    row = sql.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM alkstore.job_lease").fetchone()
    assert row is not None
    return int(str(row[0]))


CLAIMS: Final = """
import asyncio, sys
from contextlib import suppress
from sqlalchemy.ext.asyncio import create_async_engine
from alkstore_sa import Store

async def main():
    store = Store(create_async_engine(sys.argv[1]), wakes="poll")

    async def consume():
        async for _ in store.queue("q").consume("w"):
            raise AssertionError

    consuming = asyncio.create_task(consume())
    await asyncio.to_thread(sys.stdin.readline)
    consuming.cancel()
    await asyncio.sleep(0)
    consuming.cancel()
    with suppress(asyncio.CancelledError):
        await consuming

asyncio.run(main())
"""


async def test_the_end_of_a_loop_does_not_wait_for_a_claim_for_ever(database: Database, driver: str, sql: Sql) -> None:
    with _locked(database):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLAIMS, database.url(driver), stdin=PIPE, stderr=DEVNULL
        )
        try:
            await until(lambda: waits_for_lock(sql))
            await asyncio.wait_for(program.communicate(b"\n"), DEADLINE)
        finally:
            with suppress(ProcessLookupError):
                program.kill()
            await program.wait()
    assert program.returncode == 0


async def test_a_stop_from_a_signal_handler_ends_an_idle_loop(store: Store) -> None:
    stop = StopToken()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop.cancel())
    try:
        running = asyncio.create_task(store.outbox("mail").run("w", lambda _: None, stop, poll=3600))
        await asyncio.sleep(0.5)  # it sleeps within select by then, where the signal is to find it
        asyncio.get_running_loop().run_in_executor(None, os.kill, os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(running, DEADLINE)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _locked(database: Database, table: str = "job") -> psycopg.Connection[tuple[object, ...]]:
    """Hold a table, so that every statement on it waits."""
    connection = psycopg.connect(database.dsn)
    connection.execute(f"LOCK TABLE alkstore.{table}".encode())
    return connection
