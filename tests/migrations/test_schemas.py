from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from support.catalog import catalog, has_schema
from support.revisions import operate, script
from support.roles import acting_as, make_role

from alkstore_sa import InvalidName, ReservedName, SyncStore, migrations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alembic.operations import Operations
    from support.databases import Database, Databases
    from support.rows import Sql

SCHEMAS = [
    "alkstore",
    'with "quotes"',
    "it's",
    "100%",
    "%s %(x)s",
    "a:b",
    "::text",
    "$alkstore$",
    "$alkstore_$ $alkstore$",
    "Größe",
    "a.b",
    "sel\\ect",
]
LATEST = migrations.LATEST


@pytest.fixture
def role(empty: Database) -> Iterator[str]:
    yield from make_role(empty)


def up(op: Operations, schema: str = "alkstore") -> None:
    migrations.upgrade(op, to=LATEST, from_=0, schema=schema)


def down(op: Operations, schema: str = "alkstore") -> None:
    migrations.downgrade(op, to=0, from_=LATEST, schema=schema)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_any_schema_name_works_in_both_drivers_and_in_a_script(databases: Databases, schema: str) -> None:
    made = []
    for way in ("psycopg", "asyncpg", "script"):
        database = databases.create()
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            if way == "script":
                connection.execute(script(partial(up, schema=schema)).encode())
            else:
                operate(database, partial(up, schema=schema), way)
            made.append(catalog(connection, schema))
        databases.drop(database)
    assert made[0]["relations"]
    assert made[0] == made[1]
    assert made[0] == made[2]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_store_works_in_any_schema(empty: Database, schema: str) -> None:
    operate(empty, partial(up, schema=schema))
    engine = create_engine(empty.url("psycopg"))
    store = SyncStore(engine, schema=schema)
    queue = store.queue("q")
    queue.enqueue(1)
    with store.begin() as session:
        queue.enqueue_tx(session, 2)
    jobs = queue.claim("w", 2)
    assert [job.payload for job in jobs] == [1, 2]
    jobs[0].ack()
    jobs[1].fail("no")
    assert store.sweep_expired() == 0
    engine.dispose()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_downgrade_removes_everything_in_any_schema(empty: Database, look: Sql, schema: str) -> None:
    operate(empty, partial(up, schema=schema))
    operate(empty, partial(down, schema=schema))
    assert not has_schema(look, schema)


def test_a_schema_that_an_administrator_made_is_used_and_not_dropped(empty: Database, look: Sql) -> None:
    look.execute("CREATE SCHEMA alkstore")
    operate(empty, up)
    assert catalog(look, "alkstore")["relations"]
    operate(empty, down)
    assert has_schema(look, "alkstore")
    assert not any(catalog(look, "alkstore").values())


def test_an_administrators_comment_on_the_schema_is_kept(empty: Database, look: Sql) -> None:
    look.execute("CREATE SCHEMA alkstore")
    look.execute("COMMENT ON SCHEMA alkstore IS 'jobs; ask ops'")
    operate(empty, up)
    assert look.execute("SELECT obj_description('alkstore'::regnamespace)").fetchone() == ("jobs; ask ops",)


def test_a_schema_that_holds_foreign_objects_is_kept_with_them(empty: Database, look: Sql) -> None:
    operate(empty, up)
    look.execute("CREATE TABLE alkstore.theirs (id int)")
    operate(empty, down)
    assert [row[0] for row in catalog(look, "alkstore")["relations"]] == ["theirs"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_role_that_owns_the_schema_and_may_not_create_schemas_can_run_it(
    empty: Database, look: Sql, role: str, driver: str
) -> None:
    look.execute(f'CREATE SCHEMA alkstore AUTHORIZATION "{role}"'.encode())
    for work in (up, down, up):
        operate(empty, work, driver, connect_args=acting_as(role, driver))
    owners = look.execute(
        "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = 'alkstore'::regnamespace"
    ).fetchall()
    assert owners == [(role,)]


def test_a_role_without_rights_gets_the_databases_error_and_leaves_nothing(
    empty: Database, look: Sql, role: str
) -> None:
    with pytest.raises(DBAPIError, match="permission denied"):
        operate(empty, up, connect_args=acting_as(role, "psycopg"))
    assert not has_schema(look, "alkstore")


@pytest.mark.parametrize("work", [up, down])
def test_the_schema_public_is_refused(empty: Database, look: Sql, work: Any) -> None:
    with pytest.raises(ReservedName, match="public"):
        operate(empty, partial(work, schema="public"))
    with pytest.raises(ReservedName, match="public"):
        script(partial(work, schema="public"))
    assert catalog(look, "public")["relations"] == []


@pytest.mark.parametrize("beforehand", [True, False])
def test_the_roles_default_schema_is_refused(empty: Database, look: Sql, role: str, *, beforehand: bool) -> None:
    look.execute(f'GRANT CREATE ON DATABASE "{look.info.dbname}" TO "{role}"'.encode())
    if beforehand:
        look.execute(f'CREATE SCHEMA shop AUTHORIZATION "{role}"'.encode())
    with pytest.raises(DBAPIError, match=r"shop.*own tables go by default"):
        operate(empty, partial(up, schema="shop"), connect_args=acting_as(role, "psycopg", search_path="shop"))
    assert not any(catalog(look, "shop").values())
    assert has_schema(look, "shop") is beforehand


def test_the_schema_named_like_the_role_is_its_default_and_refused(empty: Database, look: Sql, role: str) -> None:
    look.execute(f'GRANT CREATE ON DATABASE "{look.info.dbname}" TO "{role}"'.encode())
    with pytest.raises(DBAPIError, match="own tables go by default"):
        operate(empty, partial(up, schema=role), connect_args=acting_as(role, "psycopg"))


def test_a_store_refuses_the_roles_default_schema(empty: Database, role: str) -> None:
    operate(empty, up)
    engine = create_engine(empty.url("psycopg"), connect_args={"options": "-c search_path=alkstore"})
    with pytest.raises(ReservedName, match="alkstore"):
        SyncStore(engine).check()
    engine.dispose()


def test_the_search_path_has_no_say_in_where_the_tables_go(empty: Database, look: Sql) -> None:
    look.execute("CREATE SCHEMA other")
    operate(empty, up, connect_args={"options": "-c search_path=other"})
    assert catalog(look, "other")["relations"] == []
    assert catalog(look, "alkstore")["relations"]


def test_a_schema_that_is_only_second_on_the_search_path_is_used(empty: Database, look: Sql) -> None:
    operate(empty, up, connect_args={"options": "-c search_path=public,alkstore"})
    assert catalog(look, "alkstore")["relations"]


def test_migrating_one_schema_leaves_another_alone(empty: Database, look: Sql) -> None:
    operate(empty, up)
    before = catalog(look, "alkstore")
    operate(empty, partial(up, schema="second"))
    operate(empty, partial(down, schema="second"))
    assert catalog(look, "alkstore") == before


@pytest.mark.parametrize("schema", ["", "a" * 64, "ü" * 32, "a\0b", "pg_x", "information_schema"])
@pytest.mark.parametrize("work", [up, down])
def test_a_schema_name_that_no_store_takes_is_refused_before_the_first_statement(work: Any, schema: str) -> None:
    with pytest.raises((InvalidName, ReservedName)):
        script(partial(work, schema=schema))
