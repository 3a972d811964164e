"""Subscriptions: where they begin, when they wake, what they save, and who of several goes on."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.waiting import DEADLINE, finish, until

from alkstore_sa import InvalidName, LeaseLost, PayloadError, ReservedName, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.rows import Sql

    from alkstore_sa import ConsumedEvent, Stream, SyncStore

LONG = 3600
"""A re-poll or lease that plays no part in a test."""


@pytest.fixture
async def second_store(engine: AsyncEngine) -> AsyncIterator[Store]:
    """What another process has."""
    async with Store(engine) as store:
        yield store


class Body:
    """The body of a loop over a subscription. It can be made to wait at an event."""

    def __init__(self, stream: Stream[Any], consumer: str = "c", *, wait_at: int | None = None, **options: Any) -> None:
        self.begun: list[int] = []
        self.go_on = asyncio.Event()
        self._wait_at = wait_at
        self._subscription = stream.subscribe(consumer, **options)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with contextlib.aclosing(self._subscription) as events:
            async for event in events:
                self.begun.append(event.offset)
                if event.offset == self._wait_at:
                    await self.go_on.wait()

    async def cancel(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(self.task, DEADLINE)


@contextlib.asynccontextmanager
async def body(stream: Stream[Any], consumer: str = "c", **options: Any) -> AsyncIterator[Body]:
    """Run a loop over a subscription for the time of the block."""
    running = Body(stream, consumer, **options)
    try:
        yield running
    finally:
        await running.cancel()


def consumer_row(sql: Sql, consumer: str = "c") -> dict[str, Any]:
    """Return what is stored of a consumer."""
    with sql.cursor(row_factory=dict_row) as cursor:
        cursor.execute("SELECT * FROM alkstore.stream_offset WHERE consumer = %s", [consumer])
        return cursor.fetchone() or {"offset": None, "lease": None, "lease_expires_at": None}


def lapse(sql: Sql) -> None:
    """Let every consumer's lease have lapsed an hour ago."""
    sql.execute("UPDATE alkstore.stream_offset SET lease_expires_at = statement_timestamp() - interval '1 hour'")


def reached(running: Body, place: int) -> bool:
    """Tell whether a body is at the event with this offset, or was last."""
    return running.begun[-1:] == [place]


def renewed(sql: Sql, known: datetime) -> bool:
    return bool(consumer_row(sql)["lease_expires_at"] > known)


def is_listening(store: Store, stream: Stream[Any]) -> bool:
    return stream._core.announcement.channel in store._listener._listening


async def first(subscription: Any, number: int = 1) -> list[ConsumedEvent[Any]]:
    """Return the first events of a subscription, which is left standing at the last of them."""
    return [await asyncio.wait_for(anext(subscription), DEADLINE) for _ in range(number)]


# -- where it begins ---------------------------------------------------------------------------------------------------


async def test_a_new_consumer_begins_with_the_first_event(store: Store) -> None:
    stream = store.stream("s")
    ids = await stream.publish_many(["a", "b"], key="k")
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        one, another = await first(events, 2)
    assert (one.id, one.stream, one.offset, one.key, one.payload) == (ids[0], "s", 1, "k", "a")
    assert (another.id, another.offset, another.payload) == (ids[1], 2, "b")


async def test_a_known_consumer_goes_on_behind_its_stored_offset(store: Store) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(10))
    await stream.save_offset("c", 7)
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        assert [event.offset for event in await first(events, 3)] == [8, 9, 10]


async def test_every_consumer_is_handed_every_event(store: Store) -> None:
    stream = store.stream("s")
    async with body(stream, "one", page=1) as one, body(stream, "another", page=7) as another:
        for number in range(20):
            await stream.publish(number)
        await until(lambda: one.begun == another.begun == list(range(1, 21)))


async def test_more_events_than_a_page_and_than_one_statement_places_come_in_order(store: Store) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(2500))
    async with body(stream, page=700, poll=LONG) as running:
        await until(lambda: len(running.begun) == 2500)
    assert running.begun == list(range(1, 2501))


async def test_an_undecodable_payload_does_not_end_it(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish("before")
    sql.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '1e5000')")
    await stream.publish("after")
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        before, bad, after = await first(events, 3)
    assert (before.payload, after.payload) == ("before", "after")
    with pytest.raises(PayloadError):
        _ = bad.payload


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"consumer": ""}, InvalidName), ({"consumer": "x" * 201}, InvalidName), ({"consumer": 7}, InvalidName)),
        *(({"consumer": "__alkstore_c"}, ReservedName), ({"page": 0}, ValueError), ({"page": "9"}, ValueError)),
        *(
            ({"poll": 0}, ValueError),
            ({"poll": -1}, ValueError),
            ({"lease": 0}, ValueError),
            ({"lease": "1"}, ValueError),
        ),
    ],
)
def test_a_bad_argument_is_refused_at_the_call(options: dict[str, Any], error: type[Exception]) -> None:
    stream = Store(create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")).stream("s")
    with pytest.raises(error):
        stream.subscribe(**({"consumer": "c"} | options))


# -- when it wakes -----------------------------------------------------------------------------------------------------


async def test_an_event_of_the_same_store_wakes_it(store: Store) -> None:
    stream = store.stream("s")
    async with body(stream, poll=LONG) as running:
        for number in range(1, 4):
            await stream.publish("x")
            await until(partial(reached, running, number))


async def test_an_event_of_another_store_wakes_it(store: Store, second_store: Store) -> None:
    stream = store.stream("s")
    async with body(stream, poll=LONG) as running:
        await until(lambda: is_listening(store, stream))
        await second_store.stream("s").publish("x")
        await until(lambda: running.begun == [1])
        await second_store.stream("s").publish_many(["y", "z"])
        await until(lambda: running.begun == [1, 2, 3])


async def test_an_event_of_a_sync_store_wakes_it(store: Store, sync_store: SyncStore) -> None:
    stream = store.stream("s")
    async with body(stream, poll=LONG) as running:
        await until(lambda: is_listening(store, stream))
        await asyncio.to_thread(sync_store.stream("s").publish, "x")
        await until(lambda: running.begun == [1])


async def test_an_event_of_a_session_wakes_it_at_the_commit(
    store: Store, second_store: Store, engine: AsyncEngine
) -> None:
    stream = store.stream("s")
    async with body(stream, poll=LONG) as running, AsyncSession(engine) as session:
        await until(lambda: is_listening(store, stream))
        second_store.stream("s").publish_tx(session, "x")
        await session.commit()
        await until(lambda: running.begun == [1])


async def test_an_event_committed_late_wakes_it_and_is_handed_out(
    store: Store, second_store: Store, engine: AsyncEngine
) -> None:
    stream = store.stream("s")
    async with body(stream, poll=LONG) as running, AsyncSession(engine) as early:
        await until(lambda: is_listening(store, stream))
        event = second_store.stream("s").publish_tx(early, "early")
        await early.flush()
        assert event.id < await second_store.stream("s").publish("late")
        await until(lambda: running.begun == [1])
        await early.commit()
        await until(lambda: running.begun == [1, 2])
    assert [event.payload for event in await stream.read()] == ["late", "early"]


async def test_an_event_of_plain_sql_is_found_by_the_re_poll(store: Store, sql: Sql) -> None:
    async with body(store.stream("s"), poll=0.05) as running:
        sql.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '1')")
        await until(lambda: running.begun == [1])


async def test_a_store_that_does_not_listen_looks_from_time_to_time(engine: AsyncEngine, sync_store: SyncStore) -> None:
    async with Store(engine, wakes="poll") as store, body(store.stream("s"), poll=0.05) as running:
        await asyncio.to_thread(sync_store.stream("s").publish, "x")
        await until(lambda: running.begun == [1])


async def test_dropped_connections_do_not_end_it(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    async with body(stream, poll=0.05) as running:
        for number in range(1, 4):
            sql.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '1')")
            await until(partial(reached, running, number))
            sql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert not running.task.done()
    assert running.begun == [1, 2, 3]


# -- what is done ------------------------------------------------------------------------------------------------------


async def test_the_event_that_the_body_breaks_off_at_is_handed_out_again(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async for event in stream.subscribe("c"):
        if event.offset == 3:
            break
    await until(lambda: consumer_row(sql)["lease"] is None)
    assert consumer_row(sql)["offset"] == 2
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        assert (await first(events))[0].offset == 3


async def test_the_event_that_the_iterator_is_closed_at_is_handed_out_again(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    events = stream.subscribe("c")
    await first(events, 3)
    await events.aclose()
    row = consumer_row(sql)
    assert (row["offset"], row["lease"], row["lease_expires_at"]) == (2, None, None)
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        assert (await first(events))[0].offset == 3


async def test_the_event_that_an_exception_comes_from_is_handed_out_again(store: Store) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))

    async def handle() -> None:
        async with contextlib.aclosing(stream.subscribe("c")) as events:
            async for event in events:
                _ = 1 / (event.offset - 3)

    with pytest.raises(ZeroDivisionError):
        await handle()
    assert await stream.get_offset("c") == 2


async def test_the_event_that_the_task_is_cancelled_at_is_handed_out_again(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async with body(stream, wait_at=4) as running:
        await until(lambda: running.begun == [1, 2, 3, 4])
    assert (consumer_row(sql)["offset"], consumer_row(sql)["lease"]) == (3, None)
    async with body(stream, poll=LONG) as running:
        await until(lambda: running.begun == [4, 5])


async def test_a_task_cancelled_while_it_waits_has_saved_everything(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async with body(stream, poll=LONG) as running:
        await until(lambda: running.begun == [1, 2, 3, 4, 5])
    assert (consumer_row(sql)["offset"], consumer_row(sql)["lease"]) == (5, None)


async def test_what_is_done_is_saved_when_there_is_nothing_more(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, poll=LONG, lease=LONG) as running:
        await until(lambda: consumer_row(sql)["offset"] == 3)
        assert running.begun == [1, 2, 3]
        assert consumer_row(sql)["lease"] is not None


async def test_what_is_done_is_saved_with_each_page(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async with body(stream, page=2, wait_at=4, lease=LONG) as running:
        await until(lambda: running.begun == [1, 2, 3, 4])
        assert consumer_row(sql)["offset"] == 2


async def test_what_is_done_is_saved_when_the_lease_is_renewed(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async with body(stream, wait_at=4, lease=1.5) as running:
        await until(lambda: consumer_row(sql)["offset"] == 3)
        assert running.begun == [1, 2, 3, 4]


# -- the end of the store ----------------------------------------------------------------------------------------------


async def test_the_close_of_the_store_ends_one_that_waits(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, poll=LONG) as running:
        await until(lambda: running.begun == [1, 2, 3])
        await asyncio.wait_for(store.close(), DEADLINE)
        assert (consumer_row(sql)["offset"], consumer_row(sql)["lease"]) == (3, None)
        await finish(running.task)


async def test_the_close_of_the_store_saves_what_is_done_beside_a_body_at_an_event(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async with body(stream, wait_at=3, lease=LONG) as running:
        await until(lambda: running.begun == [1, 2, 3])
        await asyncio.wait_for(store.close(), DEADLINE)
        assert consumer_row(sql)["offset"] == 2
        running.go_on.set()
        await finish(running.task)
    assert running.begun == [1, 2, 3]
    assert (consumer_row(sql)["offset"], consumer_row(sql)["lease"]) == (3, None)


async def test_one_on_a_closed_store_ends_at_once(store: Store) -> None:
    await store.close()
    assert [event async for event in store.stream("s").subscribe("c")] == []


async def test_nothing_is_left_after_the_close(engine: AsyncEngine, sql: Sql) -> None:
    asyncio.get_running_loop().set_debug(True)
    before = asyncio.all_tasks()
    store = Store(engine)
    stream = store.stream("s")
    await stream.publish_many(range(5))
    bodies = [Body(stream, f"c{number}", wait_at=number, poll=LONG) for number in range(6)]
    await until(lambda: all(len(body.begun) == (place or 5) for place, body in enumerate(bodies)))
    await asyncio.wait_for(store.close(), DEADLINE)
    for running in bodies:
        running.go_on.set()
        await finish(running.task)
    await until(lambda: asyncio.all_tasks() == before)  # that a consumer has left is announced beside it
    await engine.dispose()
    others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await until(lambda: not sql.execute(others).fetchall())


async def test_a_body_that_breaks_off_leaves_nothing_behind_the_close(engine: AsyncEngine, sql: Sql) -> None:
    before = asyncio.all_tasks()
    store = Store(engine)
    stream = store.stream("s")
    await stream.publish_many(range(5))
    async for _ in stream.subscribe("c"):
        break
    await store.close()
    assert asyncio.all_tasks() == before
    assert (consumer_row(sql)["offset"], consumer_row(sql)["lease"]) == (0, None)


# -- several under one name --------------------------------------------------------------------------------------------


async def test_of_two_under_one_name_one_is_handed_events(store: Store, second_store: Store) -> None:
    stream = store.stream("s")
    async with body(stream, poll=0.05, lease=LONG) as holder:
        await stream.publish("first")
        await until(lambda: holder.begun == [1])
        async with body(second_store.stream("s"), poll=0.05, lease=LONG) as other:
            await stream.publish_many(range(10))
            await until(lambda: len(holder.begun) == 11)
            assert other.begun == []


async def test_two_loops_of_one_store_under_one_name_share_no_event(store: Store) -> None:
    stream = store.stream("s")
    async with body(stream, poll=0.02, page=3) as one, body(stream, poll=0.02, page=3) as another:
        await stream.publish_many(range(20))
        await until(lambda: len(one.begun) + len(another.begun) == 20)
        assert sorted(one.begun + another.begun) == list(range(1, 21))


async def test_another_goes_on_at_once_where_the_holder_ends(store: Store, second_store: Store) -> None:
    stream, second = store.stream("s"), second_store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, wait_at=3, lease=LONG) as holder:
        await until(lambda: holder.begun == [1, 2, 3])
        async with body(second, poll=LONG) as successor:
            await until(lambda: is_listening(second_store, second))
            await holder.cancel()
            await until(lambda: successor.begun == [3])


async def test_another_goes_on_when_the_lease_has_lapsed(store: Store, second_store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, wait_at=2, lease=LONG) as holder:
        await until(lambda: holder.begun == [1, 2])
        async with body(second_store.stream("s"), poll=0.05, lease=LONG) as successor:
            lapse(sql)
            await until(lambda: successor.begun == [1, 2, 3])
            assert holder.begun == [1, 2]


async def test_who_stands_by_looks_again_when_the_lease_lapses(store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish("x")
    sql.execute(
        'INSERT INTO alkstore.stream_offset (stream, consumer, "offset", lease, lease_expires_at)'
        " VALUES ('s', 'c', 0, nextval('alkstore.job_lease'), statement_timestamp() + interval '1 second')"
    )
    async with body(stream, poll=LONG) as successor:
        await until(lambda: successor.begun == [1])


async def test_who_has_lost_its_lease_stands_by_and_goes_on_after_the_other(
    store: Store, second_store: Store, sql: Sql
) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, wait_at=2, page=1, poll=0.05, lease=0.9) as former:
        await until(lambda: former.begun == [1, 2])
        async with body(second_store.stream("s"), wait_at=3, poll=0.05) as successor:
            sql.execute(  # a number that nobody has been given: taken over, and given back
                "UPDATE alkstore.stream_offset SET lease = nextval('alkstore.job_lease'),"
                " lease_expires_at = statement_timestamp()"
            )
            await until(lambda: successor.begun[-1:] == [3])
            former.go_on.set()
            await stream.publish("later")
        await until(lambda: former.begun[-1:] == [4])
        assert former.begun == [1, 2, 3, 4]


async def test_a_slow_body_keeps_its_lease(store: Store, second_store: Store, sql: Sql) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with body(stream, wait_at=2, lease=1.5) as holder:
        await until(lambda: holder.begun == [1, 2])
        async with body(second_store.stream("s"), poll=0.05) as other:
            for _ in range(2):
                known = consumer_row(sql)["lease_expires_at"]
                await until(partial(renewed, sql, known))
            lease = consumer_row(sql)["lease"]
            holder.go_on.set()
            await until(lambda: holder.begun == [1, 2, 3])
            assert other.begun == []
            assert consumer_row(sql)["lease"] == lease


# -- with the transaction of the effects -------------------------------------------------------------------------------


async def test_an_events_offset_commits_with_its_effects(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    sql.execute("CREATE TABLE effect (place bigint)")
    stream = store.stream("s")
    await stream.publish_many(range(3))
    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        async for event in events:
            async with AsyncSession(engine) as session:
                await session.execute(text("INSERT INTO effect VALUES (:place)"), {"place": event.offset})
                await event.save_offset_tx(session)
                assert await stream.get_offset("c") == event.offset - 1
                await session.commit()
            assert await stream.get_offset("c") == event.offset
            if event.offset == 3:
                break
    assert sql.execute("SELECT place FROM effect ORDER BY 1").fetchall() == [(1,), (2,), (3,)]
    assert consumer_row(sql)["offset"] == 3


async def test_an_event_whose_transaction_was_rolled_back_is_handed_out_again(
    store: Store, engine: AsyncEngine
) -> None:
    stream = store.stream("s")
    await stream.publish("x")
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        (event,) = await first(events)
        async with AsyncSession(engine) as session:
            await event.save_offset_tx(session)
            await session.rollback()
    assert await stream.get_offset("c") == 0
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        assert (await first(events))[0].offset == 1


async def test_an_event_whose_savepoint_was_rolled_back_is_handed_out_again(store: Store, engine: AsyncEngine) -> None:
    stream = store.stream("s")
    await stream.publish("x")
    async with contextlib.aclosing(stream.subscribe("c")) as events:
        (event,) = await first(events)
        async with AsyncSession(engine) as session:
            savepoint = await session.begin_nested()
            await event.save_offset_tx(session)
            await savepoint.rollback()
            await session.commit()
    assert await stream.get_offset("c") == 0


async def test_a_sync_session_saves_the_offset_of_an_event_too(store: Store, sync_engine: Engine) -> None:
    stream = store.stream("s")
    await stream.publish("x")

    def save(event: ConsumedEvent[Any]) -> None:
        with Session(sync_engine) as session:
            answer: Any = event.save_offset_tx(session)
            assert answer is None
            session.commit()

    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        (event,) = await first(events)
        await asyncio.to_thread(save, event)
        assert await stream.get_offset("c") == 1


TAKE_OVERS: dict[str, Callable[[Sql], Any]] = {
    "taken over": lambda sql: sql.execute(
        "UPDATE alkstore.stream_offset SET lease = nextval('alkstore.job_lease'),"
        " lease_expires_at = statement_timestamp() + interval '1 hour'"
    ),
    "given back by another": lambda sql: sql.execute(
        "UPDATE alkstore.stream_offset SET lease = NULL, lease_expires_at = NULL"
    ),
    "forgotten": lambda sql: sql.execute("DELETE FROM alkstore.stream_offset"),
}


@pytest.mark.parametrize("take_over", TAKE_OVERS.values(), ids=list(TAKE_OVERS))
async def test_an_event_whose_lease_is_lost_cannot_be_committed(
    store: Store, engine: AsyncEngine, sql: Sql, take_over: Callable[[Sql], Any]
) -> None:
    sql.execute("CREATE TABLE effect (place bigint)")
    stream = store.stream("s")
    await stream.publish("x")
    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        (event,) = await first(events)
        take_over(sql)
        before = consumer_row(sql)
        async with AsyncSession(engine) as session:
            await session.execute(text("INSERT INTO effect VALUES (1)"))
            with pytest.raises(LeaseLost, match="'c'"):
                await event.save_offset_tx(session)
            for _ in range(2):
                with pytest.raises(LeaseLost):
                    await session.commit()
        assert consumer_row(sql) == before
    assert sql.execute("SELECT * FROM effect").fetchall() == []


async def test_an_event_whose_lease_is_lost_cannot_be_committed_by_a_sync_session(
    store: Store, sync_engine: Engine, sql: Sql
) -> None:
    sql.execute("CREATE TABLE effect (place bigint)")
    stream = store.stream("s")
    await stream.publish("x")

    def save(event: ConsumedEvent[Any]) -> None:
        with Session(sync_engine) as session:
            session.execute(text("INSERT INTO effect VALUES (1)"))
            with pytest.raises(LeaseLost):
                event.save_offset_tx(session)
            with pytest.raises(LeaseLost):
                session.commit()

    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        (event,) = await first(events)
        TAKE_OVERS["taken over"](sql)
        await asyncio.to_thread(save, event)
    assert sql.execute("SELECT * FROM effect").fetchall() == []


async def test_a_lost_lease_dooms_the_innermost_savepoint_alone(store: Store, engine: AsyncEngine, sql: Sql) -> None:
    sql.execute("CREATE TABLE effect (place bigint)")
    stream = store.stream("s")
    await stream.publish("x")
    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        (event,) = await first(events)
        TAKE_OVERS["taken over"](sql)
        async with AsyncSession(engine) as session:
            await session.execute(text("INSERT INTO effect VALUES (1)"))
            savepoint = await session.begin_nested()
            await session.execute(text("INSERT INTO effect VALUES (2)"))
            with pytest.raises(LeaseLost):
                await event.save_offset_tx(session)
            with pytest.raises(LeaseLost):
                await session.commit()
            await savepoint.rollback()
            await session.commit()
    assert sql.execute("SELECT * FROM effect").fetchall() == [(1,)]


async def test_an_event_saved_late_counts_as_long_as_nobody_has_taken_over(
    store: Store, engine: AsyncEngine, sql: Sql
) -> None:
    stream = store.stream("s")
    await stream.publish("x")
    async with contextlib.aclosing(stream.subscribe("c", lease=LONG)) as events:
        (event,) = await first(events)
        lapse(sql)
        async with AsyncSession(engine) as session:
            await event.save_offset_tx(session)
            await session.commit()
        assert consumer_row(sql)["offset"] == 1


async def test_a_transaction_longer_than_the_lease_is_not_overtaken_and_holds_no_renewal_up(
    store: Store, second_store: Store, engine: AsyncEngine, sql: Sql
) -> None:
    stream = store.stream("s")
    await stream.publish_many(range(5))
    handled: list[int] = []
    is_open, may_commit = asyncio.Event(), asyncio.Event()

    async def handle(store: Store) -> None:
        async with contextlib.aclosing(store.stream("s").subscribe("c", poll=0.05, lease=0.6)) as events:
            async for event in events:
                async with AsyncSession(engine) as session:
                    handled.append(event.offset)
                    await event.save_offset_tx(session)
                    if event.offset == 2:
                        is_open.set()
                        await may_commit.wait()
                    await session.commit()

    def lapsed() -> bool:
        row = sql.execute("SELECT lease_expires_at < statement_timestamp() FROM alkstore.stream_offset").fetchone()
        return row == (True,)

    waiting = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    tasks = [asyncio.create_task(handle(store))]
    try:
        await asyncio.wait_for(is_open.wait(), DEADLINE)
        tasks.append(asyncio.create_task(handle(second_store)))
        await until(lapsed)
        # One more look at everybody: who waited for the row would be seen now.
        await until(lambda: second_store._listener._listening)
        assert sql.execute(waiting).fetchall() == []
        assert handled == [1, 2]
        may_commit.set()
        await until(lambda: consumer_row(sql)["offset"] == 5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert handled == [1, 2, 3, 4, 5]
