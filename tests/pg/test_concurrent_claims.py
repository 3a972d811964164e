"""Contract section 3: many claimers at once, and jobs that become claimable behind a place that claims have passed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import create_engine
from support.plain_sql import count, insert_job
from support.rows import lapse

from alkstore_sa import LeaseLost, Store, SyncStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import JobHandle, Queue

CLAIMERS = 100


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_a_hundred_concurrent_tasks_drain_the_queue_and_never_get_a_job_twice(store: Store, sql: Sql) -> None:
    queue = store.queue("q")
    ids = [job_id for p in range(3) for job_id in await queue.enqueue_many(range(200), priority=p)]
    taken: list[int] = []

    async def drain(n: int) -> None:
        while jobs := await queue.claim(f"w{n}", n):
            assert len(jobs) <= n
            taken.extend(job.id for job in jobs)

    await asyncio.gather(*(drain(1 + number % 7) for number in range(CLAIMERS)))
    assert sorted(taken) == ids
    assert {row[0] for row in sql.execute("SELECT attempts FROM alkstore.job").fetchall()} == {1}


def test_a_hundred_concurrent_threads_drain_the_queue_and_never_get_a_job_twice(database: Database) -> None:
    engine = create_engine(database.url("psycopg"), pool_size=8, max_overflow=0)
    queue = SyncStore(engine).queue("q")
    ids = queue.enqueue_many(range(500))
    start = threading.Barrier(CLAIMERS)

    def drain(number: int) -> list[int]:
        start.wait()
        taken = []
        while jobs := queue.claim(f"w{number}", 1 + number % 7):
            assert queue.ack_many(jobs) == []
            taken += [job.id for job in jobs]
        return taken

    with ThreadPoolExecutor(CLAIMERS) as threads:
        taken = [job_id for part in threads.map(drain, range(CLAIMERS)) for job_id in part]
    engine.dispose()
    assert sorted(taken) == ids


async def test_stores_of_several_processes_share_a_queue_without_a_job_claimed_twice(
    engine: AsyncEngine, sql: Sql
) -> None:
    ids = await Store(engine).queue("q").enqueue_many(range(300))
    taken: list[int] = []

    async def drain(store: Store) -> None:
        while jobs := await store.queue("q").claim("w", 2):
            taken.extend(job.id for job in jobs)

    await asyncio.gather(*(drain(Store(engine)) for _ in range(12)))
    assert sorted(taken) == ids


async def test_a_claim_skips_what_another_transaction_has_locked_and_takes_the_next(
    store: Store, sql: Sql, database: Database
) -> None:
    queue = store.queue("q")
    locked, free = await queue.enqueue_many([1, 2])
    with psycopg.connect(database.dsn) as other:
        other.execute("SELECT FROM alkstore.job WHERE id = %s FOR UPDATE", [locked])
        assert [job.id for job in await asyncio.wait_for(queue.claim("w", 2), 10)] == [free]
    assert [job.id for job in await queue.claim("w", 2)] == [locked]


async def test_a_job_is_either_cancelled_or_claimed_but_never_both(store: Store, sql: Sql) -> None:
    queue = store.queue("q")
    ids = await queue.enqueue_many(range(60))
    claiming = [asyncio.create_task(queue.claim("w", 2)) for _ in range(30)]
    gone = await asyncio.gather(*(queue.cancel(job_id) for job_id in reversed(ids)))
    cancelled = [job_id for job_id, was_pending in zip(reversed(ids), gone, strict=True) if was_pending]
    taken = [job.id for jobs in await asyncio.gather(*claiming) for job in jobs]
    taken += [job.id for job in await queue.claim("w", 60)]
    assert sorted([*taken, *cancelled]) == ids


# -- behind a place that claims have passed ----------------------------------------------------------------------------


class Passed(NamedTuple):
    """A queue of which this process's claims have passed the first job, which another process holds."""

    queue: Queue[Any]
    sql: Sql
    first: JobHandle[Any]


async def passed(store: Store, engine: AsyncEngine, sql: Sql) -> Passed:
    """Claim the first two of six jobs, so that this store's marks are behind them, and good for an hour."""
    queue = store.queue("q", max_attempts=9)
    await queue.enqueue_many(range(6))
    (first,) = await Store(engine).queue("q").claim("elsewhere")
    await queue.claim("here")
    marks = store._core.marks("q")
    assert marks.usable()
    marks.next_walk += 3600
    return Passed(queue, sql, first)


async def by_late_commit(at: Passed) -> int:
    return insert_job(at.sql, "q", run_at="statement_timestamp() - interval '1 hour'")


async def by_a_higher_priority(at: Passed) -> int:
    return insert_job(at.sql, "q", priority="7")


async def by_a_lower_priority(at: Passed) -> int:
    return insert_job(at.sql, "q", priority="-7")


async def by_release(at: Passed) -> int:
    await at.first.release()
    return at.first.id


async def by_lapse(at: Passed) -> int:
    lapse(at.sql, at.first.id)
    return at.first.id


async def by_retry(at: Passed) -> int:
    await at.first.retry(delay=0)
    return at.first.id


WAYS: list[Callable[[Passed], Awaitable[int]]] = [
    by_late_commit,
    by_a_higher_priority,
    by_a_lower_priority,
    by_release,
    by_lapse,
    by_retry,
]


@pytest.mark.parametrize("way", WAYS)
async def test_a_claim_that_comes_short_has_looked_everywhere(
    store: Store, engine: AsyncEngine, sql: Sql, way: Callable[[Passed], Awaitable[int]]
) -> None:
    at = await passed(store, engine, sql)
    behind = await way(at)
    found = await at.queue.claim("w", 50)
    assert len(found) == 5
    assert behind in {job.id for job in found}
    assert found == sorted(found, key=lambda job: (-job.priority, job.run_at, job.id))
    assert count(sql) == len(found) + (1 if behind == at.first.id else 2)


@pytest.mark.parametrize("way", [by_late_commit, by_a_higher_priority, by_release, by_lapse])
async def test_a_job_behind_a_place_is_found_first_when_the_bound_is_over(
    store: Store, engine: AsyncEngine, sql: Sql, way: Callable[[Passed], Awaitable[int]]
) -> None:
    at = await passed(store, engine, sql)
    behind = await way(at)
    store._core.marks("q").next_walk = 0
    assert [job.id for job in await at.queue.claim("w")] == [behind]


async def test_the_bound_is_a_second_or_twenty_times_the_cost_of_a_claim_from_the_head(store: Store, sql: Sql) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(3))
    begun = time.monotonic()
    await queue.claim("w")
    ended = time.monotonic()
    assert begun + 1 <= store._core.marks("q").next_walk <= ended + max(1, 20 * (ended - begun))


async def test_what_this_process_puts_behind_is_found_at_once(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    at = await passed(store, engine, sql)
    urgent = await at.queue.enqueue("urgent", priority=9)
    (job,) = await at.queue.claim("w")
    assert job.id == urgent
    await job.release()
    assert [again.id for again in await at.queue.claim("w")] == [urgent]


async def test_claims_one_by_one_find_all_that_came_behind_them(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    at = await passed(store, engine, sql)
    await at.first.release()
    for priority in ("3", "0", "-3"):
        insert_job(sql, "q", priority=priority, run_at="statement_timestamp() - interval '1 hour'")
    found = []
    while jobs := await at.queue.claim("w"):
        found += [job.id for job in jobs]
    assert len(found) == len(set(found)) == 8


# -- everything at once ------------------------------------------------------------------------------------------------


class Stress:
    """Workers, producers, a canceller and a sweeper on one queue, and what became of each job."""

    def __init__(self, store: Store, sql: Sql, *, lapsing: bool) -> None:
        self.store, self.sql, self.lapsing = store, sql, lapsing
        self.queue = store.queue("q", max_attempts=3)
        self.random = random.Random(20240229)
        self.enqueued: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.held: set[int] = set()
        self.handed_out_twice: set[int] = set()
        self.deadline = 0.0

    async def run(self, seconds: float) -> None:
        self.deadline = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(
            *(self.work(number) for number in range(5)), self.produce(), self.cancel(), self.sweep(), self.let_lapse()
        )

    def going(self) -> bool:
        return asyncio.get_running_loop().time() < self.deadline

    async def produce(self) -> None:
        while self.going():
            options: dict[str, Any] = {"priority": self.random.randint(-1, 1)}
            if self.random.random() < 0.2:
                options["expires"] = 0.02
            self.enqueued.update(await self.queue.enqueue_many(range(self.random.randint(1, 12)), **options))
            async with self.store.begin() as session:
                job = self.queue.enqueue_tx(session, "tx", priority=self.random.randint(-1, 1))
            self.enqueued.add(job.id)

    async def cancel(self) -> None:
        while self.going():
            job_id = self.random.choice(sorted(self.enqueued)[-20:] or [0])
            if await self.queue.cancel(job_id):
                self.ended[job_id] += 1

    async def sweep(self) -> None:
        while self.going():
            await self.queue.sweep_expired()

    async def let_lapse(self) -> None:
        while self.lapsing and self.going():
            self.sql.execute(
                "UPDATE alkstore.job SET lease_expires_at = statement_timestamp() WHERE id IN"
                " (SELECT id FROM alkstore.job WHERE state = 'processing' LIMIT 2 FOR UPDATE SKIP LOCKED)"
            )
            await asyncio.sleep(0.01)

    async def work(self, number: int) -> None:
        while self.going():
            n = self.random.randint(1, 8)
            jobs = await self.queue.claim(f"w{number}", n)
            assert len(jobs) <= n
            ids = {job.id for job in jobs}
            self.handed_out_twice |= ids & self.held
            self.held |= ids
            for job in jobs:
                end = self.random.choice([self.ack, self.ack_tx, self.retry, self.fail, self.release, self.heartbeat])
                try:
                    await end(job)
                except LeaseLost:
                    assert self.lapsing
                    self.held.discard(job.id)

    async def ack(self, job: JobHandle[Any]) -> None:
        self.held.discard(job.id)
        await job.ack()
        self.ended[job.id] += 1

    async def ack_tx(self, job: JobHandle[Any]) -> None:
        async with self.store.begin() as session:
            await job.ack_tx(session)
            self.held.discard(job.id)
        self.ended[job.id] += 1

    async def retry(self, job: JobHandle[Any]) -> None:
        self.held.discard(job.id)
        await job.retry("again", delay=0)

    async def fail(self, job: JobHandle[Any]) -> None:
        self.held.discard(job.id)
        await job.fail("no")

    async def release(self, job: JobHandle[Any]) -> None:
        self.held.discard(job.id)
        await job.release()

    async def heartbeat(self, job: JobHandle[Any]) -> None:
        await job.heartbeat()
        await self.ack(job)

    def ids_in(self, table: str) -> set[int]:
        return {int(str(row[0])) for row in self.sql.execute(f"SELECT id FROM alkstore.{table}").fetchall()}


@pytest.mark.parametrize("lapsing", [False, True], ids=["leases hold", "leases lapse"])
async def test_under_random_load_each_job_ends_exactly_once_or_is_still_there(
    store: Store, sql: Sql, lapsing: bool
) -> None:
    stress = Stress(store, sql, lapsing=lapsing)
    await stress.run(2)
    alive, dead = stress.ids_in("job"), stress.ids_in("dead")
    ended = {job_id for job_id, times in stress.ended.items() if times}
    assert {job_id for job_id, times in stress.ended.items() if times > 1} == set()
    assert alive | dead | ended == stress.enqueued
    assert len(alive) + len(dead) + len(ended) == len(stress.enqueued)
    assert min(len(dead), len(ended)) > 0
    if not lapsing:
        assert stress.handed_out_twice == set()
    sql.execute("UPDATE alkstore.job SET lease_expires_at = statement_timestamp() WHERE state = 'processing'")
    while jobs := await stress.queue.claim("last", 100):
        assert await stress.queue.ack_many(jobs) == []
    await stress.queue.sweep_expired()
    assert count(sql) == 0
