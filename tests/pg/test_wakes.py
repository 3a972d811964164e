"""Who is woken, when, and what it costs the transaction that did it: nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import NullPool, event
from sqlalchemy.ext.asyncio import create_async_engine
from support.plain_sql import number
from support.sessions import DOORS, Door, Order, begun, done, open_door
from support.waiting import until
from support.wakes import Ear, Heard, holding, is_asleep, listening

from alkstore_sa import Store
from alkstore_sa._channels import wake_channel
from alkstore_sa._hub import Wakeup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.databases import Database
    from support.rows import Sql

IN_A_TRANSACTION: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "enqueue_tx": ("queue emails", lambda store, session: store.queue("emails").enqueue_tx(session, 1)),
    "enqueue_many_tx": ("queue emails", lambda store, session: store.queue("emails").enqueue_many_tx(session, [1, 2])),
    "outbox.enqueue_tx": ("outbox emails", lambda store, session: store.outbox("emails").enqueue_tx(session, 1)),
    "outbox.enqueue_many_tx": (
        "outbox emails",
        lambda store, session: store.outbox("emails").enqueue_many_tx(session, [1, 2]),
    ),
    "publish_tx": ("stream emails", lambda store, session: store.stream("emails").publish_tx(session, 1)),
    "publish_many_tx": (
        "stream emails",
        lambda store, session: store.stream("emails").publish_many_tx(session, [1, 2]),
    ),
}

AT_ONCE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "enqueue": ("queue emails", lambda store: store.queue("emails").enqueue(1)),
    "enqueue_many": ("queue emails", lambda store: store.queue("emails").enqueue_many([1, 2])),
    "outbox.enqueue": ("outbox emails", lambda store: store.outbox("emails").enqueue(1)),
    "outbox.enqueue_many": ("outbox emails", lambda store: store.outbox("emails").enqueue_many([1, 2])),
    "publish": ("stream emails", lambda store: store.stream("emails").publish(1)),
    "publish_many": ("stream emails", lambda store: store.stream("emails").publish_many([1, 2])),
}

WITH_A_CLAIM: dict[str, Callable[[Any, Any], Any]] = {
    "retry": lambda _queue, job: job.retry("no route to host"),
    "release": lambda _queue, job: job.release(),
    "release_many": lambda queue, job: queue.release_many([job]),
}


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door
        await done(door.store.close())


@pytest.fixture
def ear(database: Database) -> Iterator[Ear]:
    with listening(database) as ear:
        yield ear


async def wakes(door: Door, ear: Ear) -> list[str]:
    """Have everything sent that is going to be, and return what was heard."""
    await done(door.store.close())
    return ear.heard()


@asynccontextmanager
async def consuming(database: Database) -> AsyncIterator[list[Any]]:
    """Yield the payloads that a consumer in another store gets, one that is asleep and looks again after an hour."""
    engine = create_async_engine(database.url("asyncpg"))
    async with Store(engine) as store:
        got: list[Any] = []

        async def consume() -> None:
            async for job in store.queue("emails").consume("w", poll=3600):
                got.append(job.payload)
                await job.ack()

        consumer = asyncio.create_task(consume())
        await until(is_asleep(store, "queue", "emails"))
        yield got
    await consumer
    await engine.dispose()


# -- who is woken ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", IN_A_TRANSACTION)
async def test_a_commit_wakes_who_waits_for_what_it_carries_and_nobody_else(
    door: Door, ear: Ear, operation: str
) -> None:
    who, operate = IN_A_TRANSACTION[operation]
    session = door.session()
    operate(door.store, session)
    await done(session.commit())
    assert await wakes(door, ear) == [who]


async def test_a_commit_through_a_scoped_session_wakes(door: Door, ear: Ear) -> None:
    registry = door.scoped_session()
    door.store.queue("emails").enqueue_tx(registry, 1)
    await done(registry.commit())
    await done(registry.remove())
    assert await wakes(door, ear) == ["queue emails"]


async def test_the_commit_of_a_session_from_the_store_wakes(door: Door, ear: Ear) -> None:
    async with begun(door.store) as session:
        door.store.queue("emails").enqueue_tx(session, 1)
        await done(session.flush())
        assert await wakes(door, ear) == []
    assert await wakes(door, ear) == ["queue emails"]


async def test_a_commit_in_a_stricter_isolation_level_wakes_and_so_do_the_commits_after_it(
    door: Door, ear: Ear
) -> None:
    for bind in (door.engine.execution_options(isolation_level="SERIALIZABLE"), door.engine):
        session = door.session(bind)
        door.store.queue("emails").enqueue_tx(session, 1)
        await done(session.commit())
        assert (await wakes(door, ear)).pop() == "queue emails"
        ear.forget()


async def test_a_store_on_an_engine_with_an_isolation_level_of_its_own_wakes(door: Door, ear: Ear) -> None:
    store = door.new_store(door.engine.execution_options(isolation_level="REPEATABLE READ"))
    await done(store.queue("emails").enqueue(1))
    await done(store.close())
    assert ear.heard() == ["queue emails"]


async def test_a_transaction_that_carries_jobs_for_several_wakes_each_of_them_once(door: Door, ear: Ear) -> None:
    session = door.session()
    for _ in range(3):
        for _, operate in IN_A_TRANSACTION.values():
            operate(door.store, session)
        await done(session.flush())
    await done(session.commit())
    assert sorted(await wakes(door, ear)) == ["outbox emails", "queue emails", "stream emails"]


@pytest.mark.parametrize("operation", AT_ONCE)
async def test_an_operation_of_its_own_wakes_who_waits_for_it_and_nobody_else(
    door: Door, ear: Ear, operation: str
) -> None:
    who, operate = AT_ONCE[operation]
    await done(operate(door.store))
    assert await wakes(door, ear) == [who]


@pytest.mark.parametrize("operation", WITH_A_CLAIM)
async def test_a_job_that_is_given_back_wakes_the_queues_consumers(door: Door, ear: Ear, operation: str) -> None:
    queue = door.store.queue("emails")
    await done(queue.enqueue(1))
    (job,) = await done(queue.claim("w"))
    await wakes(door, ear)
    ear.forget()
    await done(WITH_A_CLAIM[operation](queue, job))
    assert await wakes(door, ear) == ["queue emails"]


async def test_reading_claiming_and_acknowledging_wake_nobody(door: Door, ear: Ear) -> None:
    queue = door.store.queue("emails")
    await done(queue.enqueue(1))
    await wakes(door, ear)
    ear.forget()
    (job,) = await done(queue.claim("w"))
    await done(job.heartbeat())
    await done(queue.get_job(job.id))
    await done(job.ack())
    await done(queue.stats())
    assert await wakes(door, ear) == []


async def test_a_wake_carries_the_token_of_its_store_and_no_data(door: Door, ear: Ear) -> None:
    await done(door.store.queue("emails").enqueue({"secret": 1}))
    await wakes(door, ear)
    assert ear.arrived == [Heard("queue emails", door.store._core.waker.token)]


async def test_a_consumer_in_another_store_gets_what_was_committed_while_it_slept(
    door: Door, database: Database
) -> None:
    async with consuming(database) as got:
        session = door.session()
        door.store.queue("emails").enqueue_tx(session, "in a transaction")
        await done(session.commit())
        await until(lambda: got == ["in a transaction"])
    async with consuming(database) as got:
        await done(door.store.queue("emails").enqueue("at once"))
        await until(lambda: got == ["at once"])


# -- and when not ------------------------------------------------------------------------------------------------------


async def test_nobody_is_woken_before_the_commit(door: Door, ear: Ear) -> None:
    session = door.session()
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.flush())
    assert await wakes(door, ear) == []
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]


async def test_a_rollback_wakes_nobody_and_neither_does_the_next_commit_of_that_session(door: Door, ear: Ear) -> None:
    session = door.session()
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.flush())
    await done(session.rollback())
    session.add(Order(reference="A"))
    await done(session.commit())
    assert await wakes(door, ear) == []


async def test_a_session_closed_without_a_commit_wakes_nobody(door: Door, ear: Ear) -> None:
    session = door.session()
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.flush())
    await done(session.close())
    assert await wakes(door, ear) == []


async def test_a_commit_that_fails_wakes_nobody(door: Door, ear: Ear) -> None:
    session = door.session()
    session.add_all([Order(reference="A"), Order(reference="A")])
    door.store.queue("emails").enqueue_tx(session, 1)
    with pytest.raises(Exception, match="unique"):
        await done(session.commit())
    await done(session.rollback())
    assert await wakes(door, ear) == []


async def test_what_was_announced_is_not_announced_again_by_the_next_commit(door: Door, ear: Ear) -> None:
    session = door.session()
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]
    door.store.queue("letters").enqueue_tx(session, 2)
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails", "queue letters"]


async def test_a_released_savepoint_wakes_nobody_until_the_transaction_is_committed(door: Door, ear: Ear) -> None:
    session = door.session()
    savepoint = await done(session.begin_nested())
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(savepoint.commit())
    assert await wakes(door, ear) == []
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]


async def test_a_released_savepoint_wakes_nobody_in_this_process_either(door: Door) -> None:
    session = door.session()
    wakeup = Wakeup()
    with door.store._core.hub.subscribed([wake_channel("alkstore", "queue", "emails")], wakeup):
        savepoint = await done(session.begin_nested())
        door.store.queue("emails").enqueue_tx(session, 1)
        await done(savepoint.commit())
        assert not wakeup.woken
        await done(session.commit())
        assert wakeup.woken


async def test_a_released_savepoint_in_a_transaction_that_is_rolled_back_wakes_nobody(door: Door, ear: Ear) -> None:
    session = door.session()
    savepoint = await done(session.begin_nested())
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(savepoint.commit())
    await done(session.rollback())
    assert await wakes(door, ear) == []


# -- what the transaction carries --------------------------------------------------------------------------------------


async def test_the_transaction_that_carries_a_job_carries_no_notification(door: Door, ear: Ear) -> None:
    log: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        log.append(statement.lower())

    engine = door.sync_engine()
    event.listen(engine, "before_cursor_execute", note)
    event.listen(engine, "commit", lambda _connection: log.append("commit"))
    session = door.session()
    session.add(Order(reference="A"))
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]
    transaction = log[: log.index("commit")]
    assert any("insert" in statement for statement in transaction)
    assert not [statement for statement in transaction if "notify" in statement]
    assert [statement for statement in log if "notify" in statement]


async def test_a_two_phase_commit_which_could_not_carry_a_notification_wakes_afterwards(door: Door, ear: Ear) -> None:
    session = door.session(twophase=True)
    door.store.queue("emails").enqueue_tx(session, 1)
    door.store.stream("emails").publish_tx(session, 1)
    await done(session.flush())
    await done(session.commit())
    assert sorted(await wakes(door, ear)) == ["queue emails", "stream emails"]


async def test_a_two_phase_transaction_that_is_only_prepared_wakes_nobody(door: Door, ear: Ear, sql: Sql) -> None:
    prepared: list[Any] = []

    def look(_connection: Any, _xid: Any) -> None:
        prepared.append(ear.heard())

    event.listen(door.sync_engine(), "prepare_twophase", look)
    event.listen(door.sync_engine(), "commit_twophase", lambda connection, xid, _prepared: look(connection, xid))
    session = door.session(twophase=True)
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert prepared == [[], []]
    assert await wakes(door, ear) == ["queue emails"]


# -- transactions of others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
async def test_a_session_joined_to_a_connections_transaction_wakes_no_other_process(
    door: Door, ear: Ear, mode: str
) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode=mode)
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert await wakes(door, ear) == []
    await done(outer.rollback())
    assert await wakes(door, ear) == []


async def test_a_joined_session_that_commits_the_outer_transaction_itself_wakes(door: Door, ear: Ear) -> None:
    connection = await door.connect()
    await done(connection.begin())
    session = door.session(connection, join_transaction_mode="control_fully")
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]


async def test_a_session_on_a_connection_without_a_transaction_wakes(door: Door, ear: Ear) -> None:
    session = door.session(await door.connect())
    door.store.queue("emails").enqueue_tx(session, 1)
    await done(session.commit())
    assert await wakes(door, ear) == ["queue emails"]


async def test_a_store_on_a_connection_wakes_nobody_outside(door: Door, ear: Ear) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    store = door.new_store(connection)
    for _, operate in AT_ONCE.values():
        await done(operate(store))
    (job,) = await done(store.queue("emails").claim("w"))
    await done(job.release())
    async with begun(store) as session:
        store.queue("emails").enqueue_tx(session, 1)
    await done(store.close())
    assert await wakes(door, ear) == []
    await done(outer.rollback())
    await done(store.close())
    assert await wakes(door, ear) == []


async def test_a_joined_session_wakes_who_waits_in_this_process(door: Door) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode="create_savepoint")
    wakeup = Wakeup()
    with door.store._core.hub.subscribed([wake_channel("alkstore", "queue", "emails")], wakeup):
        door.store.queue("emails").enqueue_tx(session, 1)
        await done(session.flush())
        assert not wakeup.woken
        await done(session.commit())
        assert wakeup.woken
    await done(outer.rollback())


# -- no more than needed -----------------------------------------------------------------------------------------------


async def commit_one(door: Door, queue: str, payload: Any = 1) -> None:
    """Commit a transaction of its own that carries one job."""
    session = door.session()
    door.store.queue(queue).enqueue_tx(session, payload)
    await done(session.commit())
    await done(session.close())


async def test_however_many_commits_come_while_a_wake_is_being_sent_they_are_one_further_wake(
    door: Door, ear: Ear
) -> None:
    with holding(door.sync_engine()) as hold:
        await commit_one(door, "emails")
        await until(lambda: hold.attempts == 1)
        for _ in range(50):
            await commit_one(door, "emails")
        assert ear.heard() == []
        hold.release()
        assert await wakes(door, ear) == ["queue emails", "queue emails"]


async def test_each_queue_of_a_burst_is_announced_in_one_statement(door: Door, ear: Ear) -> None:
    queues = [f"queue-{number:02}" for number in range(20)]
    for queue in queues:
        ear.listen("queue", queue)
    with holding(door.sync_engine()) as hold:
        await commit_one(door, "emails")
        await until(lambda: hold.attempts == 1)
        for queue in queues * 2:
            await commit_one(door, queue)
        hold.release()
        heard = await wakes(door, ear)
        assert sorted(heard) == ["queue emails", *(f"queue {queue}" for queue in queues)]
        assert hold.attempts == 2


async def test_a_thousand_commits_make_far_fewer_wakes_and_the_last_of_them_is_announced(
    door: Door, database: Database, ear: Ear
) -> None:
    payloads = list(range(1000))
    async with consuming(database) as got:
        session = door.session()
        for payload in payloads:
            door.store.queue("emails").enqueue_tx(session, payload)
            await done(session.commit())
        await until(lambda: len(got) == len(payloads))
        heard = await wakes(door, ear)
    assert sorted(got) == payloads
    assert set(heard) == {"queue emails"}
    assert len(heard) < len(payloads) / 2


async def test_the_last_commit_of_a_burst_is_announced(door: Door, database: Database) -> None:
    async with consuming(database) as got:
        for burst in range(20):
            for _ in range(burst % 5 + 1):
                await commit_one(door, "emails", burst)
            await commit_one(door, "emails", "last")
            await until(lambda: "last" in got)
            got.clear()


# -- the pool ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def on_engine(door: Door, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a further engine with these options, and a store on it."""
    engine = door.new_engine(**options)
    store = door.new_store(engine)
    try:
        yield engine, store
    finally:
        await done(store.close())


async def test_with_a_pool_of_one_connection_the_wake_arrives_and_no_second_is_ever_opened(
    door: Door, ear: Ear
) -> None:
    opened: list[Any] = []
    async with on_engine(door, pool_size=1, max_overflow=0) as (engine, store):
        event.listen(door.sync_engine(engine).pool, "connect", lambda connection, _record: opened.append(connection))
        for _ in range(20):
            session = door.session(engine)
            store.queue("emails").enqueue_tx(session, 1)
            await done(session.commit())
            await done(store.queue("emails").enqueue(2))
        await until(lambda: ear.heard()[-1:] == ["queue emails"])
        await done(store.close())
        assert len(opened) == 1


async def test_a_producer_has_no_more_connections_than_its_pool_by_the_servers_own_count(
    door: Door, ear: Ear, sql: Sql
) -> None:
    counts: set[int] = set()

    def look() -> None:
        counts.add(number(sql, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'producer'"))

    name = {"application_name": "producer"}
    arguments = {"server_settings": name} if door.driver == "asyncpg" else name
    async with on_engine(door, pool_size=1, max_overflow=0, connect_args=arguments) as (_, store):
        for payload in range(20):
            await done(store.queue("emails").enqueue(payload))
            look()
        await until(lambda: "queue emails" in ear.heard())
        look()
    assert counts == {1}


async def test_while_the_pool_is_exhausted_the_commit_is_not_held_up_and_the_wake_comes_when_it_is_not(
    door: Door, ear: Ear
) -> None:
    async with on_engine(door, pool_size=1, max_overflow=0) as (engine, store):
        connection = await door.connect(engine)
        session = door.session(connection)
        for _ in range(3):
            store.queue("emails").enqueue_tx(session, 1)
            await done(session.commit())
        assert ear.heard() == []
        await done(session.close())
        await done(connection.close())
        await until(ear.hears("queue emails"))


async def test_an_exhausted_pool_holds_closing_up_for_a_bounded_time(door: Door) -> None:
    async with on_engine(door, pool_size=1, max_overflow=0) as (engine, store):
        connection = await door.connect(engine)
        session = door.session(connection)
        store.queue("emails").enqueue_tx(session, 1)
        await done(session.commit())
        begin = time.monotonic()
        await done(store.close())
        assert time.monotonic() - begin < 5
        await done(session.close())
        await done(connection.close())


async def test_without_a_pool_every_wake_arrives(door: Door, ear: Ear) -> None:
    async with on_engine(door, poolclass=NullPool) as (engine, store):
        session = door.session(engine)
        for commits in range(1, 6):
            store.queue("emails").enqueue_tx(session, 1)
            await done(session.commit())
            await until(ear.hears(*["queue emails"] * commits))
        await done(session.close())
        await done(store.queue("letters").enqueue(1))
        await until(lambda: ear.heard()[-1] == "queue letters")


# -- in the same process -----------------------------------------------------------------------------------------------


async def test_a_consumer_of_the_same_store_is_woken_while_the_notification_is_still_held_up(
    store: Store, engine: Any, ear: Ear
) -> None:
    got: list[Any] = []

    async def consume() -> None:
        async for job in store.queue("emails").consume("w", poll=3600):
            got.append(job.payload)
            await job.ack()

    consumer = asyncio.create_task(consume())
    await until(is_asleep(store, "queue", "emails"))
    with holding(engine.sync_engine):
        await store.queue("emails").enqueue(1)
        await until(lambda: got == [1])
        async with store.begin() as session:
            store.queue("emails").enqueue_tx(session, 2)
        await until(lambda: got == [1, 2])
        assert ear.heard() == []
    await store.close()
    with suppress(asyncio.CancelledError):
        await consumer
