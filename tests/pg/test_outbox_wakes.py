from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event
from support.deliveries import Gate
from support.loops import A_CLAIM, A_LOOK_AHEAD, NEVER, WAYS, Producers, statements, until_asleep
from support.rows import count, expire, lapse, make_due
from support.waiting import DEADLINE, finish, until

from alkstore_sa import StopToken, Store, outbox as outboxes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.loops import Naps
    from support.rows import Sql

    from alkstore_sa import JobHandle, Outbox, SyncStore


@asynccontextmanager
async def running(outbox: Outbox, delivery: Callable[[JobHandle[Any]], Any], **options: Any) -> AsyncIterator[None]:
    """Run the outbox in a task for the time of the block, then stop it."""
    stop = StopToken()
    task = asyncio.create_task(outbox.run("w", delivery, stop, **{"poll": NEVER, **options}))
    try:
        yield
        stop.cancel()
        await finish(task)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("way", WAYS)
async def test_an_idle_loop_delivers_a_message_that_is_enqueued(
    store: Store,
    outbox: Outbox,
    other: Store,
    other_engine: AsyncEngine,
    sync_store: SyncStore,
    sync_engine: Engine,
    naps: Naps,
    way: str,
) -> None:
    producers = Producers(store, other, other_engine, sync_store, sync_engine, lambda store: store.outbox("orders"))
    seen: list[Any] = []
    async with running(outbox, lambda job: seen.append(job.payload)):
        await until_asleep(naps, (store, outbox))
        await producers.enqueue(way)
        await until(lambda: seen == ["late"])


async def test_a_failed_delivery_is_tried_again_at_its_time(outbox: Outbox) -> None:
    attempts: list[int] = []

    async def deliver(job: JobHandle[Any]) -> None:
        attempts.append(job.attempts)
        if job.attempts < 3:
            await job.retry("not yet", delay=0.2 if job.attempts == 1 else 0)

    async with running(outbox, deliver):
        await outbox.enqueue("x")
        await until(lambda: attempts == [1, 2, 3])


@pytest.mark.parametrize("when", ["before the loop begins", "while it sleeps for a later one"])
async def test_a_delayed_message_is_delivered_at_its_time(
    store: Store, outbox: Outbox, other: Store, naps: Naps, when: str
) -> None:
    seen: list[Any] = []
    if when == "before the loop begins":
        await outbox.enqueue("later", delay=0.5)
    else:
        await outbox.enqueue("much later", delay=1800)
    async with running(outbox, lambda job: seen.append(job.payload)):
        await until_asleep(naps, (store, outbox))
        assert seen == []
        if when != "before the loop begins":
            await other.outbox("orders").enqueue("later", delay=0.3)
        await until(lambda: seen == ["later"])


@pytest.mark.parametrize("what", ["a run time", "a lease"])
async def test_what_falls_due_between_an_empty_claim_and_the_question_for_the_next_is_delivered_at_once(
    engine: AsyncEngine, sql: Sql, what: str
) -> None:
    async with Store(engine, wakes="poll") as store:
        outbox = store.outbox("orders")
        job_id = await outbox.enqueue("x", delay=1800 if what == "a run time" else None)
        if what == "a lease":
            await outbox._queue.claim("gone")
        moved: list[int] = []
        seen: list[Any] = []

        def move(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
            if A_LOOK_AHEAD in statement and not moved:
                moved.append(job_id)
                (lapse if what == "a lease" else make_due)(sql, job_id)

        event.listen(engine.sync_engine, "before_cursor_execute", move)
        async with running(outbox, lambda job: seen.append(job.payload)):
            await until(lambda: seen == ["x"])
        assert moved == [job_id]


async def test_wakes_while_all_slots_are_taken_cost_no_claim_and_the_next_begins_when_one_is_free(
    store: Store, outbox: Outbox, engine: AsyncEngine, other: Store, sql: Sql, naps: Naps
) -> None:
    gates = {number: asyncio.Event() for number in range(2)}
    begun: list[Any] = []

    async def deliver(job: JobHandle[Any]) -> None:
        begun.append(job.payload)
        if job.payload in gates:
            await gates[job.payload].wait()

    await outbox.enqueue_many(gates)
    async with running(outbox, deliver, concurrency=2), store.listen("end") as notifications:
        try:
            await until(lambda: len(begun) == 2)
            await until_asleep(naps, (store, outbox))
            sent = statements(engine.sync_engine)
            for number in range(2, 32):
                await other.outbox("orders").enqueue(number)
            await other.close()
            sql.execute('NOTIFY "end"')
            await asyncio.wait_for(anext(notifications), DEADLINE)  # so what was sent before it has arrived too
            await until(lambda: not any(wakeup.woken for wakeup in naps.under_way))
            assert sent == []
            gates[0].set()
            await until(lambda: begun == list(range(32)))  # through the one slot that is free
            assert not gates[1].is_set()
        finally:
            for gate in gates.values():
                gate.set()


async def test_a_loop_with_free_slots_starts_what_comes_while_others_are_being_delivered(
    store: Store, outbox: Outbox, other: Store, naps: Naps
) -> None:
    gate = Gate()
    async with running(outbox, gate, concurrency=5):
        for number in range(5):
            await until_asleep(naps, (store, outbox))
            await other.outbox("orders").enqueue(number)
            await until(lambda: len(gate.begun) == number + 1)  # noqa: B023  (called at once)
        gate.open.set()
    assert sorted(gate.done) == list(range(5))


async def test_an_idle_loop_sends_nothing(store: Store, outbox: Outbox, engine: AsyncEngine, naps: Naps) -> None:
    await outbox.enqueue("much later", delay=1800)
    async with running(outbox, Gate()):
        await until_asleep(naps, (store, outbox))
        sent = statements(engine.sync_engine)
        await asyncio.sleep(1)  # the time that is measured
        assert sent == []


async def test_a_due_message_that_an_open_transaction_has_locked_is_looked_for_a_few_times_a_second(
    outbox: Outbox, engine: AsyncEngine, database: Database, naps: Naps
) -> None:
    seen: list[Any] = []
    await outbox.enqueue("locked")
    claims = statements(engine.sync_engine, A_CLAIM)
    with psycopg.connect(database.dsn) as holder:
        holder.execute("SELECT FROM alkstore.job FOR UPDATE")
        async with running(outbox, lambda job: seen.append(job.payload)):
            await until(lambda: naps.under_way)
            await asyncio.sleep(1)  # the time that is measured
            assert 3 <= len(claims) <= 15
            holder.rollback()
            await until(lambda: seen == ["locked"])


@pytest.mark.parametrize("how", ["the token", "closing the store"])
async def test_a_sleeping_loop_ends_at_once(
    store: Store, outbox: Outbox, stop: StopToken, naps: Naps, how: str
) -> None:
    task = asyncio.create_task(outbox.run("w", Gate(), stop, poll=NEVER))
    await until_asleep(naps, (store, outbox))
    if how == "the token":
        stop.cancel()
    else:
        await store.close()
    await finish(task)


@pytest.mark.parametrize("loop", ["idle", "with all slots taken"])
async def test_messages_that_must_not_run_any_more_are_moved_to_dead_however_long_the_poll_is(
    store: Store, outbox: Outbox, sql: Sql, monkeypatch: pytest.MonkeyPatch, naps: Naps, loop: str
) -> None:
    monkeypatch.setattr(outboxes, "SWEEP_INTERVAL", 0.3)
    gate = Gate()
    async with running(outbox, gate, concurrency=1):
        try:
            if loop == "with all slots taken":
                await outbox.enqueue("slow")
                await until(lambda: gate.begun)
            await until_asleep(naps, (store, outbox))
            expire(sql, await outbox.enqueue("stale", delay=1800, expires=3000))
            await until(lambda: count(sql, "dead") == 1)
        finally:
            gate.open.set()


async def test_two_loops_of_two_stores_deliver_each_message_once(
    store: Store, outbox: Outbox, other: Store, sync_store: SyncStore, naps: Naps
) -> None:
    seen: list[Any] = []

    def enqueue() -> None:
        for number in range(100):
            sync_store.outbox("orders").enqueue(number)

    async with (
        running(outbox, lambda job: seen.append(job.payload)),
        running(other.outbox("orders"), lambda job: seen.append(job.payload)),
    ):
        await asyncio.to_thread(enqueue)
        await until(lambda: len(seen) >= 100)
    assert sorted(seen) == list(range(100))
