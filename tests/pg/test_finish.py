"""Contract section 3: the end of a claim (ack, retry, fail, heartbeat, release), and that it is fenced by its lease."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import IntegrityError
from support.both_doors import BOTH_DOORS, open_store
from support.plain_sql import count, server_time
from support.rows import job_row, lapse, make_due

from alkstore_sa import LeaseLost, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import JobHandle, Queue, SyncStore

OPERATIONS = ("ack", "retry", "fail", "heartbeat", "release")
FINISHES = ("ack", "retry", "fail", "release")


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


async def claimed(queue: Queue[Any], worker_id: str = "w", **options: Any) -> JobHandle[Any]:
    """Enqueue a job and claim it."""
    job_id = await queue.enqueue({"n": 1}, **options)
    (job,) = await queue.claim(worker_id)
    assert job.id == job_id
    return job


def row_of(sql: Sql, job_id: int, *, table: str = "job") -> dict[str, Any]:
    row = job_row(sql, job_id, table=table)
    assert row is not None
    return row


# -- ack ---------------------------------------------------------------------------------------------------------------


async def test_ack_deletes_the_row_and_leaves_no_result(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    await job.ack()
    assert (count(sql), count(sql, "dead")) == (0, 0)


async def test_ack_many_finishes_all_and_returns_those_whose_lease_was_lost(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    ids = await queue.enqueue_many([1, 2, 3])
    jobs = await queue.claim("w", 3)
    lapse(sql, ids[1])
    await queue.claim("w")
    assert [job.id for job in await queue.ack_many(jobs)] == [ids[1]]
    assert [job_row(sql, job_id) is None for job_id in ids] == [True, False, True]


# -- retry -------------------------------------------------------------------------------------------------------------


async def test_retry_puts_the_job_back_with_its_error_and_keeps_the_attempt(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    assert await job.retry(ValueError("no stamp")) == "pending"
    row = row_of(sql, job.id)
    assert (row["state"], row["attempts"], row["last_error"]) == ("pending", 1, "ValueError: no stamp")
    assert (row["lease"], row["lease_expires_at"], row["worker_id"]) == (None, None, None)


async def test_retry_without_an_error_keeps_the_last_real_one(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job = await claimed(queue)
    await job.retry("real", delay=0)
    (job,) = await queue.claim("w")
    await job.retry()
    assert row_of(sql, job.id)["last_error"] == "real"


@pytest.mark.parametrize(
    ("attempt", "longest"), [(1, 100.0), (2, 200.0), (5, 1600.0), (7, 3600.0), (2**31 - 2, 3600.0)]
)
async def test_a_retry_waits_between_half_and_the_whole_of_the_rows_curve(
    store: Store, sql: Sql, attempt: int, longest: float
) -> None:
    await store.queue("q", backoff_base=100, max_attempts=2**31 - 1).enqueue(1)
    sql.execute("UPDATE alkstore.job SET attempts = %s", [attempt - 1])
    (job,) = await store.queue("q", backoff_base=1).claim("w")
    before = server_time(sql)
    await job.retry("again")
    after = server_time(sql)
    run_at = row_of(sql, job.id)["run_at"]
    assert before + timedelta(seconds=longest / 2) <= run_at <= after + timedelta(seconds=longest)


async def test_a_retry_waits_for_the_delay_that_it_is_given(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    before = server_time(sql)
    await job.retry("again", delay=timedelta(days=40))
    assert before <= row_of(sql, job.id)["run_at"] - timedelta(days=40) <= server_time(sql)


async def test_a_retry_with_no_delay_is_due_at_once(door: Store) -> None:
    queue = door.queue("q")
    job = await claimed(queue)
    await job.retry("again", delay=0)
    assert [again.id for again in await queue.claim("w")] == [job.id]


async def test_a_retry_at_the_last_attempt_moves_the_job_to_dead_with_its_error(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q", max_attempts=1), priority=3, headers={"h": 1}, expires=600)
    alive = row_of(sql, job.id)
    assert await job.retry("the last straw") == "dead"
    dead = row_of(sql, job.id, table="dead")
    assert (dead["reason"], dead["last_error"]) == ("exhausted", "the last straw")
    moved = set(dead) - {"died_at", "reason", "last_error"}
    assert {key: dead[key] for key in moved} == {key: alive[key] for key in moved}
    assert count(sql) == 0


async def test_a_retry_at_the_last_attempt_without_an_error_keeps_the_last_real_one(door: Store, sql: Sql) -> None:
    queue = door.queue("q", max_attempts=2)
    job = await claimed(queue)
    await job.retry("real", delay=0)
    (job,) = await queue.claim("w")
    assert await job.retry() == "dead"
    assert row_of(sql, job.id, table="dead")["last_error"] == "real"


@pytest.mark.parametrize("delay", [-1, timedelta(days=3651), float("nan"), "1"])
def test_a_retry_with_an_impossible_delay_is_a_value_error_and_changes_nothing(
    sync_store: SyncStore, sql: Sql, delay: Any
) -> None:
    queue = sync_store.queue("q")
    queue.enqueue(1)
    (job,) = queue.claim("w")
    before = job_row(sql, job.id)
    with pytest.raises(ValueError):
        job.retry(delay=delay)
    assert job_row(sql, job.id) == before


# -- fail --------------------------------------------------------------------------------------------------------------


async def test_fail_moves_the_job_to_dead_now_with_attempts_left(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q", max_attempts=9))
    await job.fail(LookupError("no such address"))
    dead = row_of(sql, job.id, table="dead")
    assert (dead["reason"], dead["last_error"]) == ("failed", "LookupError: no such address")
    assert (dead["attempts"], dead["max_attempts"], dead["worker_id"], count(sql)) == (1, 9, "w", 0)


async def test_an_error_of_any_characters_and_length_can_be_stored(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    await job.fail("nul \0, surrogate \ud800, " + "x" * 1_000_000)
    stored = row_of(sql, job.id, table="dead")["last_error"]
    assert stored.startswith("nul \\x00, surrogate \\ud800, xxx")
    assert len(stored) < 20_000


@pytest.mark.parametrize("operation", ["fail", "retry"])
async def test_a_move_to_dead_that_fails_leaves_the_job_where_it_was(store: Store, sql: Sql, operation: str) -> None:
    sql.execute("ALTER TABLE alkstore.dead ADD CONSTRAINT nothing_dies CHECK (queue <> 'q')")
    job = await claimed(store.queue("q", max_attempts=1))
    before = row_of(sql, job.id)
    with pytest.raises(IntegrityError):
        await getattr(job, operation)("no")
    assert (row_of(sql, job.id), count(sql, "dead")) == (before, 0)
    await job.ack()


# -- heartbeat ---------------------------------------------------------------------------------------------------------


async def test_a_heartbeat_renews_the_lease_from_now_by_the_rows_own_timeout(door: Store, sql: Sql) -> None:
    await door.queue("q", visibility_timeout=1000).enqueue(1)
    (job,) = await door.queue("q", visibility_timeout=5).claim("w")
    before = server_time(sql)
    until = await job.heartbeat()
    assert until == job.lease_expires_at == row_of(sql, job.id)["lease_expires_at"]
    assert before <= until - timedelta(seconds=1000) <= server_time(sql)


async def test_a_heartbeat_extends_from_now_by_what_it_is_given_also_to_less(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    for seconds in (5000, 60):
        before = server_time(sql)
        until = await job.heartbeat(seconds)
        assert before <= until - timedelta(seconds=seconds) <= server_time(sql)


async def test_a_heartbeat_changes_the_lease_and_nothing_else(door: Store, sql: Sql) -> None:
    job = await claimed(door.queue("q"))
    before = row_of(sql, job.id)
    await job.heartbeat(7000)
    after = row_of(sql, job.id)
    assert {key for key in before if before[key] != after[key]} == {"lease_expires_at"}


async def test_a_heartbeat_after_the_lease_has_lapsed_is_refused_even_if_nobody_reclaimed(
    door: Store, sql: Sql
) -> None:
    job = await claimed(door.queue("q"))
    lapse(sql, job.id)
    before = row_of(sql, job.id)
    with pytest.raises(LeaseLost, match=str(job.id)):
        await job.heartbeat()
    assert row_of(sql, job.id) == before


async def test_heartbeat_many_renews_the_live_and_returns_the_lost(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    kept, lapsed, acked, reclaimed = await queue.enqueue_many([1, 2, 3, 4])
    jobs = await queue.claim("w", 4)
    lapse(sql, lapsed, reclaimed)
    sql.execute("UPDATE alkstore.job SET lease = nextval('alkstore.job_lease') WHERE id = %s", [reclaimed])
    await jobs[2].ack()
    before = server_time(sql)
    assert [job.id for job in await queue.heartbeat_many(jobs, 9000)] == [lapsed, acked, reclaimed]
    assert jobs[0].lease_expires_at == row_of(sql, kept)["lease_expires_at"] >= before + timedelta(seconds=9000)


@pytest.mark.parametrize("extend", [0, -1, timedelta(days=3651)])
def test_a_heartbeat_with_an_impossible_extension_is_a_value_error(sync_store: SyncStore, extend: Any) -> None:
    queue = sync_store.queue("q")
    queue.enqueue(1)
    (job,) = queue.claim("w")
    with pytest.raises(ValueError):
        job.heartbeat(extend)


# -- release -----------------------------------------------------------------------------------------------------------


async def test_release_gives_the_job_back_as_if_it_had_never_been_claimed(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    before = row_of(sql, job_id)
    (job,) = await queue.claim("w")
    await job.release()
    assert row_of(sql, job_id) == before
    assert [again.attempts for again in await queue.claim("w")] == [1]


async def test_a_shutdown_does_not_burn_the_last_attempt(door: Store) -> None:
    queue = door.queue("q", max_attempts=1)
    job = await claimed(queue)
    await job.release()
    assert await queue.sweep_expired() == 0
    assert [(again.id, again.attempts) for again in await queue.claim("w")] == [(job.id, 1)]


async def test_release_many_gives_all_back_and_returns_those_whose_lease_was_lost(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    ids = await queue.enqueue_many([1, 2, 3])
    jobs = await queue.claim("w", 3)
    await jobs[2].ack()
    assert [job.id for job in await queue.release_many(jobs)] == [ids[2]]
    assert [row_of(sql, job_id)["attempts"] for job_id in ids[:2]] == [0, 0]


async def test_the_batch_forms_take_nothing_too(door: Store) -> None:
    queue = door.queue("q")
    assert await queue.ack_many([]) == await queue.release_many([]) == await queue.heartbeat_many([]) == []


# -- late, and stale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", FINISHES)
async def test_what_comes_late_but_before_a_reclaim_still_counts(door: Store, sql: Sql, operation: str) -> None:
    job = await claimed(door.queue("q"))
    lapse(sql, job.id)
    await getattr(job, operation)()
    row = job_row(sql, job.id)
    assert (row and row["state"], count(sql, "dead")) == {
        "ack": (None, 0),
        "retry": ("pending", 0),
        "fail": (None, 1),
        "release": ("pending", 0),
    }[operation]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_stale_handle_changes_nothing_although_its_worker_has_the_same_name(
    door: Store, sql: Sql, operation: str
) -> None:
    queue = door.queue("q")
    stale = await claimed(queue, "same")
    lapse(sql, stale.id)
    (current,) = await queue.claim("same")
    before = row_of(sql, stale.id)
    with pytest.raises(LeaseLost, match=str(stale.id)):
        await getattr(stale, operation)()
    assert row_of(sql, stale.id) == before
    await current.ack()


@pytest.mark.parametrize("finish", FINISHES)
async def test_after_any_finish_the_handle_is_spent(door: Store, sql: Sql, finish: str) -> None:
    queue = door.queue("q", max_attempts=5)
    job = await claimed(queue)
    await job.retry(delay=0)
    (job,) = await queue.claim("w")
    await getattr(job, finish)()
    before = job_row(sql, job.id), job_row(sql, job.id, table="dead")
    for operation in OPERATIONS:
        with pytest.raises(LeaseLost):
            await getattr(job, operation)()
    assert (job_row(sql, job.id), job_row(sql, job.id, table="dead")) == before


@pytest.mark.parametrize("finish", ["retry", "release"])
async def test_a_spent_handle_cannot_touch_the_next_claim(door: Store, sql: Sql, finish: str) -> None:
    queue = door.queue("q")
    spent = await claimed(queue, "same")
    await getattr(spent, finish)()
    make_due(sql, spent.id)
    (current,) = await queue.claim("same")
    before = row_of(sql, current.id)
    for operation in OPERATIONS:
        with pytest.raises(LeaseLost):
            await getattr(spent, operation)()
    assert row_of(sql, current.id) == before


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_after_the_sweep_has_taken_the_job_its_handle_is_lost(door: Store, sql: Sql, operation: str) -> None:
    queue = door.queue("q", max_attempts=1)
    job = await claimed(queue)
    lapse(sql, job.id)
    assert await queue.sweep_expired() == 1
    with pytest.raises(LeaseLost):
        await getattr(job, operation)()
    assert count(sql, "dead") == 1


# -- a row that an open transaction holds ------------------------------------------------------------------------------


async def test_a_renewal_skips_a_row_that_an_open_transaction_holds_and_does_not_call_it_lost(
    store: Store, sql: Sql
) -> None:
    queue = store.queue("q")
    held, free = await queue.enqueue_many([1, 2])
    jobs = await queue.claim("w", 2)
    old = jobs[0].lease_expires_at
    async with store.begin() as session:
        await jobs[0].ack_tx(session)
        assert await asyncio.wait_for(queue.heartbeat_many(jobs, 9000), 10) == []
        assert await asyncio.wait_for(jobs[0].heartbeat(9000), 10) == jobs[0].lease_expires_at == old
        assert row_of(sql, free)["lease_expires_at"] == jobs[1].lease_expires_at > old
    assert [job.id for job in await queue.heartbeat_many(jobs, 9000)] == [held]


async def test_an_ack_in_a_transaction_that_rolls_back_leaves_the_claim_as_it_was(store: Store, sql: Sql) -> None:
    job = await claimed(store.queue("q"))
    before = row_of(sql, job.id)
    async with store.begin() as session:
        await job.ack_tx(session)
        await session.rollback()
    assert row_of(sql, job.id) == before
    await job.ack()
