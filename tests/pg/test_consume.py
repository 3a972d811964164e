from __future__ import annotations

import asyncio
import contextlib
import gc
import queue as queues
import sys
import threading
from contextlib import aclosing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from sqlalchemy import NullPool, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only
from support.loops import (
    A_CLAIM,
    A_LOOK_AHEAD,
    NEVER,
    WAYS,
    Producers,
    consuming,
    is_listening,
    statements,
    until_asleep,
)
from support.plain_sql import insert_job, number
from support.processes import running
from support.rows import count, job_row, lapse, make_due
from support.waiting import DEADLINE, until

from alkstore_sa import InvalidName, ReservedName, Store, SyncStore, _consume

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from sqlalchemy import Engine
    from support.databases import Database
    from support.loops import Naps
    from support.rows import Sql

    from alkstore_sa import JobHandle, Queue

UNDECODABLE: Final = "'1e5000'"


@pytest.fixture
def queue(store: Store) -> Queue[Any]:
    return store.queue("q")


# -- Wakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_an_idle_consumer_starts_a_job_that_is_enqueued(
    store: Store,
    queue: Queue[Any],
    other: Store,
    other_engine: AsyncEngine,
    sync_store: SyncStore,
    sync_engine: Engine,
    naps: Naps,
    way: str,
) -> None:
    producers = Producers(store, other, other_engine, sync_store, sync_engine, lambda store: store.queue("q"))
    async with consuming(queue) as seen:
        await until_asleep(naps, (store, queue))
        await producers.enqueue(way)
        await until(lambda: seen == ["late"])


ANOTHER_PROCESS: Final = """
import sys
import psycopg
from sqlalchemy import create_engine
from alkstore_sa import SyncStore
_, url, dsn, how = sys.argv
store = SyncStore(create_engine(url))
queue = store.queue("q", backoff_base=0.2)
if how != "enqueue":
    job, = queue.claim("elsewhere")
print("ready", flush=True)
with psycopg.connect(dsn) as signal:
    signal.execute("SELECT pg_advisory_lock(1)")
if how == "enqueue":
    queue.enqueue("x")
elif how == "retry at once":
    job.retry("again", delay=0)
elif how == "retry after the curve":
    job.retry("again")
elif how == "retry after a delay":
    job.retry("again", delay=0.2)
else:
    job.release()
store.close()
print("done", flush=True)
"""
"""Does one thing to the queue when it gets an advisory lock that the test holds."""


@pytest.mark.parametrize(
    ("how", "attempts"),
    [
        ("enqueue", 1),
        ("retry at once", 2),
        ("retry after the curve", 2),
        ("retry after a delay", 2),
        ("release", 1),
    ],
)
async def test_an_idle_consumer_starts_a_job_that_another_process_makes_claimable(
    store: Store, queue: Queue[Any], database: Database, sql: Sql, naps: Naps, how: str, attempts: int
) -> None:
    sql.execute("SELECT pg_advisory_lock(1)")
    if how != "enqueue":
        await store.queue("q", backoff_base=0.2).enqueue("x")
    had: list[int] = []

    async def body(job: JobHandle[Any]) -> None:
        had.append(job.attempts)
        await job.ack()

    with running(ANOTHER_PROCESS, database.url("psycopg"), database.dsn, how) as program:
        assert await asyncio.to_thread(program.line) == "ready"
        async with consuming(queue, body):
            await until_asleep(naps, (store, queue))
            sql.execute("SELECT pg_advisory_unlock(1)")
            await until(lambda: had == [attempts])


async def test_a_job_of_another_queue_wakes_nobody(
    store: Store, queue: Queue[Any], engine: AsyncEngine, other: Store, sql: Sql, naps: Naps
) -> None:
    async with consuming(queue), store.listen("end") as notifications:
        await until_asleep(naps, (store, queue))
        sent = statements(engine.sync_engine)
        for _ in range(20):
            await other.queue("another").enqueue("x")
        await other.close()
        sql.execute('NOTIFY "end"')
        await asyncio.wait_for(anext(notifications), DEADLINE)  # so what was sent before it has arrived too
        assert naps.asleep() == 1
        assert sent == []


# -- Due times ---------------------------------------------------------------------------------------------------------


async def test_a_delayed_job_is_taken_at_its_time_without_a_poll(store: Store, queue: Queue[Any], naps: Naps) -> None:
    await queue.enqueue("later", delay=0.5)
    async with consuming(queue) as seen:
        await until_asleep(naps, (store, queue))
        assert seen == []
        await until(lambda: seen == ["later"])


async def test_a_delayed_job_is_taken_at_its_time_when_it_is_enqueued_during_the_sleep_for_a_later_one(
    store: Store, queue: Queue[Any], other: Store, naps: Naps
) -> None:
    await queue.enqueue("much later", delay=1800)
    async with consuming(queue) as seen:
        await until_asleep(naps, (store, queue))
        await other.queue("q").enqueue("later", delay=0.3)
        await until(lambda: seen == ["later"])
        await until(naps.asleep)
    assert naps.lengths[-1] == pytest.approx(1800, abs=30)


async def test_a_lapsed_lease_of_another_worker_is_taken_at_its_time(
    store: Store, queue: Queue[Any], other: Store, naps: Naps
) -> None:
    await queue.enqueue("left", visibility_timeout=0.7)
    await other.queue("q").claim("gone")
    async with consuming(queue) as seen:
        await until_asleep(naps, (store, queue))
        assert seen == []
        await until(lambda: seen == ["left"])


async def test_a_job_that_the_body_did_not_end_comes_back_when_its_lease_lapses(queue: Queue[Any]) -> None:
    await queue.enqueue("forgotten", visibility_timeout=0.4, max_attempts=2)

    async def forget_once(job: JobHandle[Any]) -> None:
        if job.attempts == 2:
            await job.ack()

    async with consuming(queue, forget_once) as seen:
        await until(lambda: seen == ["forgotten", "forgotten"])


@pytest.fixture
async def polling(engine: AsyncEngine) -> AsyncIterator[Store]:
    """A store that does not listen, so that nothing wakes its loops but their own process."""
    async with Store(engine, wakes="poll") as store:
        yield store


@pytest.mark.parametrize("what", ["a run time", "a lease"])
async def test_what_falls_due_between_an_empty_claim_and_the_question_for_the_next_is_taken_at_once(
    polling: Store, engine: AsyncEngine, sql: Sql, naps: Naps, what: str
) -> None:
    queue = polling.queue("q")
    if what == "a lease":
        job_id = await queue.enqueue("x")
        await queue.claim("gone")
    else:
        job_id = await queue.enqueue("x", delay=1800)
    moved: list[int] = []

    def move(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
        if A_LOOK_AHEAD in statement and not moved:
            moved.append(job_id)
            (lapse if what == "a lease" else make_due)(sql, job_id)

    event.listen(engine.sync_engine, "before_cursor_execute", move)
    async with consuming(queue) as seen:
        await until(lambda: seen == ["x"])
    assert moved == [job_id]
    assert naps.lengths[0] == 0


# -- Polling -----------------------------------------------------------------------------------------------------------


async def test_a_job_inserted_with_plain_sql_is_found_by_the_poll(
    store: Store, queue: Queue[Any], sql: Sql, naps: Naps
) -> None:
    async with consuming(queue, poll=0.3) as seen:
        await until_asleep(naps, (store, queue))
        insert_job(sql, "q", payload="'\"plain\"'")
        await until(lambda: seen == ["plain"])


async def test_a_store_that_polls_finds_what_others_enqueue_without_a_listening_connection(
    polling: Store, other: Store, sql: Sql, naps: Naps
) -> None:
    async with consuming(polling.queue("q"), poll=0.1) as seen:
        await until(naps.asleep)
        await other.queue("q").enqueue("x")
        await until(lambda: seen == ["x"])
        assert sql.execute("SELECT FROM pg_stat_activity WHERE query ILIKE 'LISTEN%'").fetchall() == []


async def test_a_store_that_polls_is_woken_by_its_own_commits(polling: Store, naps: Naps) -> None:
    queue = polling.queue("q")
    async with consuming(queue) as seen:
        await until(naps.asleep)
        await queue.enqueue("own")
        async with polling.begin() as session:
            queue.enqueue_tx(session, "own tx")
        await until(lambda: seen == ["own", "own tx"])


async def test_a_consumer_on_a_connection_sees_and_hears_of_what_is_enqueued_in_its_transaction(
    engine: AsyncEngine, sql: Sql, naps: Naps
) -> None:
    async with engine.connect() as connection:
        transaction = await connection.begin()
        async with Store(connection) as store:
            queue = store.queue("q")
            await queue.enqueue("before")
            async with consuming(queue) as seen:
                await until(lambda: seen == ["before"] and naps.asleep())
                await queue.enqueue("during")
                await until(lambda: seen == ["before", "during"] and naps.asleep())
            kept = await queue.enqueue("left")
        assert job_row(sql, kept) is None
        await transaction.rollback()
    assert count(sql) == 0


# -- Cost --------------------------------------------------------------------------------------------------------------


async def test_wakes_that_arrive_during_a_long_body_fold_into_one(
    store: Store, queue: Queue[Any], engine: AsyncEngine, sync_store: SyncStore, sql: Sql, naps: Naps
) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(job: JobHandle[Any]) -> None:
        await gate.wait()
        await job.ack()

    def work_elsewhere() -> None:
        for payload in range(200):
            sync_store.queue("q").enqueue(payload)
            (job,) = sync_store.queue("q").claim("elsewhere")
            job.ack()
        sync_store.close()

    await queue.enqueue("long")
    async with consuming(queue, wait_for_gate) as seen, store.listen("end") as notifications:
        await until(lambda: seen == ["long"] and is_listening(store, queue))
        await asyncio.to_thread(work_elsewhere)
        sql.execute('NOTIFY "end"')
        await asyncio.wait_for(anext(notifications), DEADLINE)  # so all wakes have arrived
        claims = statements(engine.sync_engine, A_CLAIM)
        gate.set()
        await until(naps.asleep)
        assert seen == ["long"]
        assert len(claims) <= 4  # two looks, from the marks and from the head


async def test_what_is_due_is_never_slept_on(queue: Queue[Any], naps: Naps) -> None:
    await queue.enqueue_many(range(200))
    naps_before_the_last: list[float | None] = []

    async def body(job: JobHandle[Any]) -> None:
        if job.payload == 199:
            naps_before_the_last.extend(naps.lengths)
        await job.ack()

    async with consuming(queue, body) as seen:
        await until(lambda: len(seen) == 200)
    assert seen == list(range(200))
    assert naps_before_the_last == []


async def test_an_idle_consumer_sends_nothing(store: Store, queue: Queue[Any], engine: AsyncEngine, naps: Naps) -> None:
    await queue.enqueue("much later", delay=1800)
    async with consuming(queue):
        await until_asleep(naps, (store, queue))
        sent = statements(engine.sync_engine)
        await asyncio.sleep(1)  # the time that is measured
        assert sent == []


async def test_a_due_job_that_an_open_transaction_has_locked_is_looked_for_a_few_times_a_second_and_found_after_it(
    polling: Store, engine: AsyncEngine, database: Database, naps: Naps
) -> None:
    queue = polling.queue("q")
    await queue.enqueue("locked")
    claims = statements(engine.sync_engine, A_CLAIM)
    with psycopg.connect(database.dsn) as holder:
        holder.execute("SELECT FROM alkstore.job FOR UPDATE")
        async with consuming(queue) as seen:
            await until(naps.asleep)
            await asyncio.sleep(1)  # the time that is measured
            assert seen == []
            assert 3 <= len(claims) <= 15
            holder.rollback()
            await until(lambda: seen == ["locked"])


# -- Batches and the end of the iteration ------------------------------------------------------------------------------


async def test_a_batch_comes_in_the_order_of_priority_run_time_and_id(queue: Queue[Any], sql: Sql) -> None:
    ids = {
        name: insert_job(
            sql, "q", payload=f"'\"{name}\"'", priority=priority, run_at=f"statement_timestamp() - interval '{age}'"
        )
        for name, priority, age in [
            ("5th", "0", "1 min"),
            ("2nd", "7", "2 min"),
            ("6th", "-3", "1 day"),
            ("4th", "0", "1 hour"),
            ("1st", "7", "1 hour"),
        ]
    }
    sql.execute("UPDATE alkstore.job SET run_at = (SELECT run_at FROM alkstore.job WHERE id = %s) WHERE id = %s",
                [ids["2nd"], insert_job(sql, "q", payload="'\"3rd\"'", priority="7")])  # fmt: skip
    async with consuming(queue, batch=10) as seen:
        await until(lambda: len(seen) == 6)
    assert seen == ["1st", "2nd", "3rd", "4th", "5th", "6th"]


async def by_aclose(queue: Queue[Any], store: Store) -> JobHandle[Any]:
    jobs = queue.consume("w", batch=3, poll=NEVER)
    first = await anext(jobs)
    await jobs.aclose()
    return first


async def by_break_in_aclosing(queue: Queue[Any], store: Store) -> JobHandle[Any]:
    async with aclosing(queue.consume("w", batch=3, poll=NEVER)) as jobs:
        async for job in jobs:
            return job
    raise AssertionError


async def by_an_exception_of_the_body(queue: Queue[Any], store: Store) -> JobHandle[Any]:
    held: list[JobHandle[Any]] = []

    async def consume() -> None:
        async with aclosing(queue.consume("w", batch=3, poll=NEVER)) as jobs:
            async for job in jobs:
                held.append(job)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()
    return held[0]


async def by_closing_the_store(queue: Queue[Any], store: Store) -> JobHandle[Any]:
    held: list[JobHandle[Any]] = []
    async for job in queue.consume("w", batch=3, poll=NEVER):
        held.append(job)
        await store.close()
    (first,) = held
    return first


async def by_cancelling_the_task(queue: Queue[Any], store: Store) -> JobHandle[Any]:
    held: list[JobHandle[Any]] = []

    async def consume() -> None:
        async with aclosing(queue.consume("w", batch=3, poll=NEVER)) as jobs:
            async for job in jobs:
                held.append(job)
                await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await until(lambda: held)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return held[0]


@pytest.mark.parametrize(
    "end",
    [by_aclose, by_break_in_aclosing, by_an_exception_of_the_body, by_closing_the_store, by_cancelling_the_task],
)
async def test_the_end_of_the_iteration_gives_back_what_was_not_handed_out(
    store: Store,
    queue: Queue[Any],
    other: Store,
    sql: Sql,
    end: Callable[[Queue[Any], Store], Awaitable[JobHandle[Any]]],
) -> None:
    ids = await queue.enqueue_many(["first", "second", "third"], max_attempts=1)
    first = await end(queue, store)
    rows = [job_row(sql, job_id) for job_id in ids]
    assert [row and (row["state"], row["attempts"]) for row in rows] == [
        ("processing", 1),
        ("pending", 0),
        ("pending", 0),
    ]
    assert [job.payload for job in await other.queue("q").claim("successor", 3)] == ["second", "third"]
    await first.ack()  # it is still its body's
    assert job_row(sql, ids[0]) is None


async def test_a_consumer_that_is_left_with_a_plain_break_gives_back_too(queue: Queue[Any], sql: Sql) -> None:
    await queue.enqueue_many(range(3), max_attempts=1)
    async for _job in queue.consume("w", batch=3, poll=NEVER):
        break
    await until(
        lambda: (
            sql.execute("SELECT state, attempts FROM alkstore.job ORDER BY id").fetchall()
            == [("processing", 1), ("pending", 0), ("pending", 0)]
        )
    )


async def test_what_is_given_back_wakes_another_consumer(
    store: Store, queue: Queue[Any], other: Store, naps: Naps
) -> None:
    await queue.enqueue_many(range(3))
    jobs = queue.consume("w", batch=3, poll=NEVER)
    first = await anext(jobs)
    async with consuming(other.queue("q")) as seen:
        await until_asleep(naps, (other, other.queue("q")))
        await jobs.aclose()
        await until(lambda: seen == [1, 2])
    await first.ack()


@contextmanager
def locked_jobs(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Have every statement on the table of the jobs wait until the connection is rolled back."""
    with psycopg.connect(database.dsn) as holder:
        holder.execute("LOCK TABLE alkstore.job IN ACCESS EXCLUSIVE MODE")
        yield holder


def is_waiting_for_a_lock(sql: Sql) -> bool:
    return bool(sql.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())


async def take_one(queue: Queue[Any]) -> JobHandle[Any]:
    async with aclosing(queue.consume("w", poll=NEVER)) as jobs:
        return await anext(jobs)


async def test_a_cancellation_during_the_claim_costs_no_job_its_attempt(
    queue: Queue[Any], database: Database, sql: Sql
) -> None:
    job_id = await queue.enqueue("x", max_attempts=1)
    with locked_jobs(database) as holder:
        task = asyncio.create_task(take_one(queue))
        await until(lambda: is_waiting_for_a_lock(sql))
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
        assert not task.done()  # it waits to learn what it has claimed
        holder.rollback()
        with pytest.raises(asyncio.CancelledError):
            await task
    row = job_row(sql, job_id)
    assert row is not None
    assert (row["state"], row["attempts"]) == ("pending", 0)
    (job,) = await queue.claim("successor")
    assert job.id == job_id


async def test_a_cancellation_during_a_claim_that_does_not_end_is_bounded_and_costs_no_job_its_attempt(
    queue: Queue[Any], database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consume, "GIVE_BACK_TIME", 0.2)
    job_id = await queue.enqueue("x", max_attempts=1)
    with locked_jobs(database) as holder:
        task = asyncio.create_task(take_one(queue))
        await until(lambda: is_waiting_for_a_lock(sql))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        await until(lambda: not is_waiting_for_a_lock(sql))  # the server was told too
        holder.rollback()
    row = job_row(sql, job_id)
    assert row is not None
    assert (row["state"], row["attempts"]) == ("pending", 0)


@pytest.mark.parametrize("how", ["of the consumer", "of everything, as at the end of asyncio.run"])
async def test_a_cancellation_between_the_servers_claim_and_its_answer_costs_no_job_its_attempt(
    queue: Queue[Any], engine: AsyncEngine, sql: Sql, how: str
) -> None:
    job_id = await queue.enqueue("x", max_attempts=1)
    others = asyncio.all_tasks()
    claimed, answered = asyncio.Event(), asyncio.Event()

    def hold_the_answer(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
        if A_CLAIM in statement:
            claimed.set()
            await_only(answered.wait())

    event.listen(engine.sync_engine, "after_cursor_execute", hold_the_answer)
    task = asyncio.create_task(take_one(queue))
    await asyncio.wait_for(claimed.wait(), DEADLINE)
    for cancelled in {task} if how == "of the consumer" else asyncio.all_tasks() - others:
        cancelled.cancel()
    await asyncio.wait({task}, timeout=0.05)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    row = job_row(sql, job_id)
    assert row is not None
    assert (row["state"], row["attempts"]) == ("pending", 0)


@pytest.mark.parametrize("when", ["asleep", "before it began"])
async def test_closing_the_store_ends_a_consumer(store: Store, queue: Queue[Any], naps: Naps, when: str) -> None:
    async def consume() -> list[Any]:
        return [job async for job in queue.consume("w", poll=NEVER)]

    if when == "asleep":
        task = asyncio.create_task(consume())
        await until_asleep(naps, (store, queue))
        await store.close()
    else:
        await store.close()
        task = asyncio.create_task(consume())
    assert await asyncio.wait_for(task, DEADLINE) == []


# -- Payloads that do not decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 10])
async def test_a_payload_that_does_not_decode_goes_to_dead_and_the_others_are_handed_out(
    queue: Queue[Any], sql: Sql, batch: int
) -> None:
    await queue.enqueue("before")
    bad = insert_job(sql, "q", payload=UNDECODABLE)
    await queue.enqueue("after")
    async with consuming(queue, batch=batch) as seen:
        await until(lambda: len(seen) == 2)
    assert seen == ["before", "after"]
    dead = sql.execute("SELECT id, reason, last_error IS NOT NULL FROM alkstore.dead").fetchall()
    assert dead == [(bad, "undecodable", True)]


@pytest.mark.parametrize("batch", [1, 3])
async def test_a_batch_of_nothing_but_undecodable_payloads_neither_ends_nor_stalls_the_loop(
    store: Store, queue: Queue[Any], sql: Sql, naps: Naps, batch: int
) -> None:
    for _ in range(7):
        insert_job(sql, "q", payload=UNDECODABLE)
    async with consuming(queue, batch=batch) as seen:
        await until(lambda: count(sql, "dead") == 7)
        await until_asleep(naps, (store, queue))
        await queue.enqueue("good")
        await until(lambda: seen == ["good"])


# -- Many jobs and many consumers --------------------------------------------------------------------------------------


async def test_400_jobs_each_committed_while_the_one_before_starts_are_all_handled(
    queue: Queue[Any], sync_store: SyncStore
) -> None:
    started: queues.SimpleQueue[int | None] = queues.SimpleQueue()

    def produce() -> None:
        sync_store.queue("q").enqueue(1)
        while (payload := started.get()) is not None:
            sync_store.queue("q").enqueue(payload + 1)

    async def body(job: JobHandle[Any]) -> None:
        if job.payload < 400:
            started.put(job.payload)
        await job.ack()

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        async with consuming(queue, body) as seen:
            await until(lambda: len(seen) == 400)
    finally:
        started.put(None)
        await asyncio.to_thread(producer.join)
    assert seen == list(range(1, 401))


async def test_two_consumers_of_two_stores_get_each_job_once(
    store: Store, queue: Queue[Any], other: Store, naps: Naps
) -> None:
    async with consuming(queue, worker="a", batch=3) as first, consuming(other.queue("q"), worker="b") as second:
        await until_asleep(naps, (store, queue), (other, other.queue("q")))
        for start in range(0, 200, 10):
            await queue.enqueue_many(range(start, start + 10))
        await until(lambda: len(first) + len(second) >= 200 and naps.asleep() == 2)
    assert sorted(first + second) == list(range(200))


CONSUMER: Final = """
import asyncio, sys
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from alkstore_sa import Store
_, url, worker = sys.argv
async def main():
    engine = create_async_engine(url)
    store = Store(engine)
    print("ready", flush=True)
    async for job in store.queue("q").consume(worker, batch=2, poll=3600):
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO seen VALUES (:n, :w)"), {"n": job.payload, "w": worker})
        await job.ack()
asyncio.run(main())
"""


async def test_two_consumers_of_two_processes_get_each_job_once(
    queue: Queue[Any], database: Database, driver: str, sql: Sql
) -> None:
    sql.execute("CREATE TABLE seen (number integer, worker text)")
    url = database.url(driver)
    with running(CONSUMER, url, "a") as first, running(CONSUMER, url, "b") as second:
        for program in (first, second):
            assert await asyncio.to_thread(program.line) == "ready"
        for payload in range(100):
            await queue.enqueue(payload)
        await until(lambda: count(sql) == 0)
    handled = sql.execute("SELECT number FROM seen ORDER BY number").fetchall()
    assert handled == [(payload,) for payload in range(100)]


async def test_a_job_tells_who_has_claimed_it(queue: Queue[Any], sql: Sql) -> None:
    job_id = await queue.enqueue("x")
    workers: list[Any] = []

    async def body(job: JobHandle[Any]) -> None:
        row = job_row(sql, job_id)
        workers.append(row and row["worker_id"])
        await job.ack()

    async with consuming(queue, body, worker='web-1: "ü" %s'):
        await until(lambda: workers == ['web-1: "ü" %s'])


# -- Arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "options", "error"),
    [
        ("", {}, InvalidName),
        ("x" * 201, {}, InvalidName),
        ("a\0b", {}, InvalidName),
        (7, {}, InvalidName),
        (None, {}, InvalidName),
        ("__alkstore_w", {}, ReservedName),
        ("w", {"batch": 0}, ValueError),
        ("w", {"batch": -1}, ValueError),
        ("w", {"batch": 1.5}, ValueError),
        ("w", {"batch": "1"}, ValueError),
        ("w", {"poll": 0}, ValueError),
        ("w", {"poll": -1}, ValueError),
        ("w", {"poll": timedelta(0)}, ValueError),
        ("w", {"poll": float("nan")}, ValueError),
        ("w", {"poll": float("inf")}, ValueError),
        ("w", {"poll": "1"}, ValueError),
        ("w", {"poll": None}, ValueError),
    ],
)
async def test_a_bad_argument_is_refused_at_the_call(
    queue: Queue[Any], engine: AsyncEngine, worker: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    sent = statements(engine.sync_engine)
    others = asyncio.all_tasks()
    with pytest.raises(error):
        queue.consume(worker, **options)
    assert sent == []
    assert asyncio.all_tasks() == others


async def test_making_the_iterator_does_nothing_yet(queue: Queue[Any], engine: AsyncEngine) -> None:
    sent = statements(engine.sync_engine)
    others = asyncio.all_tasks()
    jobs = queue.consume("w")
    await jobs.aclose()
    assert sent == []
    assert asyncio.all_tasks() == others


# -- Event loops -------------------------------------------------------------------------------------------------------


def connections(sql: Sql) -> int:
    """Return how many other connections there are to the test's database."""
    return number(
        sql, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def test_nothing_is_left_behind_after_the_store_is_closed(
    database: Database, driver: str, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = create_async_engine(database.url(driver))
        seen: list[Any] = []
        async with Store(engine) as store:
            queue = store.queue("q")

            async def consume() -> None:
                async for job in queue.consume("w", batch=2, poll=NEVER):
                    seen.append(job.payload)
                    await job.ack()

            task = asyncio.create_task(consume())
            await queue.enqueue_many(range(5))
            await until(lambda: len(seen) == 5 and is_listening(store, queue))
        await asyncio.wait_for(task, DEADLINE)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await engine.dispose()
        await until(lambda: connections(sql) == 0)  # a backend takes a moment to end

    with caplog.at_level("ERROR", "asyncio"):
        asyncio.run(main(), debug=True)
    assert caplog.records == []


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Have nothing closed by chance."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_closing_the_store_while_the_listening_connection_is_being_opened_closes_that_too(
    engine: AsyncEngine, driver: str, naps: Naps
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        ended.set()
        writer.close()

    silent = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    there = create_async_engine(f"postgresql+{driver}://u@127.0.0.1:{port}/d")
    store = Store(engine, listen_engine=there)
    async with silent, store, consuming(store.queue("q")):
        await until(lambda: begun.is_set() and naps.asleep())
        with without_garbage_collection():
            await store.close()
            if sys.version_info < (3, 11):
                gc.collect()  # a cancelled task of Python 3.10 keeps its frames, and with them the socket
            await until(ended.is_set)


def test_a_store_can_be_used_in_a_second_event_loop_after_the_first_was_closed(
    database: Database, driver: str, sync_store: SyncStore, naps: Naps
) -> None:
    async def main(store: Store) -> Any:
        queue = store.queue("q")

        async def enqueue_late() -> None:
            await until_asleep(naps, (store, queue))
            await asyncio.to_thread(sync_store.queue("q").enqueue, "late")

        late = asyncio.create_task(enqueue_late())
        job = await asyncio.wait_for(take_one(queue), DEADLINE)
        await late
        await job.ack()
        return job.payload

    store = Store(create_async_engine(database.url(driver), poolclass=NullPool))
    assert [asyncio.run(main(store)) for _ in range(3)] == ["late"] * 3
    asyncio.run(store.close())


async def test_a_store_cannot_be_used_by_two_running_event_loops_and_says_so(
    database: Database, driver: str, sync_store: SyncStore, naps: Naps
) -> None:
    async with Store(create_async_engine(database.url(driver), poolclass=NullPool)) as store:
        queue = store.queue("q")
        async with consuming(queue) as seen:
            await until_asleep(naps, (store, queue))
            with pytest.raises(RuntimeError, match="another event loop: make a store, and an engine, for each"):
                await asyncio.to_thread(lambda: asyncio.run(take_one(queue)))
            await asyncio.to_thread(sync_store.queue("q").enqueue, "first loop")
            await until(lambda: seen == ["first loop"])
