from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool
from support.sessions import DOORS, NOTHING, Door, Order, begun, done, open_door, stored, until

from alkstore_sa import BindError, Job, Store, SyncStore, UnsupportedDialect
from alkstore_sa.models import Base as EngineBase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


@pytest.fixture
def sqlite() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, reference TEXT)"))
    yield engine
    engine.dispose()


# -- on a connection ---------------------------------------------------------------------------------------------------


async def test_what_a_store_on_a_connection_does_is_rolled_back_with_it(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    queue = door.new_store(connection).queue("orders")
    await done(queue.enqueue_many([{"order": "A"}, {"order": "B"}, {"order": "C"}]))
    first, second = await done(queue.claim("w", 2))
    await done(first.ack())
    await done(second.fail("no"))
    stats = await done(queue.stats())
    assert (stats.pending, stats.processing, stats.dead) == (1, 0, 1)
    await done(outer.rollback())
    assert stored(sql) == NOTHING
    assert sql.execute("SELECT count(*) FROM alkstore.dead").fetchone() == (0,)


async def test_a_store_on_a_connection_does_not_commit(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    store = door.new_store(connection)
    await done(store.queue("orders").enqueue({"order": "A"}))
    await done(store.close())
    assert stored(sql) == NOTHING
    assert outer.is_active
    await done(outer.commit())
    assert stored(sql) == ([], ["A"])


async def test_begin_of_a_store_on_a_connection_stays_inside_its_transaction(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    store = door.new_store(connection)
    async with begun(store) as session:
        session.add(Order(reference="A"))
        store.queue("orders").enqueue_tx(session, {"order": "A"})
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  (the block is what is tested)
        async with begun(store) as session:
            session.add(Order(reference="B"))
            await done(session.flush())
            raise ZeroDivisionError
    assert stored(sql) == NOTHING
    await done(outer.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_store_on_a_connection_in_autocommit_is_refused(door: Door, sql: Sql) -> None:
    connection = await door.connect(door.engine.execution_options(isolation_level="AUTOCOMMIT"))
    with pytest.raises(BindError, match="AUTOCOMMIT"):
        await done(door.new_store(connection).queue("orders").enqueue({"order": "A"}))
    assert stored(sql) == NOTHING


# -- begin -------------------------------------------------------------------------------------------------------------


async def test_begin_commits_when_the_block_ends(door: Door, sql: Sql) -> None:
    async with begun(door.store) as session:
        session.add(Order(reference="A"))
        job = door.store.queue("orders").enqueue_tx(session, {"order": "A"})
        await done(session.flush())
        assert stored(sql) == NOTHING
    assert stored(sql) == (["A"], ["A"])
    assert job.payload == {"order": "A"}


async def test_begin_rolls_back_on_an_exception(door: Door, sql: Sql) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  (the block is what is tested)
        async with begun(door.store) as session:
            session.add(Order(reference="A"))
            door.store.queue("orders").enqueue_tx(session, {"order": "A"})
            await done(session.flush())
            raise ZeroDivisionError
    assert stored(sql) == NOTHING


async def test_reads_inside_begin_see_its_own_writes(door: Door) -> None:
    queue = door.store.queue("orders")
    async with begun(door.store) as session:
        job = queue.enqueue_tx(session, {"order": "A"})
        assert await done(session.scalar(select(func.count()).select_from(door.store.models.Job))) == 1
        assert await done(queue.get_job(job.id, session=session)) is not None


async def test_begin_gives_its_connection_back_after_a_commit_and_after_an_exception(door: Door) -> None:
    engine = door.new_engine(pool_size=1, max_overflow=0, pool_timeout=5)
    store = door.new_store(engine)
    for error in (None, ZeroDivisionError):
        with contextlib.suppress(ZeroDivisionError):
            async with begun(store) as session:
                store.queue("orders").enqueue_tx(session, {})
                await done(session.flush())
                if error is not None:
                    raise error
        await done(store.close())  # the wake, which takes a connection too, has been sent
        assert door.sync_engine(engine).pool.checkedout() == 0
    assert (await done(store.queue("orders").stats())).pending == 1


# -- close -------------------------------------------------------------------------------------------------------------


async def test_close_may_be_called_again_and_leaves_the_engine_open(door: Door) -> None:
    await done(door.store.queue("orders").enqueue({}))
    pool = door.sync_engine().pool
    await done(door.store.close())
    await done(door.store.close())
    assert door.sync_engine().pool is pool
    assert pool.checkedin() == 1
    assert (await done(door.new_store(door.engine).queue("orders").stats())).pending == 1


async def test_a_store_is_a_context_manager_that_needs_no_opening(engine: AsyncEngine, sync_engine: Engine) -> None:
    async with Store(engine) as store:
        await store.queue("orders").enqueue({})
    with SyncStore(sync_engine) as sync_store:
        sync_store.queue("orders").enqueue({})
    assert (await Store(engine).queue("orders").stats()).pending == 2


async def test_making_stores_and_handles_opens_no_connection(door: Door) -> None:
    sent = door.statements()
    door.new_store(door.engine).queue("orders")
    door.store.outbox("mails")
    await done(door.store.close())
    assert sent == []
    assert door.sync_engine().pool.checkedin() == 0


# -- the engine's own JSON hooks ---------------------------------------------------------------------------------------


def broken(_: object) -> Any:
    raise AssertionError("this hook must not be called")


async def test_the_engines_own_json_hooks_have_no_say(door: Door) -> None:
    engine = door.new_engine(json_serializer=broken, json_deserializer=broken)
    queue = door.new_store(engine).queue("orders")
    job_id = await done(queue.enqueue({"order": "A"}, headers={"trace": 1}))
    snapshot = await done(queue.get_job(job_id))
    assert (snapshot.payload, snapshot.headers) == ({"order": "A"}, {"trace": 1})
    (job,) = await done(queue.claim("w"))
    assert (job.payload, job.headers) == ({"order": "A"}, {"trace": 1})


async def test_the_engines_own_json_hooks_have_no_say_in_a_session_either(door: Door) -> None:
    engine = door.new_engine(json_serializer=broken, json_deserializer=broken)
    session = door.session(engine)
    added = door.new_store(engine).queue("orders").enqueue_tx(session, {"order": "A"}, headers={"trace": 1})
    await done(session.commit())
    job_id = added.id
    session.expunge_all()
    by_payload = select(Job).where(Job.payload["order"].astext == "A", Job.headers["trace"].as_integer() == 1)
    job = (await done(session.scalars(by_payload))).one()
    assert (job.id, job.payload, job.headers) == (job_id, {"order": "A"}, {"trace": 1})


# -- a small pool, and cancelled tasks ---------------------------------------------------------------------------------


async def test_a_pool_of_one_connection_is_enough(door: Door) -> None:
    store = door.new_store(door.new_engine(pool_size=1, max_overflow=0, pool_timeout=5))
    queue = store.queue("orders")
    await done(queue.enqueue_many(range(5)))
    for job in await done(queue.claim("w", 5)):
        await done(job.heartbeat())
        await done(job.ack())
    assert await done(store.sweep_expired()) == 0
    await done(store.check())


async def test_tasks_take_turns_on_a_pool_of_one(database: Database, driver: str) -> None:
    async with open_door(database, driver) as door:
        store = Store(door.new_engine(pool_size=1, max_overflow=0, pool_timeout=5))
        ids = await asyncio.gather(*(store.queue("orders").enqueue(n) for n in range(10)))
        assert len(set(ids)) == 10


@pytest.mark.parametrize("operation", ["enqueue", "enqueue_many", "claim", "begin"])
async def test_a_task_cancelled_in_the_middle_leaves_the_pool_usable(
    database: Database, sql: Sql, driver: str, operation: str
) -> None:
    async with open_door(database, driver) as door:
        engine = door.new_engine(pool_size=1, max_overflow=0, pool_timeout=5)
        store = Store(engine)
        queue = store.queue("orders")

        async def begin() -> None:
            async with store.begin() as session:
                queue.enqueue_tx(session, {})

        calls: dict[str, Callable[[], Any]] = {
            "enqueue": lambda: queue.enqueue({}),
            "enqueue_many": lambda: queue.enqueue_many(["x"] * 100_001),
            "claim": lambda: queue.claim("w"),
            "begin": begin,
        }
        await queue.stats()
        with sql.transaction():
            sql.execute("LOCK TABLE alkstore.job IN ACCESS EXCLUSIVE MODE")
            task = asyncio.ensure_future(calls[operation]())
            await until(lambda: sql.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: engine.pool.checkedout() == 0)
        job_id = await queue.enqueue("the next one")
        assert job_id in {job.id for job in await queue.claim("w", 10)}


# -- wrong kinds -------------------------------------------------------------------------------------------------------


def test_a_store_on_a_plain_engine_is_a_type_error_that_names_the_other_store(sync_engine: Engine) -> None:
    with pytest.raises(TypeError, match="SyncStore"):
        Store(sync_engine)  # type: ignore[arg-type]


def test_a_sync_store_on_an_async_engine_is_a_type_error_that_names_the_other_store(engine: AsyncEngine) -> None:
    with pytest.raises(TypeError, match="use Store"):
        SyncStore(engine)  # type: ignore[arg-type]


def test_a_store_on_sqlite_is_refused_before_any_sql(sqlite: Engine) -> None:
    with pytest.raises(UnsupportedDialect, match="sqlite"):
        SyncStore(sqlite)


def test_a_session_on_sqlite_is_refused(sync_store: SyncStore, sqlite: Engine) -> None:
    with Session(sqlite) as session, pytest.raises(UnsupportedDialect, match="sqlite"):
        sync_store.queue("orders").enqueue_tx(session, {})


def test_a_session_that_binds_the_engines_models_to_sqlite_is_refused(sync_store: SyncStore, sqlite: Engine) -> None:
    with Session(binds={EngineBase: sqlite}) as session, pytest.raises(UnsupportedDialect, match="sqlite"):
        sync_store.queue("orders").enqueue_tx(session, {})


def test_a_job_read_or_acknowledged_in_a_session_on_sqlite_is_refused(sync_store: SyncStore, sqlite: Engine) -> None:
    queue = sync_store.queue("orders")
    queue.enqueue({})
    (job,) = queue.claim("w")
    with Session(sqlite) as session:
        with pytest.raises(UnsupportedDialect):
            job.ack_tx(session)
        with pytest.raises(UnsupportedDialect):
            queue.get_job(job.id, session=session)
    assert queue.get_job(job.id) is not None


async def test_a_session_that_writes_to_sqlite_and_postgresql_is_refused(
    database: Database, sql: Sql, sqlite: Engine
) -> None:
    async with open_door(database, "sync psycopg") as door:
        session = door.session(None, binds={Order: sqlite, Job: door.engine})
        session.add(Order(reference="A"))
        door.store.queue("orders").enqueue_tx(session, {"order": "A"})
        with pytest.raises(BindError, match="sqlite"):
            session.commit()
        session.rollback()
        assert stored(sql) == NOTHING
    with Session(sqlite) as look:
        assert look.scalars(select(Order)).all() == []


# -- what is no session ------------------------------------------------------------------------------------------------


async def test_a_maker_or_a_connection_in_the_place_of_a_session_is_a_type_error(door: Door) -> None:
    queue = door.store.queue("orders")
    for wrong in (sessionmaker(), door.engine, await door.connect(), None):
        with pytest.raises(TypeError, match="no session"):
            queue.enqueue_tx(wrong, {})
        with pytest.raises(TypeError, match="no session"):
            await done(queue.get_job(1, session=wrong or object()))
