from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.deliveries import Gate, fail, nothing
from support.rows import count as jobs, job_row, lapse
from support.waiting import DEADLINE, finish, until

if TYPE_CHECKING:
    from support.rows import Sql

    from alkstore_sa import JobHandle, Outbox, StopToken, Store


async def test_it_delivers_what_is_there_and_what_comes_later(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    seen: list[Any] = []
    await outbox.enqueue_many(range(25))
    running = asyncio.create_task(outbox.run("w", lambda job: seen.append(job.payload), stop))
    await until(lambda: len(seen) == 25)
    await outbox.enqueue(25)
    await until(lambda: len(seen) == 26)
    stop.cancel()
    await finish(running)
    assert sorted(seen) == list(range(26))
    assert jobs(sql) == 0


async def test_deliveries_overlap_up_to_the_concurrency(outbox: Outbox, stop: StopToken) -> None:
    await outbox.enqueue_many(range(9))
    gate = Gate()
    running = asyncio.create_task(outbox.run("w", gate, stop, concurrency=4))
    await until(lambda: len(gate.begun) == 4)
    stats = await outbox.stats()
    assert (stats.processing, stats.pending) == (4, 5)
    gate.open.set()
    await until(lambda: len(gate.done) == 9)
    stop.cancel()
    await finish(running)


async def test_plain_functions_overlap_too(outbox: Outbox, stop: StopToken) -> None:
    together = threading.Barrier(6)
    met: list[int] = []

    def deliver(_: object) -> None:
        met.append(together.wait(DEADLINE))

    await outbox.enqueue_many(range(6))
    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=6))
    await until(lambda: len(met) == 6)
    stop.cancel()
    await finish(running)
    assert sorted(met) == list(range(6))


async def test_with_a_concurrency_of_one_no_two_deliveries_overlap(outbox: Outbox, stop: StopToken) -> None:
    under_way, most, done = 0, 0, 0

    async def deliver(_: object) -> None:
        nonlocal under_way, most, done
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        done += 1

    await outbox.enqueue_many(range(20))
    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=1))
    await until(lambda: done == 20)
    stop.cancel()
    await finish(running)
    assert most == 1


async def test_each_delivery_is_acknowledged_at_once(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    gate = Gate()
    first, second = await outbox.enqueue_many(["quick", "slow"])

    async def deliver(job: JobHandle[Any]) -> None:
        if job.payload == "slow":
            await gate(job)

    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=2))
    await until(lambda: gate.begun and job_row(sql, first) is None)
    assert job_row(sql, second) is not None
    gate.open.set()
    stop.cancel()
    await finish(running)


async def test_a_free_slot_is_filled_while_another_delivery_is_slow(outbox: Outbox, stop: StopToken) -> None:
    gate = Gate()
    quick: list[Any] = []

    async def deliver(job: JobHandle[Any]) -> None:
        if job.payload == "slow":
            await gate(job)
        else:
            quick.append(job.payload)

    await outbox.enqueue_many(["slow", *range(10)])
    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=2))
    await until(lambda: len(quick) == 10)
    assert gate.done == []
    gate.open.set()
    stop.cancel()
    await finish(running)


@pytest.mark.parametrize("how", ["token", "close", "token from a thread"])
async def test_a_stop_waits_for_the_deliveries_under_way_and_claims_no_more(
    outbox: Outbox, store: Store, stop: StopToken, sql: Sql, how: str
) -> None:
    await outbox.enqueue_many(range(5))
    gate = Gate()
    running = asyncio.create_task(outbox.run("w", gate, stop, concurrency=2))
    await until(lambda: len(gate.begun) == 2)
    if how == "token":
        stop.cancel()
    elif how == "close":
        await store.close()
    else:
        await asyncio.to_thread(stop.cancel)
    await asyncio.sleep(0)
    assert not running.done()
    gate.open.set()
    await finish(running)
    assert len(gate.begun) == len(gate.done) == 2
    assert jobs(sql) == 3
    assert (await outbox.stats()).pending == 3


@pytest.mark.parametrize("how", ["token", "close", "token from a thread"])
async def test_a_stop_ends_an_idle_loop_at_once(
    outbox: Outbox, store: Store, stop: StopToken, sql: Sql, how: str
) -> None:
    job_id = await outbox.enqueue(1)
    running = asyncio.create_task(outbox.run("w", nothing, stop, poll=3600))
    await until(lambda: job_row(sql, job_id) is None)
    if how == "token":
        stop.cancel()
    elif how == "close":
        await store.close()
    else:
        await asyncio.to_thread(stop.cancel)
    await finish(running)


@pytest.mark.parametrize("how", ["token", "close"])
async def test_a_stop_that_came_before_lets_nothing_be_claimed(
    outbox: Outbox, store: Store, stop: StopToken, sql: Sql, how: str
) -> None:
    job_id = await outbox.enqueue(1)
    if how == "token":
        stop.cancel()
    else:
        await store.close()
    await asyncio.wait_for(outbox.run("w", fail, stop), DEADLINE)
    row = job_row(sql, job_id)
    assert row is not None
    assert (row["state"], row["attempts"]) == ("pending", 0)


async def test_one_token_stops_several_loops(store: Store, stop: StopToken) -> None:
    running = [asyncio.create_task(store.outbox(name).run("w", nothing, stop)) for name in "abc"]
    await asyncio.sleep(0)
    stop.cancel()
    await asyncio.wait_for(asyncio.gather(*running), DEADLINE)


async def test_cancelling_the_loop_cancels_the_deliveries_and_leaves_them_to_their_leases(
    outbox: Outbox, stop: StopToken
) -> None:
    await outbox.enqueue_many(range(3))
    gate = Gate()
    running = asyncio.create_task(outbox.run("w", gate, stop, concurrency=3))
    await until(lambda: len(gate.begun) == 3)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert sorted(gate.cancelled) == [0, 1, 2]
    assert (await outbox.stats()).processing == 3


async def test_it_moves_its_own_abandoned_last_attempts_to_dead(
    outbox: Outbox, store: Store, stop: StopToken, sql: Sql
) -> None:
    mine, another = await outbox.enqueue(1, max_attempts=1), await store.outbox("b").enqueue(1, max_attempts=1)
    for abandoned in (outbox, store.outbox("b")):
        gate = Gate()
        delivering = asyncio.create_task(abandoned.run_once("gone", gate))
        await until(functools.partial(len, gate.begun))
        delivering.cancel()
        await asyncio.wait([delivering])
    lapse(sql, mine, another)
    running = asyncio.create_task(outbox.run("w", fail, stop))
    await until(lambda: job_row(sql, mine, table="dead"))
    stop.cancel()
    await finish(running)
    dead = job_row(sql, mine, table="dead")
    assert dead is not None
    assert (dead["reason"], dead["attempts"]) == ("lapsed", 1)
    assert job_row(sql, another) is not None


async def test_it_sleeps_no_longer_than_to_the_soonest_due_time(outbox: Outbox, stop: StopToken) -> None:
    seen: list[float] = []
    await outbox.enqueue(1, delay=0.3)
    begun = time.monotonic()
    running = asyncio.create_task(outbox.run("w", lambda _: seen.append(time.monotonic()), stop, poll=3600))
    await until(lambda: seen)
    assert seen[0] - begun < DEADLINE / 2
    stop.cancel()
    await finish(running)


async def test_a_lapsed_lease_of_another_worker_is_taken_over(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    job_id = await outbox.enqueue(1)
    gate = Gate()
    abandoned = asyncio.create_task(outbox.run_once("gone", gate))
    await until(lambda: gate.begun)
    abandoned.cancel()
    await asyncio.wait([abandoned])
    lapse(sql, job_id)
    attempts: list[int] = []
    running = asyncio.create_task(outbox.run("w", lambda job: attempts.append(job.attempts), stop))
    await until(lambda: attempts)
    stop.cancel()
    await finish(running)
    assert attempts == [2]


async def test_many_loops_deliver_each_message_once(store: Store, stop: StopToken) -> None:
    seen: list[Any] = []
    await store.outbox("orders").enqueue_many(range(200))
    running = [
        asyncio.create_task(
            store.outbox("orders").run(f"w{n}", lambda job: seen.append(job.payload), stop, concurrency=3)
        )
        for n in range(3)
    ]
    await until(lambda: len(seen) >= 200)
    stop.cancel()
    await asyncio.wait_for(asyncio.gather(*running), DEADLINE)
    assert sorted(seen) == list(range(200))


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": -1}, {"poll": 0}, {"poll": -1}])
async def test_bad_options_are_refused(outbox: Outbox, stop: StopToken, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        await outbox.run("w", nothing, stop, **options)
