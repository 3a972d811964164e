"""Deliveries that fail in unusual ways."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.rows import job_row

from alkstore_sa import StopToken

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.rows import Sql

    from alkstore_sa import Store, SyncStore


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_error_without_a_text_does_not_end_the_loop(store: Store) -> None:
    outbox = store.outbox("mail")
    await outbox.enqueue("bad", priority=1)
    await outbox.enqueue("good")
    stop = StopToken()

    async def deliver(job: Any) -> None:
        if job.payload == "bad":
            raise Mute
        stop.cancel()

    await asyncio.wait_for(outbox.run("w", deliver, stop, concurrency=1), 10)


def test_an_error_without_a_text_is_stored_as_its_type(sync_store: SyncStore, sql: Sql) -> None:
    queue = sync_store.queue("q")
    job_id = queue.enqueue(1)
    (job,) = queue.claim("w")
    job.retry(Mute())
    row = job_row(sql, job_id)
    assert row is not None
    assert row["last_error"].startswith("Mute")


async def test_a_delivery_whose_acknowledging_transaction_failed_is_retried_with_its_error(
    store: Store, engine: AsyncEngine, sql: Sql
) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")

    async def deliver(job: Any) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await job.ack_tx(session)
            raise ValueError("the order is gone")

    assert await outbox.run_once("w", deliver)
    row = job_row(sql, message_id)
    assert row is not None
    assert (row["state"], row["last_error"]) == ("pending", "ValueError: the order is gone")


def test_a_sync_delivery_whose_acknowledging_transaction_failed_is_retried_with_its_error(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    outbox = sync_store.outbox("mail")
    message_id = outbox.enqueue("x", max_attempts=1)

    def deliver(job: Any) -> None:
        with Session(sync_engine) as session, session.begin():
            job.ack_tx(session)
            raise ValueError("the order is gone")

    assert outbox.run_once("w", deliver)
    row = job_row(sql, message_id, table="dead")
    assert row is not None
    assert (row["reason"], row["last_error"]) == ("exhausted", "ValueError: the order is gone")


async def test_a_delivery_that_fails_with_its_acknowledging_transaction_open_does_not_wait_for_it(
    store: Store, engine: AsyncEngine
) -> None:
    outbox = store.outbox("mail")
    await outbox.enqueue("x")

    async with AsyncSession(engine) as session:

        async def deliver(job: Any) -> None:
            await job.ack_tx(session)
            raise ValueError("the order is gone")

        assert await asyncio.wait_for(outbox.run_once("w", deliver), 5)


def test_a_sync_delivery_that_fails_with_its_acknowledging_transaction_open_does_not_wait_for_it(
    sync_store: SyncStore, sync_engine: Engine
) -> None:
    outbox = sync_store.outbox("mail")
    outbox.enqueue("x")
    with Session(sync_engine) as session:
        session.execute(text("SET LOCAL idle_in_transaction_session_timeout = '5s'"))  # the server ends a deadlock

        def deliver(job: Any) -> None:
            job.ack_tx(session)
            raise ValueError("the order is gone")

        assert outbox.run_once("w", deliver)
        assert session.scalar(text("SELECT 1")) == 1
