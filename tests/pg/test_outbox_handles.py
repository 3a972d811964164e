"""What a delivery may do with the handle that it gets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from support.rows import job_row

if TYPE_CHECKING:
    from support.rows import Sql

    from alkstore_sa import Store, SyncStore, ThreadJobHandle


async def test_a_plain_delivery_renews_its_lease_from_its_thread(store: Store, sql: Sql) -> None:
    outbox = store.outbox("mail")
    await outbox.enqueue("x")
    renewed: list[bool] = []

    def deliver(job: ThreadJobHandle[Any]) -> None:
        before = job.lease_expires_at
        renewed.append(job.heartbeat(extend=3600) > before)

    assert await outbox.run_once("w", deliver)
    assert renewed == [True]


async def test_a_coroutine_that_a_plain_delivery_returns_awaits_the_handle(store: Store) -> None:
    outbox = store.outbox("mail")
    await outbox.enqueue("x")
    renewed: list[bool] = []

    async def renew(job: ThreadJobHandle[Any]) -> None:
        before = job.lease_expires_at
        renewed.append(await job.heartbeat(extend=3600) > before)

    def deliver(job: ThreadJobHandle[Any]) -> Any:
        return renew(job)

    assert await outbox.run_once("w", deliver)
    assert renewed == [True]


async def test_a_delivery_that_acknowledges_in_its_own_transaction_is_not_acknowledged_again(
    store: Store, sql: Sql
) -> None:
    sql.execute("CREATE TABLE delivered (id bigint)")
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")

    async def deliver(job: ThreadJobHandle[Any]) -> None:
        async with store.begin() as session:
            await session.execute(text("INSERT INTO delivered VALUES (:id)"), {"id": job.id})
            await job.ack_tx(session)

    assert await outbox.run_once("w", deliver)
    assert job_row(sql, message_id) is None
    assert sql.execute("SELECT id FROM delivered").fetchall() == [(message_id,)]


async def test_a_delivery_that_fails_the_job_itself_decides(store: Store, sql: Sql) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")

    def deliver(job: ThreadJobHandle[Any]) -> None:
        job.fail("the address does not exist")
        raise ValueError("never mind")

    assert await outbox.run_once("w", deliver)
    row = job_row(sql, message_id, table="dead")
    assert row is not None
    assert (row["reason"], row["last_error"]) == ("failed", "the address does not exist")


async def test_a_generator_function_has_not_delivered(store: Store, sql: Sql) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")

    def deliver(job: ThreadJobHandle[Any]) -> Any:
        yield job.id

    assert await outbox.run_once("w", deliver)
    row = job_row(sql, message_id)
    assert row is not None
    assert row["state"] == "pending"
    assert "generator" in row["last_error"]


async def test_run_once_tells_of_a_message_that_does_not_decode(store: Store, sql: Sql) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")
    nested = "[" * 3000 + "]" * 3000
    sql.execute("UPDATE alkstore.job SET payload = %s WHERE id = %s", [nested, message_id])
    assert await outbox.run_once("w", lambda job: None)
    assert not await outbox.run_once("w", lambda job: None)
    dead = sql.execute("SELECT id, reason FROM alkstore.dead").fetchall()
    assert dead == [(message_id, "undecodable")]


async def test_a_sync_outbox_runs_an_async_delivery_also_beside_a_running_loop(sync_store: SyncStore) -> None:
    outbox = sync_store.outbox("mail")
    outbox.enqueue("x")
    delivered: list[Any] = []

    async def deliver(job: Any) -> None:
        await asyncio.sleep(0)
        delivered.append(job.payload)

    assert outbox.run_once("w", deliver)
    assert delivered == ["x"]


@pytest.mark.parametrize(
    ("end", "state"), [("retry", "pending"), ("release", "pending"), ("ack", None), ("fail", "dead")]
)
async def test_a_plain_delivery_ends_the_job_from_its_thread(
    store: Store, sql: Sql, end: str, state: str | None
) -> None:
    outbox = store.outbox("mail")
    message_id = await outbox.enqueue("x")
    assert await outbox.run_once("w", lambda job: getattr(job, end)())
    row = job_row(sql, message_id) or job_row(sql, message_id, table="dead")
    assert (row and row.get("state", "dead")) == state


def test_a_sync_outbox_counts_its_messages(sync_store: SyncStore) -> None:
    outbox = sync_store.outbox("mail")
    outbox.enqueue_many([1, 2])
    assert (outbox.stats().pending, outbox.stats().due) == (2, 2)
