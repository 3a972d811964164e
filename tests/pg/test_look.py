"""Contract section 3: looking at jobs, cancelling them (get_job, cancel, stats, next_due), redriving dead ones."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from support.both_doors import BOTH_DOORS, open_store
from support.plain_sql import count, insert_job
from support.rows import expire, job_row, lapse

from alkstore_sa import DeadJob, Job, JobSnapshot, QueueStats, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


def found(snapshot: JobSnapshot | None) -> JobSnapshot:
    assert snapshot is not None
    return snapshot


# -- get_job -----------------------------------------------------------------------------------------------------------


async def test_get_job_shows_a_pending_job_with_its_stamped_options(door: Store, sql: Sql) -> None:
    queue = door.queue("q", visibility_timeout=7, max_attempts=2, backoff_base=1.5)
    job_id = await queue.enqueue({"a": [1]}, headers={"h": 1}, priority=-3, delay=50, expires=60)
    job = found(await queue.get_job(job_id))
    assert (job.id, job.queue, job.state, job.payload, job.headers) == (job_id, "q", "pending", {"a": [1]}, {"h": 1})
    assert (job.priority, job.attempts, job.max_attempts) == (-3, 0, 2)
    assert (job.visibility_timeout, job.backoff_base) == (timedelta(seconds=7), timedelta(seconds=1.5))
    assert job.run_at - job.created_at == timedelta(seconds=50)
    assert job.expires_at == job.created_at + timedelta(seconds=60)
    assert (job.worker_id, job.lease_expires_at, job.last_error, job.died_at, job.reason) == (None,) * 5


async def test_get_job_shows_who_is_processing_a_job_and_until_when(door: Store) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    (handle,) = await queue.claim("worker 1")
    job = found(await queue.get_job(job_id))
    assert (job.state, job.worker_id, job.lease_expires_at) == ("processing", "worker 1", handle.lease_expires_at)
    assert (job.attempts, job.died_at) == (1, None)


async def test_get_job_shows_why_and_when_a_job_died(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue({"a": 1}, headers={"h": 1})
    (handle,) = await queue.claim("w")
    await handle.fail("no such address")
    job = found(await queue.get_job(job_id))
    row = job_row(sql, job_id, table="dead")
    assert row is not None
    assert (job.state, job.reason, job.last_error, job.died_at) == ("dead", "failed", "no such address", row["died_at"])
    assert (job.payload, job.headers, job.attempts, job.lease_expires_at) == ({"a": 1}, {"h": 1}, 1, None)


async def test_get_job_is_none_for_what_is_done_or_was_never_there(door: Store) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    (handle,) = await queue.claim("w")
    await handle.ack()
    assert [await queue.get_job(other) for other in (job_id, 0, -1, 2**63, 2**70)] == [None] * 5


async def test_another_queues_id_is_none_in_every_state(door: Store) -> None:
    queue, other = door.queue("q"), door.queue("other")
    dead, processing, pending = await queue.enqueue_many([1, 2, 3])
    (first, _) = await queue.claim("w", 2)
    await first.fail("no")
    assert [await other.get_job(job_id) for job_id in (dead, processing, pending)] == [None, None, None]


async def test_get_job_decodes_into_the_queues_type(door: Store) -> None:
    queue = door.queue("q", payload_type=tuple[int, ...])
    job_id = await queue.enqueue([1, 2])
    assert found(await queue.get_job(job_id)).payload == (1, 2)


async def test_get_job_shows_a_job_that_died_because_its_payload_does_not_decode(door: Store) -> None:
    job_id = await door.queue("q").enqueue("seven")
    queue = door.queue("q", payload_type=int)
    assert await queue.claim("w") == []
    job = found(await queue.get_job(job_id))
    assert (job.state, job.reason) == ("dead", "undecodable")


async def test_in_a_session_get_job_sees_the_transactions_own_enqueue(store: Store, engine: AsyncEngine) -> None:
    queue = store.queue("q")
    async with AsyncSession(engine) as session:
        job = queue.enqueue_tx(session, "mine")
        await session.flush()
        assert found(await queue.get_job(job.id, session=session)).payload == "mine"
        assert await queue.get_job(job.id) is None
        assert await store.queue("other").get_job(job.id, session=session) is None


def test_in_a_sync_session_get_job_answers_at_once(sync_store: SyncStore) -> None:
    queue = sync_store.queue("q")
    with sync_store.begin() as session:
        job = queue.enqueue_tx(session, "mine")
        session.flush()
        snapshot = queue.get_job(job.id, session=session)
        assert isinstance(snapshot, JobSnapshot)
        assert snapshot.state == "pending"


async def test_until_its_move_to_dead_is_committed_others_see_a_job_processing(
    store: Store, engine: AsyncEngine
) -> None:
    queue = store.queue("q")
    job_id = await queue.enqueue(1)
    await queue.claim("w")
    async with engine.begin() as connection:
        await connection.exec_driver_sql(
            "WITH gone AS (DELETE FROM alkstore.job RETURNING *) INSERT INTO alkstore.dead (id, queue, payload, reason)"
            " SELECT id, queue, payload, 'failed' FROM gone"
        )
        assert found(await queue.get_job(job_id)).state == "processing"
    assert found(await queue.get_job(job_id)).state == "dead"


async def test_a_job_moving_to_dead_is_seen_in_exactly_one_state(store: Store) -> None:
    queue = store.queue("q")
    ids = await queue.enqueue_many(range(60))
    jobs = await queue.claim("w", 60)
    done = asyncio.Event()

    async def look() -> list[JobSnapshot | None]:
        seen: list[JobSnapshot | None] = []
        while not done.is_set():
            seen += [await queue.get_job(job_id) for job_id in ids[::7]]
        return seen

    lookers = [asyncio.create_task(look()) for _ in range(3)]
    for job in jobs:
        await job.fail("no")
    done.set()
    states = {snapshot and snapshot.state for seen in await asyncio.gather(*lookers) for snapshot in seen}
    assert states <= {"processing", "dead"}


# -- cancel ------------------------------------------------------------------------------------------------------------


async def test_cancel_deletes_a_pending_job_without_trace(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1, delay=50)
    assert await queue.cancel(job_id) is True
    assert await queue.cancel(job_id) is False
    assert (count(sql), count(sql, "dead")) == (0, 0)


async def test_cancel_leaves_a_processing_job_even_when_its_lease_lapsed(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    (job,) = await queue.claim("w")
    assert await queue.cancel(job_id) is False
    lapse(sql, job_id)
    assert await queue.cancel(job_id) is False
    await job.ack()


async def test_cancel_leaves_a_dead_job(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    await (await queue.claim("w"))[0].fail("no")
    assert await queue.cancel(job_id) is False
    assert count(sql, "dead") == 1


async def test_cancel_leaves_another_queues_job_and_ids_that_cannot_be(door: Store, sql: Sql) -> None:
    job_id = await door.queue("q").enqueue(1)
    assert [await door.queue("other").cancel(other) for other in (job_id, 0, -1, 2**63)] == [False] * 4
    assert count(sql) == 1


async def test_a_job_that_waits_for_its_retry_can_be_cancelled(door: Store) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    await (await queue.claim("w"))[0].retry("later")
    assert await queue.cancel(job_id) is True


# -- stats -------------------------------------------------------------------------------------------------------------


async def test_stats_count_by_state_due_and_future_and_tell_the_oldest_due(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    assert await queue.stats() == QueueStats()
    _, _, lapsed = await queue.enqueue_many(["failed", "live", "lapsed"], priority=1)
    jobs = await queue.claim("w", 3)
    await jobs[0].fail("no")
    lapse(sql, lapsed)
    insert_job(sql, "q", run_at="statement_timestamp() - interval '3 hours'")
    await queue.enqueue_many([5, 6], delay=60)
    await door.queue("other").enqueue_many([7] * 4)
    stats = await queue.stats()
    assert (stats.pending, stats.processing, stats.dead, stats.due, stats.future) == (3, 2, 1, 2, 2)
    assert stats.oldest_due is not None
    assert timedelta(hours=3) <= stats.oldest_due < timedelta(hours=4)
    everything = await door.stats()
    assert {name: entry.pending for name, entry in everything.items()} == {"q": 3, "other": 4}
    assert (everything["q"].dead, everything["q"].processing) == (1, 2)


async def test_what_is_expired_or_used_up_is_not_due(door: Store, sql: Sql) -> None:
    expire(sql, insert_job(sql, "q"))
    insert_job(sql, "q", attempts="3")
    stats = await door.queue("q").stats()
    assert (stats.pending, stats.due, stats.future, stats.oldest_due) == (2, 0, 0, None)


# -- next_due ----------------------------------------------------------------------------------------------------------


async def wait_of(store: Store) -> float | None:
    due = await store.queue("q").next_due()
    return None if due is None else due.total_seconds()


async def test_an_empty_queue_has_nothing_next(door: Store) -> None:
    await door.queue("other").enqueue(1, delay=5)
    assert await wait_of(door) is None


async def test_next_due_is_the_soonest_run_at_of_any_priority(door: Store) -> None:
    queue = door.queue("q")
    for priority, delay in ((5, 900), (0, 300), (-5, 600)):
        await queue.enqueue(1, priority=priority, delay=delay)
    wait = await wait_of(door)
    assert wait is not None
    assert 290 < wait <= 300


async def test_next_due_is_the_soonest_lapsing_lease_if_that_is_sooner(door: Store) -> None:
    queue = door.queue("q")
    await queue.enqueue(1, delay=900)
    for timeout in (700, 200, 500):
        await queue.enqueue(1, visibility_timeout=timeout)
    await queue.claim("w", 5)
    wait = await wait_of(door)
    assert wait is not None
    assert 190 < wait <= 200


async def test_a_lease_at_the_last_attempt_makes_nothing_due(door: Store) -> None:
    queue = door.queue("q", max_attempts=1)
    await queue.enqueue(1)
    await queue.claim("w")
    assert await wait_of(door) is None


@pytest.mark.parametrize("what", ["a run time", "a lease"])
async def test_what_fell_due_since_an_empty_claim_is_due_now(store: Store, sql: Sql, what: str) -> None:
    queue = store.queue("q")
    if what == "a lease":
        await queue.enqueue(1)
        await queue.claim("w")
    else:
        await queue.enqueue(1, delay=3600)
    await queue.enqueue(2, delay=7200, priority=3)
    assert await queue.claim("w") == []
    sql.execute(
        "UPDATE alkstore.job SET run_at = statement_timestamp(),"
        " lease_expires_at = CASE WHEN lease IS NOT NULL THEN statement_timestamp() END WHERE priority = 0"
    )
    wait = await wait_of(store)
    assert wait is not None
    assert wait <= 0


# -- redriving ---------------------------------------------------------------------------------------------------------


async def test_a_dead_job_is_redriven_with_the_orm_under_a_new_id(store: Store, sql: Sql) -> None:
    queue = store.queue("q", max_attempts=1)
    dead_id = await queue.enqueue({"to": "a"}, headers={"h": 1})
    await (await queue.claim("w"))[0].fail("typo")
    async with store.begin() as session:
        dead = (await session.scalars(select(DeadJob).where(DeadJob.queue == "q"))).one()
        again = queue.enqueue_tx(session, dead.payload, headers=dead.headers)
        await session.delete(dead)
    (job,) = await queue.claim("w")
    assert (job.id, job.payload, job.headers, job.attempts) == (again.id, {"to": "a"}, {"h": 1}, 1)
    assert job.id != dead_id
    assert count(sql, "dead") == 0


async def test_the_models_can_be_queried_like_any_others(store: Store) -> None:
    await store.queue("q").enqueue_many([{"n": 1}, {"n": 2}])
    async with store.begin() as session:
        jobs: Any = await session.scalars(select(Job).where(Job.queue == "q", Job.payload["n"].as_integer() == 2))
        assert [(job.state, job.payload) for job in jobs] == [("pending", {"n": 2})]
