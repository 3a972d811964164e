from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import ProgrammingError
from support.databases import migrate
from support.sessions import DOORS, NOTHING, Door, done, open_door, stored

from alkstore_sa import LeaseLost, SchemaMismatch, SchemaMissing, Store
from alkstore_sa.models import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.databases import Database, Databases
    from support.rows import Sql

AWKWARD = 'Käufer\'s "jobs" 100%(x)s :now \\ $1'
REMEDY = rf"op\.alkstore_upgrade\(to={SCHEMA_VERSION}, from_=0, schema='alkstore'\)"


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


@pytest.fixture(params=DOORS)
async def unmigrated(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[Door]:
    """A door to a database that has none of the engine's tables."""
    database = databases.create()
    async with open_door(database, request.param) as door:
        yield door
    databases.drop(database)


@pytest.fixture(params=DOORS)
async def awkward(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[Any]:
    """A store on a schema whose name has everything in it."""
    database = databases.create()
    migrate(database, schema=AWKWARD)
    async with open_door(database, request.param) as door:
        door.store = door.new_store(door.engine, schema=AWKWARD)
        yield door
    databases.drop(database)


# -- the schema's version ----------------------------------------------------------------------------------------------


async def test_check_passes_on_a_healthy_schema(door: Door) -> None:
    await done(door.store.check())


async def test_check_names_the_migration_where_the_tables_are_missing(unmigrated: Door) -> None:
    with pytest.raises(SchemaMissing, match=REMEDY):
        await done(unmigrated.store.check())


@pytest.mark.parametrize("operation", ["enqueue", "claim", "stats", "sweep"])
async def test_the_first_operation_says_that_the_tables_are_missing(unmigrated: Door, operation: str) -> None:
    store, queue = unmigrated.store, unmigrated.store.queue("orders")
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: queue.enqueue({}),
        "claim": lambda: queue.claim("w"),
        "stats": store.stats,
        "sweep": store.sweep_expired,
    }
    for _ in range(2):
        with pytest.raises(SchemaMissing):
            await done(calls[operation]())


async def test_a_store_works_once_the_migration_has_been_run(databases: Databases) -> None:
    database = databases.create()
    async with open_door(database, "asyncpg") as door:
        with pytest.raises(SchemaMissing):
            await door.store.queue("orders").enqueue({})
        await asyncio.to_thread(migrate, database)
        assert await door.store.queue("orders").enqueue({}) > 0
    databases.drop(database)


async def test_a_tx_call_on_missing_tables_shows_itself_at_the_flush_as_sqlalchemys_error(unmigrated: Door) -> None:
    session = unmigrated.session()
    unmigrated.store.queue("orders").enqueue_tx(session, {})
    with pytest.raises(ProgrammingError):
        await done(session.flush())


async def test_a_newer_schema_is_a_mismatch_that_says_to_upgrade_the_package(door: Door, sql: Sql) -> None:
    sql.execute("INSERT INTO alkstore.schema_version (version) VALUES (%s)", [SCHEMA_VERSION + 1])
    with pytest.raises(SchemaMismatch, match="upgrade alkstore_sa"):
        await done(door.store.check())
    with pytest.raises(SchemaMismatch, match=f"version {SCHEMA_VERSION + 1}"):
        await done(door.store.queue("orders").enqueue({}))
    assert stored(sql) == NOTHING


@pytest.mark.parametrize("version", [0, None])
async def test_an_older_schema_is_a_mismatch_that_names_the_migration(
    door: Door, sql: Sql, version: int | None
) -> None:
    sql.execute("DELETE FROM alkstore.schema_version")
    if version is not None:
        sql.execute("INSERT INTO alkstore.schema_version (version) VALUES (%s)", [version])
    with pytest.raises(SchemaMismatch, match=REMEDY):
        await done(door.store.check())
    with pytest.raises(SchemaMismatch, match=REMEDY):
        await done(door.store.queue("orders").enqueue({}))
    assert stored(sql) == NOTHING


async def test_check_looks_again_each_time(door: Door, sql: Sql) -> None:
    await done(door.store.check())
    sql.execute("INSERT INTO alkstore.schema_version (version) VALUES (%s)", [SCHEMA_VERSION + 1])
    with pytest.raises(SchemaMismatch):
        await done(door.store.check())


async def test_a_healthy_schema_is_checked_once(door: Door) -> None:
    await done(door.store.queue("orders").enqueue({}))
    sent = door.statements()
    await done(door.store.queue("orders").enqueue({}))
    assert len(sent) == 1


# -- a schema of another name ------------------------------------------------------------------------------------------


async def test_every_operation_works_in_a_schema_of_any_name(awkward: Door) -> None:
    store, queue = awkward.store, awkward.store.queue("orders")
    await done(store.check())
    await done(queue.enqueue_many(["retry", "fail", "release", "ack", "ack_tx"], expires=3600))
    retry, fail, release, ack, ack_tx = await done(queue.claim("w", 5))
    await done(queue.heartbeat_many([retry, fail]))
    assert await done(retry.retry("again", delay=3600)) == "pending"
    await done(fail.fail("no"))
    await done(release.release())
    await done(ack.ack())
    session = awkward.session()
    await done(ack_tx.ack_tx(session))
    await done(session.commit())
    assert await done(queue.next_due()) is not None
    assert await done(queue.cancel(retry.id))
    assert (await done(queue.claim("w")))[0].id == release.id
    assert (await done(queue.get_job(fail.id))).state == "dead"
    assert await done(store.sweep_expired()) == 0
    assert await done(store.sweep_dead(0)) == 1
    assert (await done(store.stats()))["orders"].processing == 1


async def test_a_stores_own_models_are_those_of_its_schema(awkward: Door) -> None:
    model = awkward.store.models.Job
    assert model.__table__.schema == AWKWARD
    session = awkward.session()
    job = awkward.store.queue("orders").enqueue_tx(session, {"order": "A"})
    await done(session.commit())
    found = (await done(session.scalars(select(model).where(model.payload["order"].astext == "A")))).one()
    assert found is job
    assert await done(awkward.store.queue("orders").get_job(job.id, session=session)) is not None


async def test_a_lost_lease_dooms_a_transaction_in_a_schema_of_any_name(awkward: Door) -> None:
    queue = awkward.store.queue("orders")
    await done(queue.enqueue({}))
    (job,) = await done(queue.claim("w"))
    await done(job.ack())
    session = awkward.session()
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(session.commit())


async def test_the_check_names_the_schema(unmigrated: Door) -> None:
    with pytest.raises(SchemaMissing) as raised:
        await done(unmigrated.new_store(unmigrated.engine, schema=AWKWARD).check())
    assert f"schema={AWKWARD!r}" in str(raised.value)


async def test_two_stores_in_one_database_do_not_see_each_other(databases: Databases) -> None:
    database = databases.create()
    for schema in ("one", "two"):
        await asyncio.to_thread(migrate, database, schema=schema)
    async with open_door(database, "asyncpg") as door:
        one, two = (Store(door.engine, schema=schema) for schema in ("one", "two"))
        await one.queue("orders").enqueue({})
        assert await two.queue("orders").claim("w") == []
        assert len(await one.queue("orders").claim("w")) == 1
    databases.drop(database)
