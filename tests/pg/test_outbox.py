from __future__ import annotations

import asyncio
import contextvars
import threading
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.deliveries import IN_A_THREAD, ON_THE_LOOP, Log, fail, nothing, of_kind
from support.rows import job_row, lapse, make_due
from support.waiting import DEADLINE, until

from alkstore_sa import InvalidName, LeaseLost, PayloadError, ReservedName

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.rows import Sql

    from alkstore_sa import JobHandle, Outbox, Store, SyncJobHandle, SyncStore

BACKING = "__alkstore_outbox:orders"


@pytest.fixture
def outbox(store: Store) -> Outbox:
    return store.outbox("orders")


def row_of(sql: Sql, job_id: int, table: str = "job") -> dict[str, Any]:
    row = job_row(sql, job_id, table=table)
    assert row is not None
    return row


# -- storing -----------------------------------------------------------------------------------------------------------


async def test_a_message_is_stamped_with_the_engines_options(outbox: Outbox, sql: Sql) -> None:
    row = row_of(sql, await outbox.enqueue({"n": 1}))
    assert (row["queue"], row["payload"]) == (BACKING, {"n": 1})
    assert row["visibility_timeout"] == timedelta(seconds=60)
    assert row["max_attempts"] == 5
    assert row["backoff_base"] == timedelta(seconds=5)


async def test_a_message_of_a_sessions_transaction_is_stamped_with_the_same(
    outbox: Outbox, engine: AsyncEngine, sql: Sql
) -> None:
    async with AsyncSession(engine) as session:
        job = outbox.enqueue_tx(session, 1)
        await session.commit()
    row = row_of(sql, job.id)
    assert (row["visibility_timeout"], row["max_attempts"]) == (timedelta(seconds=60), 5)
    assert (row["queue"], row["backoff_base"]) == (BACKING, timedelta(seconds=5))


async def test_a_message_may_have_options_of_its_own(outbox: Outbox, sql: Sql) -> None:
    run_at = datetime(2030, 1, 1, tzinfo=timezone.utc)
    job_id = await outbox.enqueue(1, max_attempts=2, priority=3, run_at=run_at, headers={"trace": "x"}, backoff_base=7)
    row = row_of(sql, job_id)
    assert (row["max_attempts"], row["priority"], row["run_at"]) == (2, 3, run_at)
    assert (row["headers"], row["backoff_base"]) == ({"trace": "x"}, timedelta(seconds=7))


async def test_messages_are_stored_all_or_none_and_their_ids_are_in_order(outbox: Outbox, sql: Sql) -> None:
    ids = await outbox.enqueue_many([1, 2, 3])
    assert [row_of(sql, job_id)["payload"] for job_id in ids] == [1, 2, 3]
    with pytest.raises(PayloadError):
        await outbox.enqueue_many([4, "\0"])
    assert sql.execute("SELECT count(*) FROM alkstore.job").fetchone() == (3,)


async def test_a_message_commits_with_the_callers_transaction(outbox: Outbox, engine: AsyncEngine, sql: Sql) -> None:
    async with AsyncSession(engine) as session:
        jobs = outbox.enqueue_many_tx(session, [1, 2])
        await session.flush()
        assert not await outbox.run_once("w", nothing)
        await session.commit()
    assert [row_of(sql, job.id)["payload"] for job in jobs] == [1, 2]


async def test_a_message_is_rolled_back_with_the_callers_transaction(outbox: Outbox, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        outbox.enqueue_tx(session, 1)
        await session.flush()
        await session.rollback()
    assert not await outbox.run_once("w", nothing)


async def test_the_backing_queue_cannot_be_opened_as_a_queue(store: Store, sync_store: SyncStore) -> None:
    with pytest.raises(ReservedName):
        store.queue(BACKING)
    with pytest.raises(ReservedName):
        sync_store.queue(BACKING)


@pytest.mark.parametrize("name", ["", "a" * 201, "a\0"])
async def test_a_bad_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidName):
        store.outbox(name)


async def test_an_outbox_cannot_be_named_like_the_engines_own(store: Store) -> None:
    with pytest.raises(ReservedName):
        store.outbox(BACKING)


@pytest.mark.parametrize("name", ["a:b", ":", "x" * 200, 'it\'s 100% "ok"', "Größe"])
async def test_an_outbox_of_any_name_delivers_its_own_messages_only(store: Store, name: str) -> None:
    outbox, other = store.outbox(name), store.outbox(name[:-1] + "y")
    assert outbox.name == name
    await outbox.enqueue("mine")
    await other.enqueue("another's")
    await store.queue(name).enqueue("a queue's")
    seen: list[Any] = []
    while await outbox.run_once("w", lambda job: seen.append(job.payload)):
        pass
    assert seen == ["mine"]


# -- delivering one ----------------------------------------------------------------------------------------------------


async def test_a_delivered_message_is_gone_and_run_once_says_true(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)
    assert await outbox.run_once("w", nothing) is True
    assert job_row(sql, job_id) is None
    assert job_row(sql, job_id, table="dead") is None


async def test_an_empty_outbox_says_false_and_calls_nothing(outbox: Outbox) -> None:
    assert await outbox.run_once("w", fail) is False


async def test_the_delivery_gets_the_job_under_its_worker(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue({"n": 1}, headers={"trace": "x"})
    seen: list[JobHandle[Any]] = []

    def deliver(job: JobHandle[Any]) -> None:
        seen.append(job)
        assert row_of(sql, job.id)["worker_id"] == "w"

    assert await outbox.run_once("w", deliver)
    (job,) = seen
    assert (job.id, job.payload, job.headers, job.attempts, job.max_attempts) == (
        job_id,
        {"n": 1},
        {"trace": "x"},
        1,
        5,
    )


@pytest.mark.parametrize("kind", IN_A_THREAD)
async def test_a_plain_delivery_runs_in_a_thread(outbox: Outbox, kind: str) -> None:
    log, delivery = of_kind(kind)
    await outbox.enqueue("hello")
    assert await outbox.run_once("w", delivery)
    assert log.entries == [("hello", False)]


@pytest.mark.parametrize("kind", ON_THE_LOOP)
async def test_whatever_a_delivery_returns_is_awaited_on_the_loop(outbox: Outbox, kind: str) -> None:
    log, delivery = of_kind(kind)
    await outbox.enqueue("hello")
    assert await outbox.run_once("w", delivery)
    assert log.entries == [("hello", True)]
    assert not await outbox.run_once("w", delivery)


@pytest.mark.parametrize("kind", [*IN_A_THREAD, *ON_THE_LOOP])
async def test_an_error_of_any_kind_of_delivery_is_a_retry_with_its_text(outbox: Outbox, sql: Sql, kind: str) -> None:
    log, delivery = of_kind(kind)
    log.error = RuntimeError("no route to host")
    job_id = await outbox.enqueue("hello")
    assert await outbox.run_once("w", delivery) is True
    row = row_of(sql, job_id)
    assert (row["state"], row["attempts"], row["last_error"]) == ("pending", 1, "RuntimeError: no route to host")


async def test_a_thread_that_delivers_does_not_hold_the_loop_up(outbox: Outbox) -> None:
    await outbox.enqueue(1)
    begun, go = threading.Event(), threading.Event()

    def deliver(_: object) -> None:
        begun.set()
        assert go.wait(DEADLINE)

    delivering = asyncio.create_task(outbox.run_once("w", deliver))
    await until(begun.is_set)
    go.set()
    assert await asyncio.wait_for(delivering, DEADLINE)
    assert not await outbox.run_once("w", nothing)


async def test_a_delivery_in_a_thread_sees_the_callers_context(outbox: Outbox) -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    request.set("r-1")
    seen: list[str] = []
    await outbox.enqueue(1)
    await outbox.run_once("w", lambda _: seen.append(request.get()))
    assert seen == ["r-1"]


async def test_a_retry_comes_after_the_curve(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)
    for ceiling in (5.0, 10.0, 20.0, 40.0):
        assert await outbox.run_once("w", fail)
        row = sql.execute(
            "SELECT extract(epoch FROM run_at - statement_timestamp())::float FROM alkstore.job WHERE id = %s", [job_id]
        ).fetchone()
        assert row is not None
        assert ceiling / 2 - 2 < float(str(row[0])) <= ceiling
        assert not await outbox.run_once("w", fail)
        make_due(sql, job_id)


async def test_the_last_attempt_moves_the_message_to_dead_with_the_errors_text(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1, max_attempts=2)
    assert await outbox.run_once("w", fail)
    make_due(sql, job_id)
    assert await outbox.run_once("w", fail) is True
    assert job_row(sql, job_id) is None
    dead = row_of(sql, job_id, "dead")
    assert (dead["reason"], dead["last_error"]) == ("exhausted", "RuntimeError: no route to host")
    assert dead["queue"] == BACKING


async def test_an_error_whose_text_cannot_be_stored_is_a_retry_all_the_same(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)

    def deliver(_: object) -> None:
        raise RuntimeError("\0 \ud800 " + "x" * 5_000_000)

    assert await outbox.run_once("w", deliver)
    assert row_of(sql, job_id)["last_error"].startswith("RuntimeError: \\x00 \\ud800 xxx")


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, asyncio.TimeoutError, OSError])
@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_an_error_that_means_something_to_asyncio_is_a_retry_too(
    outbox: Outbox, sql: Sql, kind: str, error: type[BaseException]
) -> None:
    job_id = await outbox.enqueue(1)

    def in_a_thread(_: object) -> None:
        raise error("odd")

    async def on_the_loop(_: object) -> None:
        raise error("odd")

    delivery = in_a_thread if kind == "thread" else on_the_loop
    assert await asyncio.wait_for(outbox.run_once("w", delivery), DEADLINE)
    row = row_of(sql, job_id)
    assert (row["state"], error.__name__ in row["last_error"]) == ("pending", True)


async def test_a_lease_that_another_has_taken_meanwhile_is_lost(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)
    seen: list[int] = []

    def fail_too(job: JobHandle[Any]) -> None:
        seen.append(job.attempts)
        fail(job)

    async def overtaken(job: JobHandle[Any]) -> None:
        lapse(sql, job.id)
        assert await outbox.run_once("other", fail_too)

    with pytest.raises(LeaseLost):
        await outbox.run_once("w", overtaken)
    assert seen == [2]
    assert row_of(sql, job_id)["last_error"] == "RuntimeError: no route to host"


async def test_a_delivery_that_is_late_but_not_overtaken_still_counts(outbox: Outbox, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)
    assert await outbox.run_once("w", lambda job: lapse(sql, job.id))
    assert job_row(sql, job_id) is None


async def test_there_is_no_heartbeat_but_the_delivery_can_make_one(outbox: Outbox, sql: Sql) -> None:
    await outbox.enqueue(1)
    leases: list[datetime] = []

    async def deliver(job: JobHandle[Any]) -> None:
        leases.append(row_of(sql, job.id)["lease_expires_at"])
        assert leases == [job.lease_expires_at]
        leases.append(await job.heartbeat(3600))
        assert row_of(sql, job.id)["lease_expires_at"] == leases[1]

    assert await outbox.run_once("w", deliver)
    assert timedelta(minutes=50) < leases[1] - leases[0] < timedelta(minutes=70)


@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_cancelling_leaves_the_message_to_its_lease(outbox: Outbox, sql: Sql, kind: str) -> None:
    job_id = await outbox.enqueue(1, max_attempts=1)
    begun, go = threading.Event(), threading.Event()

    def in_a_thread(_: object) -> None:
        begun.set()
        go.wait(DEADLINE)

    async def on_the_loop(_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    delivering = asyncio.create_task(outbox.run_once("w", in_a_thread if kind == "thread" else on_the_loop))
    await until(begun.is_set)
    delivering.cancel()
    await asyncio.wait([delivering])
    go.set()
    assert delivering.cancelled()
    row = row_of(sql, job_id)
    assert (row["state"], row["attempts"], row["last_error"]) == ("processing", 1, None)
    assert row["lease_expires_at"] is not None


async def test_each_delivery_is_acknowledged_before_the_next_message_is_claimed(outbox: Outbox, sql: Sql) -> None:
    ids = await outbox.enqueue_many([1, 2])
    assert await outbox.run_once("w", nothing)
    assert [job_row(sql, job_id) is None for job_id in ids] == [True, False]
    assert row_of(sql, ids[1])["state"] == "pending"


# -- the sync door -----------------------------------------------------------------------------------------------------


def test_a_sync_outbox_delivers_in_this_thread(sync_store: SyncStore, sync_engine: Engine, sql: Sql) -> None:
    outbox = sync_store.outbox("orders")
    with Session(sync_engine) as session:
        job = outbox.enqueue_tx(session, "hello")
        session.commit()
    log = Log()
    assert outbox.run_once("w", log.write) is True
    assert log.entries == [("hello", True)]
    assert job_row(sql, job.id) is None
    assert outbox.run_once("w", log.write) is False


@pytest.mark.parametrize("kind", ON_THE_LOOP)
def test_a_sync_outbox_awaits_what_a_delivery_returns(sync_store: SyncStore, kind: str) -> None:
    outbox = sync_store.outbox("orders")
    log, delivery = of_kind(kind)
    assert outbox.enqueue_many(["hello"])
    assert outbox.run_once("w", delivery)
    assert log.entries == [("hello", True)]


@pytest.mark.parametrize("kind", [*IN_A_THREAD, *ON_THE_LOOP])
def test_a_sync_outbox_retries_after_an_error(sync_store: SyncStore, sql: Sql, kind: str) -> None:
    outbox = sync_store.outbox("orders")
    job_id = outbox.enqueue(1, max_attempts=2)
    log, delivery = of_kind(kind)
    log.error = RuntimeError("no route to host")
    assert outbox.run_once("w", delivery) is True
    assert row_of(sql, job_id)["last_error"] == "RuntimeError: no route to host"
    make_due(sql, job_id)
    assert outbox.run_once("w", delivery) is True
    assert row_of(sql, job_id, "dead")["reason"] == "exhausted"


def test_a_sync_outbox_tells_of_a_lost_lease(sync_store: SyncStore, sql: Sql) -> None:
    outbox = sync_store.outbox("orders")
    outbox.enqueue(1)

    def overtaken(job: SyncJobHandle[Any]) -> None:
        lapse(sql, job.id)
        assert outbox.run_once("other", fail)

    with pytest.raises(LeaseLost):
        outbox.run_once("w", overtaken)


def test_a_sync_delivery_can_make_a_heartbeat(sync_store: SyncStore, sql: Sql) -> None:
    outbox = sync_store.outbox("orders")
    outbox.enqueue(1)
    assert outbox.run_once("w", lambda job: job.heartbeat(3600))
    assert not outbox.run_once("w", nothing)


async def test_an_option_that_is_none_is_one_that_was_not_given(store: Store, sql: Sql) -> None:
    message_id = await store.outbox("mail").enqueue(
        "x", max_attempts=None, backoff_base=None, priority=None, delay=None, run_at=None, expires=None, headers=None
    )
    row = job_row(sql, message_id)
    assert row is not None
    assert (row["max_attempts"], row["priority"], row["expires_at"]) == (5, 0, None)
