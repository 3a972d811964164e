"""Notifications from their sender's commit to their subscribers, through the server.

That something is not delivered is proved by what is delivered after it: notifications arrive in the order of commits.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql as composed
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool
from support.plain_sql import number
from support.waiting import DEADLINE, until

from alkstore_sa import (
    BindError,
    InvalidName,
    Lagged,
    PayloadError,
    PayloadTooLarge,
    ReservedName,
    Store,
    SyncStore,
    UnsupportedDialect,
)
from alkstore_sa._wire import Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa.listen import Notifications

SMILE = "\N{GRINNING FACE}"
ODD_NAMES = ["a", "'", '"', 'a"b', "a'b", "100%", "%s", ":x", "$1", "a b", "a.b", "\\", "A", "é" * 31, SMILE * 15]
LONG_NAMES = ["a" * 63, "a" * 64, "a" * 200, 'é"%' * 60]

BACKENDS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""


async def take(notifications: Notifications, n: int = 1) -> list[str]:
    """Return the payloads of the next `n` notifications."""
    return [(await asyncio.wait_for(anext(notifications), DEADLINE)).payload for _ in range(n)]


async def arrives(store: Store, notifications: Notifications, channel: str = "prices") -> bool:
    """Tell whether what is notified now is what arrives next."""
    await store.notify(channel, "now")
    return await take(notifications) == ["now"]


@asynccontextmanager
async def opened(database: Database, driver: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Yield an engine of the test's own."""
    engine = create_async_engine(database.url(driver), **options)
    yield engine
    await engine.dispose()


def last_statements(sql: Sql) -> list[str]:
    """Return what each other connection to the database has sent last."""
    query = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return [str(row[0]) for row in sql.execute(query)]


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What listening connections send from now on, by name."""
    sent: list[str] = []
    bounded = Wire._bounded

    async def note(self: Wire, operation: Any) -> Any:
        sent.append(operation.__name__)
        return await bounded(self, operation)

    monkeypatch.setattr(Wire, "_bounded", note)
    return sent


# -- delivered at the commit, dropped at the rollback ------------------------------------------------------------------


async def test_a_notification_arrives(store: Store) -> None:
    async with store.listen("prices") as notifications:
        await store.notify("prices", "42")
        (found,) = [await asyncio.wait_for(anext(notifications), DEADLINE)]
    assert (found.channel, found.payload, found.is_reconnect) == ("prices", "42", False)


async def test_a_notification_needs_no_payload(store: Store) -> None:
    async with store.listen("prices") as notifications:
        await store.notify("prices")
        assert await take(notifications) == [""]


async def test_a_sync_store_notifies_too(store: Store, sync_store: SyncStore) -> None:
    async with store.listen("prices") as notifications:
        sync_store.notify("prices", "42")
        assert await take(notifications) == ["42"]


async def test_notifications_arrive_in_the_order_of_the_commits(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, AsyncSession(engine) as late, AsyncSession(engine) as early:
        await store.notify_tx(late, "prices", "first sent")
        await store.notify_tx(early, "prices", "first committed")
        await early.commit()
        await late.commit()
        assert await take(notifications, 2) == ["first committed", "first sent"]


async def test_a_transaction_notifies_when_it_commits_and_not_before(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, AsyncSession(engine) as session:
        await store.notify_tx(session, "prices", "in")
        await store.notify("prices", "between")
        assert await take(notifications) == ["between"]
        await session.commit()
        assert await take(notifications) == ["in"]


async def test_a_sync_session_notifies_when_it_commits_and_not_before(store: Store, sync_engine: Engine) -> None:
    async with store.listen("prices") as notifications:
        with Session(sync_engine) as session:
            store.notify_tx(session, "prices", "in")
            await store.notify("prices", "between")
            assert await take(notifications) == ["between"]
            session.commit()
        assert await take(notifications) == ["in"]


async def test_a_sync_stores_transaction_notifies_when_it_commits(
    store: Store, sync_store: SyncStore, sync_engine: Engine
) -> None:
    async with store.listen("prices") as notifications:
        with Session(sync_engine) as session:
            sync_store.notify_tx(session, "prices", "in")
            session.commit()
        assert await take(notifications) == ["in"]


async def test_a_rollback_drops_the_notification(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, AsyncSession(engine) as session:
        await store.notify_tx(session, "prices", "dropped")
        await session.rollback()
        assert await arrives(store, notifications)


async def test_a_rollback_of_a_sync_session_drops_the_notification(store: Store, sync_engine: Engine) -> None:
    async with store.listen("prices") as notifications:
        with Session(sync_engine) as session:
            store.notify_tx(session, "prices", "dropped")
            session.rollback()
        assert await arrives(store, notifications)


async def test_a_rolled_back_savepoint_drops_its_own_notifications_alone(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, AsyncSession(engine) as session:
        await store.notify_tx(session, "prices", "before")
        savepoint = await session.begin_nested()
        await store.notify_tx(session, "prices", "dropped")
        await savepoint.rollback()
        async with session.begin_nested():
            await store.notify_tx(session, "prices", "after")
        await session.commit()
        assert await take(notifications, 2) == ["before", "after"]


async def test_a_rolled_back_savepoint_of_a_sync_session_drops_its_own_notifications_alone(
    store: Store, sync_engine: Engine
) -> None:
    async with store.listen("prices") as notifications:
        with Session(sync_engine) as session:
            savepoint = session.begin_nested()
            store.notify_tx(session, "prices", "dropped")
            savepoint.rollback()
            with session.begin_nested():
                store.notify_tx(session, "prices", "after")
            session.commit()
        assert await take(notifications) == ["after"]


async def test_the_sessions_of_begin_notify(store: Store) -> None:
    async with store.listen("prices") as notifications:
        async with store.begin() as session:
            await store.notify_tx(session, "prices", "in")
        assert await take(notifications) == ["in"]


async def test_a_scoped_session_notifies(store: Store, engine: AsyncEngine) -> None:
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    async with store.listen("prices") as notifications:
        await store.notify_tx(scoped, "prices", "in")
        await scoped.commit()
        await scoped.remove()
        assert await take(notifications) == ["in"]


async def test_what_an_async_session_is_not_awaited_for_is_not_sent(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, AsyncSession(engine) as session:
        forgotten: Any = store.notify_tx(session, "prices", "forgotten")
        await session.commit()
        assert await arrives(store, notifications)
        forgotten.close()


async def test_a_store_on_a_connection_notifies_when_that_commits(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications, engine.connect() as connection:
        within = Store(connection)
        await connection.begin()
        await within.notify("prices", "dropped")
        await connection.rollback()
        await connection.begin()
        await within.notify("prices", "in")
        await store.notify("prices", "between")
        await connection.commit()
        assert await take(notifications, 2) == ["between", "in"]


async def test_a_two_phase_session_is_refused_before_it_has_begun(
    store: Store, engine: AsyncEngine, sync_engine: Engine
) -> None:
    with Session(sync_engine, twophase=True) as session:
        with pytest.raises(BindError, match=r"two phases.*after its commit"):
            store.notify_tx(session, "prices", "x")
        assert not session.in_transaction()
    async with AsyncSession(engine, twophase=True) as async_session:
        with pytest.raises(BindError, match="two phases"):
            await store.notify_tx(async_session, "prices", "x")
        assert not async_session.in_transaction()


async def test_an_autocommit_session_is_refused_and_nothing_is_sent(
    store: Store, engine: AsyncEngine, sync_engine: Engine
) -> None:
    async with store.listen("prices") as notifications:
        with (
            Session(sync_engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
            pytest.raises(BindError, match="AUTOCOMMIT"),
        ):
            store.notify_tx(session, "prices", "refused")
        async with AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as async_session:
            with pytest.raises(BindError, match="AUTOCOMMIT"):
                await store.notify_tx(async_session, "prices", "refused")
        assert await arrives(store, notifications)


async def test_another_database_is_refused(store: Store) -> None:
    with Session(create_engine("sqlite://")) as session, pytest.raises(UnsupportedDialect):
        store.notify_tx(session, "prices", "x")


# -- names and payloads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ODD_NAMES, *LONG_NAMES])
async def test_a_channel_of_any_name_works_from_end_to_end(store: Store, engine: AsyncEngine, name: str) -> None:
    async with store.listen(name) as notifications, AsyncSession(engine) as session:
        await store.notify(name, "one")
        await store.notify_tx(session, name, "two")
        await session.commit()
        found = [await asyncio.wait_for(anext(notifications), DEADLINE) for _ in range(2)]
    assert [(one.channel, one.payload) for one in found] == [(name, "one"), (name, "two")]


async def test_any_other_clients_plain_notify_arrives(store: Store, sql: Sql) -> None:
    names = [*ODD_NAMES, "a" * 63]
    async with store.listen(*names) as notifications:
        for name in names:
            sql.execute(composed.SQL("NOTIFY {}, 'plain'").format(composed.Identifier(name)))
            sql.execute("SELECT pg_notify(%s, %s)", [name, SMILE])
        found = [await asyncio.wait_for(anext(notifications), DEADLINE) for _ in range(2 * len(names))]
    assert [(one.channel, one.payload) for one in found] == [
        (n, payload) for n in names for payload in ("plain", SMILE)
    ]


async def test_any_other_clients_plain_listen_hears_ours(store: Store, sql: Sql) -> None:
    names = [*ODD_NAMES, "a" * 63]
    for name in names:
        sql.execute(composed.SQL("LISTEN {}").format(composed.Identifier(name)))
        await store.notify(name, "ours")
    found = sql.notifies(timeout=DEADLINE, stop_after=len(names))
    assert [(one.channel, one.payload) for one in found] == [(name, "ours") for name in names]


async def test_names_that_postgresql_would_cut_to_one_are_told_apart(store: Store) -> None:
    async with store.listen("a" * 63) as short, store.listen("a" * 64) as long, store.listen("a" * 65) as longer:
        for length in (64, 65, 63):
            await store.notify("a" * length, str(length))
        assert [await take(one) for one in (short, long, longer)] == [["63"], ["64"], ["65"]]


async def test_upper_and_lower_case_are_different_channels(store: Store) -> None:
    async with store.listen("Prices") as notifications:
        await store.notify("prices", "another")
        assert await arrives(store, notifications, "Prices")


async def test_a_subscriber_may_have_many_channels(store: Store) -> None:
    async with store.listen("a", "b" * 100, "c") as notifications:
        for name in ("c", "b" * 100, "a"):
            await store.notify(name)
        found = [await asyncio.wait_for(anext(notifications), DEADLINE) for _ in range(3)]
    assert [one.channel for one in found] == ["c", "b" * 100, "a"]


@pytest.mark.parametrize("payload", ["a" * 7999, "é" * 3999 + "a", SMILE * 1999, "'\"%s\\\n\t:x", "\x01"])
async def test_a_payload_of_up_to_7999_bytes_arrives_as_it_is(store: Store, payload: str) -> None:
    async with store.listen("prices") as notifications:
        await store.notify("prices", payload)
        assert await take(notifications) == [payload]


@pytest.mark.parametrize("payload", ["a" * 8000, "é" * 4000])
async def test_a_payload_of_8000_bytes_is_refused_before_the_round_trip(engine: AsyncEngine, payload: str) -> None:
    store = Store(create_async_engine("postgresql+asyncpg://127.0.0.1:1/nowhere"))
    with pytest.raises(PayloadTooLarge, match="less than 8000 bytes"):
        await store.notify("prices", payload)
    async with AsyncSession(engine) as session:
        with pytest.raises(PayloadTooLarge):
            await store.notify_tx(session, "prices", payload)
        assert not session.in_transaction()


async def test_bad_arguments_are_refused_before_the_round_trip() -> None:
    store: Any = Store(create_async_engine("postgresql+asyncpg://127.0.0.1:1/nowhere"))
    with pytest.raises(PayloadError, match="not dict"):
        await store.notify("prices", {"id": 7})
    with pytest.raises(InvalidName):
        await store.notify("")
    with pytest.raises(ReservedName):
        await store.notify("__alkstore_x")
    with pytest.raises(ReservedName):
        store.listen("prices", "__alkstore_x")
    with pytest.raises(ValueError, match="at least one channel"):
        store.listen()


def test_a_sync_store_refuses_bad_arguments_too(sync_store: SyncStore) -> None:
    with pytest.raises(PayloadTooLarge):
        sync_store.notify("prices", "a" * 8000)
    with pytest.raises(ReservedName):
        sync_store.notify("__alkstore_x")


# -- subscribers -------------------------------------------------------------------------------------------------------


async def test_every_subscriber_hears_everything_on_its_channels_and_nothing_else(store: Store) -> None:
    async with store.listen("a") as one, store.listen("a", "b") as other, store.listen("b") as third:
        for channel in ("a", "b", "a"):
            await store.notify(channel, channel)
        assert await take(one, 2) == ["a", "a"]
        assert await take(other, 3) == ["a", "b", "a"]
        assert await take(third) == ["b"]
        await store.notify("a", "last")
        assert await take(one) == ["last"]


async def test_two_stores_hear_each_other(store: Store, engine: AsyncEngine) -> None:
    async with Store(engine) as other, store.listen("prices") as notifications, other.listen("prices") as others:
        await other.notify("prices", "from the other")
        assert await take(notifications) == ["from the other"]
        assert await take(others) == ["from the other"]


async def test_a_burst_of_thousands_arrives_complete_and_in_order(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices", buffer=5000) as notifications, AsyncSession(engine) as session:
        for n in range(100):
            await store.notify_tx(session, "prices", f"{n}:{'x' * 4000}")
        await session.commit()
        connection = await session.connection()
        await connection.exec_driver_sql("SELECT pg_notify('prices', n::text) FROM generate_series(1, 3000) AS n")
        await session.commit()
        found = await take(notifications, 3100)
    assert [payload.partition(":")[0] for payload in found] == [*map(str, range(100)), *map(str, range(1, 3001))]


async def test_a_subscriber_that_never_reads_lags_and_the_others_do_not_notice(store: Store) -> None:
    async with store.listen("prices", buffer=2) as slow, store.listen("prices") as quick:
        for n in range(10):
            await store.notify("prices", str(n))
        assert await take(quick, 10) == [*map(str, range(10))]
        assert await take(slow, 2) == ["0", "1"]
        with pytest.raises(Lagged) as gap:
            await take(slow)
        assert gap.value.missed == 8
        assert await arrives(store, slow)
        assert await take(quick) == ["now"]


async def test_a_further_subscriber_to_a_channel_costs_no_round_trip(store: Store, round_trips: list[str]) -> None:
    async with store.listen("prices") as first:
        assert round_trips.count("listen") == 1
        before = len(round_trips)
        async with AsyncExitStack() as stack:
            more = [await stack.enter_async_context(store.listen("prices")) for _ in range(20)]
            assert len(round_trips) == before
            await store.notify("prices", "42")
            assert [await take(one) for one in (first, *more)] == [["42"]] * 21
        assert len(round_trips) == before


async def test_one_channel_more_costs_one_listen(store: Store, round_trips: list[str]) -> None:
    async with store.listen("a", "b"):
        before = round_trips.count("listen")
        async with store.listen("b", "c") as notifications:
            assert round_trips.count("listen") == before + 1
            assert await arrives(store, notifications, "c")


async def test_subscribers_that_begin_at_once_share_one_connection(store: Store, sql: Sql) -> None:
    async with AsyncExitStack() as stack:
        subscribing = [stack.enter_async_context(store.listen("prices", str(n % 5))) for n in range(50)]
        subscribers = await asyncio.gather(*subscribing)
        assert number(sql, BACKENDS) == 1
        await store.notify("prices", "42")
        assert [await take(one) for one in subscribers] == [["42"]] * 50


async def test_a_channel_that_nobody_waits_for_any_more_is_listened_to_no_more(
    engine: AsyncEngine, sql: Sql, round_trips: list[str]
) -> None:
    async with Store(engine, listen_timeout=0.5) as store, store.listen("kept") as notifications:
        async with store.listen("prices"):
            pass
        await until(lambda: "unlisten" in round_trips and "prices" not in store._listener._listening)
        assert await arrives(store, notifications, "kept")
        async with store.listen("prices") as again:
            assert await arrives(store, again)


async def test_each_channel_of_the_last_subscriber_is_unlistened(
    engine: AsyncEngine, sql: Sql, round_trips: list[str]
) -> None:
    async with Store(engine, listen_timeout=0.5) as store, store.listen("kept"):
        async with store.listen("a", "b", "kept"):
            pass
        await until(lambda: round_trips.count("unlisten") == 2)


async def test_who_comes_back_just_after_the_last_has_left_hears_everything(store: Store) -> None:
    for n in range(20):
        async with store.listen("prices") as notifications:
            await store.notify("prices", str(n))
            assert await take(notifications) == [str(n)]


async def test_a_subscriber_that_gives_up_while_it_waits_to_begin_leaves_nothing_behind(store: Store) -> None:
    subscription = store.listen("prices")
    beginning = asyncio.ensure_future(subscription.__aenter__())
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.wait({beginning})
    assert beginning.cancelled()
    assert store._core.hub.channels() == set()
    async with store.listen("prices") as notifications:
        assert await arrives(store, notifications)


async def test_an_error_in_the_block_ends_the_subscription(store: Store) -> None:
    with pytest.raises(ZeroDivisionError):
        async with store.listen("prices"):
            raise ZeroDivisionError
    assert store._core.hub.channels() == set()


# -- the connection ----------------------------------------------------------------------------------------------------


async def test_no_connection_is_opened_before_there_is_a_subscriber(store: Store, sql: Sql) -> None:
    store.listen("prices")
    await asyncio.sleep(0)
    assert number(sql, BACKENDS) == 0


async def test_a_process_that_listens_uses_its_pool_and_one_connection_more(
    database: Database, driver: str, sql: Sql
) -> None:
    async with opened(database, driver, pool_size=2, max_overflow=0) as engine, Store(engine) as store:
        async with store.listen("a"), store.listen("b"), store.listen("c"):
            async with engine.connect() as one, engine.connect() as two:
                await one.exec_driver_sql("SELECT 1")
                await two.exec_driver_sql("SELECT 1")
                assert number(sql, BACKENDS) == 3
            await store.notify("a")
        assert number(sql, BACKENDS) == 3


async def test_the_listener_needs_none_of_the_pools_connections(database: Database, driver: str, sql: Sql) -> None:
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    async with (
        opened(database, driver, **options) as engine,
        Store(engine) as store,
        engine.connect(),
        store.listen("prices") as notifications,
    ):
        sql.execute("NOTIFY prices, 'x'")
        assert await take(notifications) == ["x"]


async def test_a_pool_of_one_suffices_for_notify_and_listen(database: Database, driver: str) -> None:
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}
    async with (
        opened(database, driver, **options) as engine,
        Store(engine) as store,
        store.listen("prices") as notifications,
    ):
        assert await arrives(store, notifications)


@pytest.mark.parametrize("pool", [NullPool, StaticPool])
async def test_an_engine_without_a_queue_of_connections_listens_too(
    database: Database, driver: str, pool: type[Any]
) -> None:
    async with (
        opened(database, driver, poolclass=pool) as engine,
        Store(engine) as store,
        store.listen("prices") as notifications,
    ):
        assert await arrives(store, notifications)


async def test_disposing_of_the_engines_pool_leaves_the_listener_alone(store: Store, engine: AsyncEngine) -> None:
    async with store.listen("prices") as notifications:
        await engine.dispose()
        assert await arrives(store, notifications)


async def test_the_listener_is_opened_with_the_engines_connect_args(database: Database, driver: str, sql: Sql) -> None:
    settings = {"application_name": "the shop's listener"}
    arguments: dict[str, Any] = {"server_settings": settings} if driver == "asyncpg" else settings
    async with (
        opened(database, driver, connect_args=arguments) as engine,
        Store(engine) as store,
        store.listen("prices"),
    ):
        assert number(sql, BACKENDS) == 1
        assert number(sql, f"{BACKENDS} AND application_name = %s", "the shop's listener") == 1


async def test_a_connect_listener_that_leaves_a_transaction_open_delays_no_notification(
    database: Database, driver: str, sql: Sql
) -> None:
    async with opened(database, driver) as engine, Store(engine) as store:
        event.listen(engine.sync_engine, "connect", leave_a_transaction_open)
        async with store.listen("prices") as notifications:
            assert number(sql, f"{BACKENDS} AND application_name = 'prepared' AND state = 'idle'") == 1
            sql.execute("NOTIFY prices, 'x'")
            assert await take(notifications) == ["x"]


async def test_a_connect_listener_that_leaves_a_transaction_open_keeps_no_operation_from_working(
    database: Database, driver: str
) -> None:
    async with opened(database, driver) as engine, Store(engine) as store:
        event.listen(engine.sync_engine, "connect", leave_a_transaction_open)
        async with engine.connect():  # SQLAlchemy itself ends the transaction of the first connection, and of no other
            await store.notify("prices", "x")


def leave_a_transaction_open(connection: Any, _record: Any) -> None:
    """Do what many applications do to a new connection."""
    cursor = connection.cursor()
    cursor.execute("SET application_name = 'prepared'")
    cursor.close()


async def test_a_do_connect_listener_that_brings_the_password_is_heard(database: Database, driver: str) -> None:
    url = make_url(database.url(driver))
    engine = create_async_engine(url.set(password="outdated"))
    asked: list[str] = []

    @event.listens_for(engine.sync_engine, "do_connect")
    def bring(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        asked.append("password")
        parameters["password"] = url.password

    async with Store(engine) as store, store.listen("prices"):
        assert asked
    await engine.dispose()


async def test_an_async_creator_opens_the_listener_too(database: Database, driver: str, sql: Sql) -> None:
    async def create() -> Any:
        if driver == "psycopg":
            return await psycopg.AsyncConnection.connect(database.dsn, application_name="created")
        import asyncpg  # noqa: PLC0415

        return await asyncpg.connect(database.dsn, server_settings={"application_name": "created"})

    engine = create_async_engine(f"postgresql+{driver}://nobody@127.0.0.1:1/nowhere", async_creator=create)
    async with Store(engine) as store, store.listen("prices") as notifications:
        assert number(sql, f"{BACKENDS} AND application_name = 'created'") == 1
        assert await arrives(store, notifications)
    await engine.dispose()


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE", "REPEATABLE READ"])
async def test_the_engines_isolation_level_does_not_matter(database: Database, driver: str, level: str) -> None:
    async with (
        opened(database, driver, isolation_level=level) as engine,
        Store(engine) as store,
        store.listen("prices") as notifications,
    ):
        assert await arrives(store, notifications)


async def test_listening_needs_no_table_of_the_engines(store: Store, sql: Sql) -> None:
    sql.execute("DROP SCHEMA alkstore CASCADE")
    async with store.listen("prices") as notifications:
        assert await arrives(store, notifications)


async def test_a_listen_engine_is_listened_on_in_the_engines_stead(database: Database, driver: str, sql: Sql) -> None:
    async with (
        opened(database, "psycopg", connect_args={"application_name": "direct"}) as direct,
        opened(database, driver) as engine,
        Store(engine, listen_engine=direct) as store,
        store.listen("prices") as notifications,
    ):
        assert number(sql, f"{BACKENDS} AND application_name = 'direct'") == 1
        assert number(sql, BACKENDS) == 1
        assert await arrives(store, notifications)


async def test_with_no_server_at_all_entering_raises_the_drivers_error(driver: str) -> None:
    engine = create_async_engine(f"postgresql+{driver}://nobody@127.0.0.1:1/nowhere")
    async with Store(engine) as store:
        with pytest.raises((DBAPIError, OSError)):
            async with store.listen("prices"):
                pass
        assert store._core.hub.channels() == set()
    await engine.dispose()


# -- who cannot listen -------------------------------------------------------------------------------------------------


async def test_a_store_that_polls_does_not_listen(engine: AsyncEngine, sql: Sql) -> None:
    async with Store(engine, wakes="poll") as store:
        with pytest.raises(BindError, match="wakes='poll'"):
            async with store.listen("prices"):
                pass
        await store.notify("prices", "it notifies all the same")
    assert not [query for query in last_statements(sql) if query.startswith("LISTEN")]


async def test_a_store_on_a_connection_does_not_listen(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        store = Store(connection)
        with pytest.raises(BindError, match=r"store on a connection.*on the engine"):
            async with store.listen("prices"):
                pass


async def test_another_word_than_listen_or_poll_is_refused(engine: AsyncEngine) -> None:
    wakes: Any = "notify"
    with pytest.raises(ValueError, match="'listen' or 'poll'"):
        Store(engine, wakes=wakes)


@pytest.mark.parametrize("timeout", [0, -1, "10"])
async def test_the_listen_timeout_is_a_positive_duration(engine: AsyncEngine, timeout: Any) -> None:
    with pytest.raises(ValueError, match="listen_timeout"):
        Store(engine, listen_timeout=timeout)


async def test_a_closed_store_does_not_listen(store: Store) -> None:
    await store.close()
    with pytest.raises(BindError, match="closed"):
        async with store.listen("prices"):
            pass


async def test_a_store_that_listens_belongs_to_its_event_loop(store: Store) -> None:
    async def elsewhere() -> None:
        async with store.listen("prices"):
            pass

    async with store.listen("prices") as notifications:
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        assert await arrives(store, notifications)


def test_a_store_whose_event_loop_has_ended_listens_on_the_next(database: Database, driver: str, sql: Sql) -> None:
    store = Store(create_async_engine(database.url(driver), poolclass=NullPool))

    async def hear() -> bool:
        async with store.listen("prices") as notifications:
            return await arrives(store, notifications)

    assert asyncio.run(hear())
    assert asyncio.run(hear())
    asyncio.run(store.close())
    asyncio.run(until(lambda: number(sql, BACKENDS) == 0))


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_closing_the_store_ends_every_iteration(store: Store) -> None:
    async with store.listen("a") as one, store.listen("a", "b") as other:
        waiting = [asyncio.ensure_future(anext(subscriber, None)) for subscriber in (one, other)]
        await asyncio.sleep(0)
        await store.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE) == [None, None]


async def test_what_had_arrived_is_handed_out_before_the_iteration_ends(store: Store) -> None:
    async with store.listen("prices") as notifications, store.listen("prices") as other:
        await store.notify("prices", "42")
        await take(other)
        await store.close()
        assert [found.payload async for found in notifications] == ["42"]


async def test_closing_a_store_while_a_subscriber_begins_ends_the_wait(store: Store) -> None:
    subscription = store.listen("prices")
    beginning = asyncio.ensure_future(subscription.__aenter__())
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(BindError, match="closed"):
        await asyncio.wait_for(beginning, DEADLINE)


async def test_a_closed_store_leaves_no_task_and_no_connection_behind(engine: AsyncEngine, sql: Sql) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    before = asyncio.all_tasks()
    store = Store(engine)
    async with store.listen("prices") as notifications:
        assert await arrives(store, notifications)
    await store.close()
    assert asyncio.all_tasks() == before
    await engine.dispose()
    gc.collect()  # a connection that was forgotten would say so here, and fail the test
    await until(lambda: number(sql, BACKENDS) == 0)


async def test_a_store_may_be_closed_twice_and_without_ever_having_listened(engine: AsyncEngine) -> None:
    store = Store(engine)
    await store.close()
    await store.close()


def test_a_loop_that_ends_without_a_close_leaves_no_connection_behind(
    database: Database, driver: str, sql: Sql
) -> None:
    store = Store(create_async_engine(database.url(driver), poolclass=NullPool))

    async def hear() -> bool:
        async with store.listen("prices") as notifications:
            return await arrives(store, notifications)

    assert asyncio.run(hear(), debug=True)
    gc.collect()
    asyncio.run(until(lambda: number(sql, BACKENDS) == 0))
