"""What becomes of the listening connection when the server, or the network, does not keep it up.

Consumers here look once an hour, so whatever they find soon, they were woken for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database
from support.plain_sql import insert_job, number
from support.proxy import Proxy, proxied
from support.waiting import DEADLINE, until

from alkstore_sa import Store
from alkstore_sa._channels import wake_channel
from alkstore_sa._wire import Wire
from alkstore_sa.listen import Notification

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.rows import Sql

    from alkstore_sa.embedded import LocalServer
    from alkstore_sa.listen import Notifications

AN_HOUR: Final = 3600
NEVER: Final = 600
"""A `listen_timeout` so long that the self-check plays no part."""
SLACK: Final = 2.0
"""What a loaded machine may add to a time that the library promises, in seconds."""

LISTENERS: Final = "datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'"


async def word(notifications: Notifications) -> str:
    """Return the next payload, or what stands for the word that the connection was lost."""
    found = await asyncio.wait_for(anext(notifications), DEADLINE)
    return "RECONNECTED" if found.is_reconnect else found.payload


async def asleep(store: Store, queue: str = "emails") -> None:
    """Wait until the queue's consumer is listened for and waits for a wake."""
    channel = wake_channel("alkstore", "queue", queue)

    def waits() -> bool:
        consumers: Any = store._core.hub.on(channel)
        return channel in store._listener._listening and bool(consumers and consumers[0]._event._waiters)

    await until(waits)


@asynccontextmanager
async def consuming(store: Store, queue: str = "emails") -> AsyncIterator[list[Any]]:
    """Yield the list that the payloads of the queue's jobs are put into as they are consumed."""
    found: list[Any] = []

    async def consume() -> None:
        async for job in store.queue(queue).consume("w", poll=AN_HOUR):
            await job.ack()
            found.append(job.payload)  # only now, so that a test may break connections when it sees this

    running = asyncio.create_task(consume())
    try:
        await asleep(store, queue)
        yield found
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[Proxy]:
    async with proxied(database) as proxy:
        yield proxy


@pytest.fixture
async def far_engine(proxy: Proxy, driver: str) -> AsyncIterator[AsyncEngine]:
    """An engine whose connections go by way of the proxy."""
    engine = create_async_engine(proxy.database.url(driver))
    yield engine
    await engine.dispose()


@pytest.fixture
async def far_store(engine: AsyncEngine, far_engine: AsyncEngine) -> AsyncIterator[Store]:
    """A store that only listens by way of the proxy, and notices what is silent within a second."""
    async with Store(engine, listen_engine=far_engine, listen_timeout=1) as store:
        yield store


@pytest.fixture
def losses(caplog: pytest.LogCaptureFixture) -> Callable[[], list[float]]:
    """Return how long the listener said that it would wait, each time that it had no connection."""
    caplog.set_level(logging.WARNING, "alkstore_sa.listener")

    def waits() -> list[float]:
        records: list[Any] = caplog.records
        return [record.args[0] for record in records if record.msg.startswith("cannot listen")]

    return waits


# -- a connection that is closed ---------------------------------------------------------------------------------------


def terminate(sql: Sql) -> None:
    """Have the server close the connection whose last statement was a LISTEN."""
    assert number(sql, f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {LISTENERS}") == 1


@pytest.fixture
async def lone_store(engine: AsyncEngine) -> AsyncIterator[Store]:
    """A store whose self-check would notice nothing in time."""
    async with Store(engine, listen_timeout=NEVER) as store:
        yield store


async def test_after_a_closed_connection_every_subscriber_is_told_once(lone_store: Store, sql: Sql) -> None:
    async with AsyncExitStack() as stack:
        channels = [("a",), ("b",), ("a", "b"), ("x" * 100, "c", "d")]
        subscribers = [await stack.enter_async_context(lone_store.listen(*names)) for names in channels]
        terminate(sql)
        assert [await word(one) for one in subscribers] == ["RECONNECTED"] * 4
        for names in channels[:3]:
            await lone_store.notify(names[0], "next")
        await lone_store.notify("d", "next")
        assert [await word(one) for one in subscribers] == ["next"] * 4


async def test_the_word_is_the_stores_own_notification(lone_store: Store, sql: Sql) -> None:
    async with lone_store.listen("prices") as notifications:
        terminate(sql)
        found = await asyncio.wait_for(anext(notifications), DEADLINE)
    assert found == Notification("__alkstore_listener_reconnected__", "")


async def test_what_is_notified_upon_the_word_arrives_on_every_channel(lone_store: Store, sql: Sql) -> None:
    channels = [f"channel {n}" for n in range(50)]
    async with lone_store.listen(*channels) as notifications:
        terminate(sql)
        assert await word(notifications) == "RECONNECTED"
        # Without an await in between, so that the event loop has no chance to listen to the rest.
        sql.execute("SELECT pg_notify(channel, channel) FROM unnest(%s::text[]) AS channel", [channels])
        assert [await word(notifications) for _ in channels] == channels


async def test_a_subscriber_that_came_later_is_told_of_later_losses_alone(lone_store: Store, sql: Sql) -> None:
    async with lone_store.listen("prices") as first:
        terminate(sql)
        assert await word(first) == "RECONNECTED"
        async with lone_store.listen("prices") as second:
            sql.execute("NOTIFY prices, 'between'")
            assert await word(second) == "between"
            terminate(sql)
            assert await word(second) == "RECONNECTED"


async def test_a_connection_that_is_closed_again_and_again_is_replaced_each_time(lone_store: Store, sql: Sql) -> None:
    async with lone_store.listen("prices") as notifications, lone_store.listen("rates") as others:
        for n in range(10):
            terminate(sql)
            assert [await word(notifications), await word(others)] == ["RECONNECTED"] * 2
            sql.execute(f"NOTIFY prices, '{n}'")
            assert await word(notifications) == str(n)


async def test_a_consumer_looks_when_it_is_listened_for_again(lone_store: Store, sql: Sql) -> None:
    async with consuming(lone_store) as found:
        insert_job(sql, "emails", payload="to_jsonb('a'::text)")  # announced by nobody
        terminate(sql)
        await until(lambda: found == ["a"])


# -- a server that restarts --------------------------------------------------------------------------------------------


async def test_a_killed_server_costs_a_consumer_nothing_and_its_subscribers_a_word(
    own_server: LocalServer, driver: str
) -> None:
    database = Database(own_server.dsn)
    engine = create_async_engine(database.url(driver))
    producer = create_async_engine(database.url(driver))
    async with (
        Store(engine) as store,
        Store(producer) as other,
        store.listen("prices") as notifications,
        consuming(store) as found,
    ):
        await other.queue("emails").enqueue("before")
        await other.notify("prices", "before")
        await until(lambda: found == ["before"])
        assert await word(notifications) == "before"
        await asyncio.to_thread(own_server.kill)
        await until(lambda: not store._listener._listening)
        await asyncio.to_thread(own_server.start_again)
        assert await word(notifications) == "RECONNECTED"
        await producer.dispose()
        await other.queue("emails").enqueue("after")
        await other.notify("prices", "after")
        await until(lambda: found == ["before", "after"])
        assert await word(notifications) == "after"
    await engine.dispose()
    await producer.dispose()


# -- a gap -------------------------------------------------------------------------------------------------------------


async def test_what_is_notified_in_a_gap_is_not_replayed_and_what_follows_is_not_lost(
    far_store: Store, proxy: Proxy, sql: Sql
) -> None:
    async with far_store.listen("prices") as notifications:
        sql.execute("NOTIFY prices, 'before'")
        assert await word(notifications) == "before"
        proxy.refuse()
        await until(lambda: not far_store._listener._listening)
        sql.execute("NOTIFY prices, 'in the gap'")
        proxy.recover()
        assert await word(notifications) == "RECONNECTED"
        sql.execute("NOTIFY prices, 'after'")
        assert await word(notifications) == "after"


async def test_jobs_that_are_committed_in_a_gap_are_consumed_after_it(far_store: Store, proxy: Proxy, sql: Sql) -> None:
    async with consuming(far_store) as found:
        proxy.refuse()
        await until(lambda: not far_store._listener._listening)
        for n in range(3):
            insert_job(sql, "emails", payload=f"to_jsonb({n})")
        proxy.recover()
        await until(lambda: found == [0, 1, 2])


async def test_who_subscribes_in_a_gap_is_told_that_there_is_no_connection(far_store: Store, proxy: Proxy) -> None:
    async with far_store.listen("prices") as notifications:
        proxy.refuse()
        await until(lambda: not far_store._listener._listening)
        with pytest.raises((DBAPIError, OSError)):
            async with far_store.listen("prices"):
                pass
        proxy.recover()
        assert await word(notifications) == "RECONNECTED"
        async with far_store.listen("rates") as others:
            await far_store.notify("rates", "now")
            assert await word(others) == "now"


async def test_a_wrong_password_is_told_to_who_subscribes(database: Database, driver: str) -> None:
    engine = create_async_engine(make_url(database.url(driver)).set(password="wrong"))
    async with Store(engine) as store:
        with pytest.raises((DBAPIError, OSError)):
            async with store.listen("prices"):
                pass
    await engine.dispose()


class _Clock:
    """The asyncio of the listener's module, in which a sleep takes no time and is noted."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.001)


async def test_a_new_connection_is_tried_for_after_50_ms_then_after_twice_as_long_up_to_2_s(
    far_store: Store, proxy: Proxy, losses: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr("alkstore_sa._listener.asyncio", clock)
    async with far_store.listen("prices") as notifications:
        assert clock.slept == []
        proxy.refuse()
        await until(lambda: len(clock.slept) >= 9)
        assert clock.slept[:9] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
        assert losses()[:9] == clock.slept[:9]
        proxy.recover()
        assert await word(notifications) == "RECONNECTED"
        tried = len(clock.slept)
        proxy.refuse()
        await until(lambda: len(clock.slept) > tried)
        assert clock.slept[tried] == 0.05


# -- a network that goes silent ----------------------------------------------------------------------------------------


async def test_a_silent_connection_is_noticed_within_the_listen_timeout(far_store: Store, proxy: Proxy) -> None:
    async with far_store.listen("prices") as notifications:
        proxy.silence()
        begun = time.monotonic()
        assert await word(notifications) == "RECONNECTED"
        assert time.monotonic() - begun < 1 + SLACK
        await far_store.notify("prices", "after")
        assert await word(notifications) == "after"


async def test_a_connection_on_which_nothing_happens_is_not_taken_for_a_silent_one(
    far_store: Store, proxy: Proxy, losses: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    check = Wire.check

    async def note(wire: Wire) -> bool:
        checks.append(await check(wire))
        return checks[-1]

    monkeypatch.setattr(Wire, "check", note)
    async with far_store.listen("prices") as notifications:
        await until(lambda: len(checks) >= 4)  # the first one belongs to the opening
        await far_store.notify("prices", "still here")
        assert await word(notifications) == "still here"
    assert losses() == []
    assert proxy.taken == 1


async def test_jobs_that_are_committed_while_the_network_is_silent_are_consumed_after_it(
    far_store: Store, proxy: Proxy, sql: Sql
) -> None:
    async with consuming(far_store) as found:
        proxy.silence()
        insert_job(sql, "emails", payload="to_jsonb(1)")
        await until(lambda: found == [1])


async def test_a_network_that_swallows_new_connections_too_is_survived(
    far_store: Store, proxy: Proxy, losses: Callable[[], list[float]]
) -> None:
    async with far_store.listen("prices") as notifications:
        proxy.swallow()
        await until(lambda: len(losses()) >= 2)  # the connection itself, and an attempt at another
        proxy.recover()
        assert await word(notifications) == "RECONNECTED"
        await far_store.notify("prices", "after")
        assert await word(notifications) == "after"


async def test_who_subscribes_over_a_silent_network_is_told_within_the_listen_timeout(
    far_store: Store, proxy: Proxy
) -> None:
    proxy.swallow()
    begun = time.monotonic()
    with pytest.raises(OSError, match="not answered within"):
        async with far_store.listen("prices"):
            pass
    assert time.monotonic() - begun < 1 + SLACK


# -- closing a store all the same --------------------------------------------------------------------------------------


async def closed_in_time(store: Store) -> bool:
    """Close the store and tell whether that took no longer than a few seconds."""
    begun = time.monotonic()
    await asyncio.wait_for(store.close(), DEADLINE)
    return time.monotonic() - begun < 2 + SLACK


async def test_a_store_is_closed_in_time_when_its_connection_is_silent(
    engine: AsyncEngine, far_engine: AsyncEngine, proxy: Proxy
) -> None:
    store = Store(engine, listen_engine=far_engine, listen_timeout=NEVER)
    async with store.listen("prices"):
        proxy.swallow()
        assert await closed_in_time(store)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("alkstore")]


async def test_a_store_is_closed_in_time_while_a_connection_is_being_opened_over_a_silent_network(
    engine: AsyncEngine, far_engine: AsyncEngine, proxy: Proxy
) -> None:
    store = Store(engine, listen_engine=far_engine, listen_timeout=NEVER)
    proxy.swallow()
    beginning = asyncio.ensure_future(store.listen("prices").__aenter__())
    await until(lambda: proxy.taken)
    assert await closed_in_time(store)
    assert "closed" in str((await asyncio.gather(beginning, return_exceptions=True))[0])


async def test_a_store_is_closed_in_time_between_two_attempts(far_store: Store, proxy: Proxy) -> None:
    async with far_store.listen("prices") as notifications:
        proxy.refuse()
        await until(lambda: not far_store._listener._listening)
        assert await closed_in_time(far_store)
        assert await anext(notifications, None) is None


async def test_a_store_is_closed_in_time_when_the_server_is_gone(own_server: LocalServer, driver: str) -> None:
    engine = create_async_engine(Database(own_server.dsn).url(driver))
    store = Store(engine)
    async with store.listen("prices"):
        await asyncio.to_thread(own_server.kill)
        assert await closed_in_time(store)
    await engine.dispose()
