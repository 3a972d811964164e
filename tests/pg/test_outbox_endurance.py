"""Deliveries that end in a cancellation of their own, moves to dead that fail, and servers that refuse to write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url
from support.rows import job_row
from support.waiting import DEADLINE, until

from alkstore_sa import StopToken

if TYPE_CHECKING:
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import Store, SyncStore


async def wait_for_a_cancelled_task() -> None:
    """Raise the `CancelledError` of a task of one's own, as a client library with a time limit may."""
    task = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def deliver_on_the_loop(_: object) -> None:
    await wait_for_a_cancelled_task()


def deliver_in_a_thread(_: object) -> None:
    asyncio.run(wait_for_a_cancelled_task())


@pytest.mark.parametrize("delivery", [deliver_in_a_thread, deliver_on_the_loop])
async def test_a_delivery_that_is_cancelled_by_itself_is_a_retry(store: Store, sql: Sql, delivery: Any) -> None:
    stop = StopToken()
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")
    running = asyncio.create_task(outbox.run("w", delivery, stop))
    await until(lambda: sql.execute("SELECT FROM alkstore.job WHERE attempts = 1").fetchone() is not None)
    stop.cancel()
    await asyncio.wait_for(running, DEADLINE)
    row = job_row(sql, message_id)
    assert row is not None
    assert row["state"] == "pending"
    assert "CancelledError" in row["last_error"]


def test_a_sync_outboxs_delivery_that_is_cancelled_by_itself_is_a_retry(sync_store: SyncStore, sql: Sql) -> None:
    outbox = sync_store.outbox("mail")
    message_id = outbox.enqueue("x")
    assert outbox.run_once("w", deliver_on_the_loop)
    row = job_row(sql, message_id)
    assert row is not None
    assert row["state"] == "pending"


async def test_a_move_to_dead_that_fails_costs_the_other_jobs_not_their_claim(store: Store, sql: Sql) -> None:
    queue = store.queue("q")
    good = await queue.enqueue("good")
    sql.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('q', '1e5000')")
    sql.execute("ALTER TABLE alkstore.dead ADD CONSTRAINT none CHECK (false)")
    assert [job.id for job in await queue.claim("w", 2)] == [good]


async def test_a_loop_survives_a_server_that_is_read_only_for_a_while(
    store: Store, sql: Sql, database: Database
) -> None:
    stop = StopToken()
    seen: list[Any] = []
    outbox = store.outbox("mail")
    await outbox.enqueue(0)
    running = asyncio.create_task(outbox.run("w", lambda job: seen.append(job.payload), stop, poll=0.05))
    await until(lambda: seen == [0] and not sql.execute("SELECT FROM alkstore.job").fetchall())
    name = make_url(database.dsn).database
    sql.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
    sql.execute("SET default_transaction_read_only = off")
    sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await asyncio.wait({running}, timeout=0.5)
    sql.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
    sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    sql.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('__alkstore_outbox:mail', '1')")
    if running.done():
        await running
    await until(lambda: seen == [0, 1])
    stop.cancel()
    await asyncio.wait_for(running, DEADLINE)
