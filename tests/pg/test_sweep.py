"""Contract section 3: the sweeps, and that no row can be stranded."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import IntegrityError
from support.both_doors import BOTH_DOORS, open_store
from support.plain_sql import count, insert_job
from support.rows import expire, job_row, lapse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import Store

PAST = "statement_timestamp() - interval '1 hour'"
FUTURE = "statement_timestamp() + interval '1 hour'"
PROCESSING = {"state": "'processing'", "lease": "nextval('alkstore.job_lease')", "worker_id": "'gone'"}


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


def dead_row(sql: Sql, job_id: int) -> dict[str, Any]:
    row = job_row(sql, job_id, table="dead")
    assert row is not None
    return row


# -- what expired ------------------------------------------------------------------------------------------------------


async def test_the_sweep_moves_an_expired_pending_job_to_dead(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue({"n": 1}, headers={"h": 1}, priority=4, expires=60)
    expire(sql, job_id)
    alive = job_row(sql, job_id)
    assert alive is not None
    assert await queue.sweep_expired() == 1
    dead = dead_row(sql, job_id)
    assert (dead["reason"], dead["last_error"], count(sql)) == ("expired", None, 0)
    assert {key: dead[key] for key in dead.keys() & alive.keys()} == {key: alive[key] for key in dead.keys() & alive}


async def test_the_sweep_takes_an_expired_job_also_before_its_run_time(door: Store, sql: Sql) -> None:
    job_id = await door.queue("q").enqueue(1, delay=3600, expires=7200)
    expire(sql, job_id)
    assert await door.sweep_expired() == 1


async def test_a_job_that_lapsed_and_expired_is_swept(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1, expires=3600)
    await queue.claim("w")
    lapse(sql, job_id)
    expire(sql, job_id)
    assert await queue.claim("w") == []
    assert await queue.sweep_expired() == 1
    assert dead_row(sql, job_id)["reason"] == "expired"


async def test_an_expired_job_is_left_alone_while_a_live_lease_holds_it(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1, expires=3600)
    (job,) = await queue.claim("w")
    expire(sql, job_id)
    assert await queue.sweep_expired() == 0
    await job.ack()


async def test_a_job_that_may_still_run_is_never_swept(door: Store, sql: Sql) -> None:
    queue = door.queue("q", max_attempts=2)
    await queue.enqueue(1)
    await queue.enqueue(1, delay=3600)
    await queue.enqueue(1, expires=3600)
    lapsed = await queue.enqueue(1, priority=1)
    await queue.claim("w")
    lapse(sql, lapsed)
    assert (await door.sweep_expired(), await queue.sweep_expired(), count(sql)) == (0, 0, 4)


# -- what is used up ---------------------------------------------------------------------------------------------------


async def test_a_job_that_lapsed_at_its_last_attempt_goes_to_dead_with_its_last_real_error(
    door: Store, sql: Sql
) -> None:
    queue = door.queue("q", max_attempts=2)
    job_id = await queue.enqueue(1)
    (job,) = await queue.claim("w")
    await job.retry("the real one", delay=0)
    await queue.claim("w2")
    assert await queue.sweep_expired() == 0
    lapse(sql, job_id)
    assert await queue.sweep_expired() == 1
    dead = dead_row(sql, job_id)
    assert (dead["reason"], dead["last_error"], dead["attempts"], dead["worker_id"]) == (
        "lapsed",
        "the real one",
        2,
        "w2",
    )


async def test_a_pending_exhausted_row_of_another_writer_is_swept(door: Store, sql: Sql) -> None:
    used_up = insert_job(sql, "q", attempts="3", last_error="'by hand'")
    over_used = insert_job(sql, "q", attempts="5", max_attempts="1", run_at=FUTURE)
    assert await door.queue("q").sweep_expired() == 2
    assert (dead_row(sql, used_up)["reason"], dead_row(sql, used_up)["last_error"]) == ("exhausted", "by hand")
    assert dead_row(sql, over_used)["reason"] == "exhausted"


# -- how it goes about it ----------------------------------------------------------------------------------------------


async def test_a_queues_sweep_takes_its_own_jobs_and_the_stores_takes_all(door: Store, sql: Sql) -> None:
    for name in ("q", "other", "__alkstore_outbox:mail"):
        insert_job(sql, name, expires_at=PAST)
        insert_job(sql, name, attempts="3")
    assert [await door.queue("q").sweep_expired(), await door.queue("q").sweep_expired()] == [2, 0]
    assert [await door.sweep_expired(), await door.sweep_expired(), count(sql)] == [4, 0, 0]


async def test_the_sweep_moves_more_than_a_portion(store: Store, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO alkstore.job (queue, payload, expires_at)"
        f" SELECT 'q', to_jsonb(n), {PAST} FROM generate_series(1, 2001) AS n"
    )
    assert (await store.queue("q").sweep_expired(), count(sql), count(sql, "dead")) == (2001, 0, 2001)


async def test_a_sweep_that_fails_half_way_leaves_every_job_of_its_portion(store: Store, sql: Sql) -> None:
    jobs = [insert_job(sql, "q", expires_at=PAST) for _ in range(5)]
    spent = insert_job(sql, "q", attempts="3")
    sql.execute("ALTER TABLE alkstore.dead ADD CONSTRAINT not_the_last CHECK (id NOT IN (4, 6))")
    with pytest.raises(IntegrityError):
        await store.sweep_expired()
    assert (count(sql), count(sql, "dead")) == (6, 0)
    sql.execute("ALTER TABLE alkstore.dead DROP CONSTRAINT not_the_last")
    assert await store.sweep_expired() == len([*jobs, spent])


async def test_a_sweep_never_waits_for_a_row_that_an_open_transaction_holds(store: Store, sql: Sql) -> None:
    queue = store.queue("q", max_attempts=1)
    ids = await queue.enqueue_many([1, 2, 3], expires=3600)
    jobs = await queue.claim("w", 3)
    lapse(sql, *ids)
    expire(sql, ids[0])
    async with store.begin() as session:
        await jobs[0].ack_tx(session)
        await jobs[1].ack_tx(session)
        assert await asyncio.wait_for(queue.sweep_expired(), 10) == 1
        assert await asyncio.wait_for(store.sweep_expired(), 10) == 0
    assert (count(sql), count(sql, "dead")) == (0, 1)


async def test_sweeps_at_the_same_time_move_each_job_once(store: Store, sql: Sql) -> None:
    for _ in range(60):
        insert_job(sql, "q", expires_at=PAST)
    assert sum(await asyncio.gather(*(store.sweep_expired() for _ in range(8)))) == 60
    assert (count(sql), count(sql, "dead")) == (0, 60)


# -- no row can be stranded --------------------------------------------------------------------------------------------


def every_kind_of_row(sql: Sql) -> dict[int, str]:
    """Insert a row for each combination of what decides a job's fate, and return the fate that each must have."""
    states = {
        "pending": {},
        "live": PROCESSING | {"lease_expires_at": FUTURE},
        "lapsed": PROCESSING | {"lease_expires_at": PAST},
    }
    expiries = {"never": "NULL", "valid": FUTURE, "expired": PAST}
    fates: dict[int, str] = {}
    for state, expiry, attempts, run_at in itertools.product(states, expiries, ("0", "2", "3", "4"), (PAST, FUTURE)):
        job_id = insert_job(
            sql, "q", **states[state], expires_at=expiries[expiry], attempts=attempts, run_at=run_at, created_at=PAST
        )
        if state == "live":
            fates[job_id] = "held"
        elif expiry == "expired" or attempts in {"3", "4"}:
            fates[job_id] = "swept"
        else:
            fates[job_id] = "claimable" if run_at == PAST else "later"
    return fates


def having(fates: dict[int, str], *wanted: str) -> set[int]:
    return {job_id for job_id, fate in fates.items() if fate in wanted}


def dead_ids(sql: Sql) -> set[int]:
    return {int(str(row[0])) for row in sql.execute("SELECT id FROM alkstore.dead").fetchall()}


async def test_each_kind_of_row_is_claimable_or_swept_or_later_or_held(store: Store, sql: Sql) -> None:
    fates = every_kind_of_row(sql)
    queue = store.queue("q")
    assert {job.id for job in await queue.claim("w", 500)} == having(fates, "claimable")
    assert await queue.sweep_expired() == len(having(fates, "swept"))
    assert dead_ids(sql) == having(fates, "swept")
    sql.execute(
        f"UPDATE alkstore.job SET run_at = {PAST} WHERE state = 'pending' OR lease_expires_at < statement_timestamp()"
    )
    assert {job.id for job in await queue.claim("w", 500)} == having(fates, "later")


async def test_a_sweep_before_the_claim_takes_nothing_that_may_still_run(store: Store, sql: Sql) -> None:
    fates = every_kind_of_row(sql)
    await store.sweep_expired()
    assert dead_ids(sql) == having(fates, "swept")
    assert {job.id for job in await store.queue("q").claim("w", 500)} == having(fates, "claimable")


async def test_once_every_lease_lapsed_and_every_run_time_came_a_claim_and_a_sweep_leave_nothing_over(
    store: Store, sql: Sql
) -> None:
    every_kind_of_row(sql)
    queue = store.queue("q")
    sql.execute(f"UPDATE alkstore.job SET run_at = {PAST}")
    sql.execute(f"UPDATE alkstore.job SET lease_expires_at = {PAST} WHERE state = 'processing'")
    assert await queue.ack_many(await queue.claim("w", 500)) == []
    await queue.sweep_expired()
    assert count(sql) == 0


# -- retention ---------------------------------------------------------------------------------------------------------


async def test_sweep_dead_deletes_what_died_longer_ago(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    old, young = await queue.enqueue_many([1, 2])
    for job in await queue.claim("w", 2):
        await job.fail("no")
    sql.execute("UPDATE alkstore.dead SET died_at = died_at - interval '8 days' WHERE id = %s", [old])
    assert await queue.sweep_dead(timedelta(days=7)) == 1
    assert dead_ids(sql) == {young}
    assert await queue.sweep_dead(0) == 1


async def test_a_queues_sweep_dead_takes_its_own_jobs_and_the_stores_takes_all(door: Store, sql: Sql) -> None:
    for name in ("q", "q", "other"):
        insert_job(sql, name, attempts="3")
    await door.sweep_expired()
    assert await door.queue("q").sweep_dead(0) == 2
    assert await door.sweep_dead(0) == 1


@pytest.mark.parametrize("age", [-1, timedelta(days=4000), float("nan")])
async def test_sweep_dead_refuses_an_impossible_age(store: Store, age: Any) -> None:
    with pytest.raises(ValueError):
        await store.sweep_dead(age)
