from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema
from support.catalog import catalog, has_schema
from support.databases import alembic_config, migrate
from support.revisions import operate, script

import alkstore_sa.models
from alembic import command
from alkstore_sa import SchemaMismatch, SyncStore, UnsupportedDialect, migrations, models_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.databases import Database, Databases
    from support.rows import Sql

LATEST = migrations.LATEST


def up(op: Operations, schema: str = "alkstore") -> None:
    migrations.upgrade(op, to=LATEST, from_=0, schema=schema)


def down(op: Operations, schema: str = "alkstore") -> None:
    migrations.downgrade(op, to=0, from_=LATEST, schema=schema)


@pytest.fixture
def modelled(databases: Databases) -> Iterator[Sql]:
    """A database in which the models made the tables."""
    database = databases.create()
    engine = create_engine(database.url("psycopg"))
    with engine.begin() as connection:
        connection.execute(CreateSchema("alkstore"))
        models_for().metadata.create_all(connection)
    engine.dispose()
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection
    databases.drop(database)


def test_the_models_are_of_the_newest_version() -> None:
    assert alkstore_sa.models.SCHEMA_VERSION == LATEST


def test_autogenerate_sees_no_difference_between_the_steps_and_the_models(empty: Database) -> None:
    operate(empty, up)
    engine = create_engine(empty.url("psycopg"))
    with engine.connect() as connection:
        options = {"include_schemas": True, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, models_for().metadata) == []
    engine.dispose()


@pytest.mark.parametrize(
    "kind",
    [
        "relations",
        "columns",
        "constraints",
        "indexes",
        "sequences",
        "types",
        "functions",
        "triggers",
        "rules",
        "policies",
    ],
)
def test_the_steps_and_the_models_make_the_same(empty: Database, look: Sql, modelled: Sql, kind: str) -> None:
    operate(empty, up)
    assert catalog(look, "alkstore")[kind] == catalog(modelled, "alkstore")[kind]


def test_there_are_no_functions_and_no_triggers(empty: Database, look: Sql) -> None:
    operate(empty, up)
    made = catalog(look, "alkstore")
    assert made["functions"] == made["triggers"] == made["rules"] == made["policies"] == []


def test_the_steps_use_no_extension(empty: Database, look: Sql) -> None:
    operate(empty, up)
    assert look.execute("SELECT extname FROM pg_extension").fetchall() == [("plpgsql",)]


@pytest.mark.parametrize("way", ["psycopg", "asyncpg", "script"])
def test_up_down_and_up_again_is_the_same_as_up(empty: Database, look: Sql, way: str) -> None:
    def run(work: Any) -> None:
        if way == "script":
            look.execute(script(work).encode())
        else:
            operate(empty, work, way)

    run(up)
    once = catalog(look, "alkstore")
    run(down)
    assert not has_schema(look, "alkstore")
    run(up)
    assert catalog(look, "alkstore") == once


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_stand_alone_environment_goes_up_and_down_in_both_drivers(empty: Database, look: Sql, driver: str) -> None:
    config = alembic_config(empty, schema="x y", driver=driver)
    command.upgrade(config, "head")
    assert catalog(look, "x y")["relations"]
    command.downgrade(config, "base")
    assert not has_schema(look, "x y")


def test_the_version_is_recorded_and_read(empty: Database) -> None:
    seen: list[int] = []

    def work(op: Operations) -> None:
        seen.append(migrations.current(op.get_bind()))
        up(op)
        seen.append(migrations.current(op.get_bind()))
        down(op)
        seen.append(migrations.current(op.get_bind()))

    operate(empty, work)
    assert seen == [0, LATEST, 0]


def test_a_repeated_upgrade_or_downgrade_changes_nothing(empty: Database, look: Sql) -> None:
    operate(empty, up)
    look.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('q', '1')")
    once = catalog(look, "alkstore")
    operate(empty, up)
    assert catalog(look, "alkstore") == once
    assert look.execute("SELECT count(*) FROM alkstore.job").fetchone() == (1,)
    operate(empty, down)
    operate(empty, down)
    assert not has_schema(look, "alkstore")


class Interrupted(Exception):
    """Raised in place of a statement."""


def run_until(database: Database, work: Any, last: int) -> bool:
    """Run `work` and interrupt it before statement number `last`; tell whether it came to its end."""
    engine = create_engine(database.url("psycopg"))
    count = 0

    def before(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > last:
            raise Interrupted

    event.listen(engine, "before_cursor_execute", before)
    try:
        with engine.begin() as connection:
            work(Operations(MigrationContext.configure(connection)))
    except Interrupted:
        return False
    finally:
        engine.dispose()
    return True


@pytest.mark.parametrize("direction", ["up", "down"])
def test_interrupted_between_any_two_statements_it_can_be_repeated(empty: Database, look: Sql, direction: str) -> None:
    if direction == "down":
        operate(empty, up)
    before = catalog(look, "alkstore")
    work = up if direction == "up" else down
    last = 0
    while not run_until(empty, work, last):
        assert catalog(look, "alkstore") == before
        last += 1
    assert last > 10
    assert bool(catalog(look, "alkstore")["relations"]) is (direction == "up")


def test_a_table_that_foreign_objects_depend_on_is_not_dropped_under_them(empty: Database, look: Sql) -> None:
    operate(empty, up)
    look.execute("CREATE VIEW public.theirs AS SELECT id FROM alkstore.job")
    with pytest.raises(DBAPIError, match="depend"):
        operate(empty, down)
    assert look.execute("SELECT count(*) FROM public.theirs").fetchone() == (0,)


@pytest.mark.parametrize(
    "numbers", [{"to": LATEST + 1, "from_": 0}, {"to": LATEST, "from_": LATEST + 1}, {"to": -1, "from_": 0}]
)
@pytest.mark.parametrize("function", [migrations.upgrade, migrations.downgrade])
def test_a_version_that_this_package_does_not_know_is_a_mismatch(
    empty: Database, look: Sql, function: Any, numbers: dict[str, int]
) -> None:
    with pytest.raises(SchemaMismatch, match="upgrade alkstore_sa"):
        operate(empty, lambda op: function(op, **numbers))
    with pytest.raises(SchemaMismatch):
        script(lambda op: function(op, **numbers))
    assert not has_schema(look, "alkstore")


def test_a_database_that_is_ahead_of_this_package_is_not_downgraded(empty: Database, look: Sql) -> None:
    operate(empty, up)
    look.execute("INSERT INTO alkstore.schema_version (version) VALUES (%s)", [LATEST + 1])
    with pytest.raises(SchemaMismatch, match="upgrade alkstore_sa"):
        operate(empty, down)
    assert catalog(look, "alkstore")["relations"]


@pytest.mark.parametrize("work", [up, down])
def test_another_dialect_is_refused(tmp_path: Path, work: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with engine.begin() as connection, pytest.raises(UnsupportedDialect, match="sqlite"):
        work(Operations(MigrationContext.configure(connection)))
    engine.dispose()
    with pytest.raises(UnsupportedDialect, match="sqlite"):
        script(work, "sqlite")


def test_a_store_on_a_database_without_the_tables_names_the_migration(empty: Database) -> None:
    engine = create_engine(empty.url("psycopg"))
    with pytest.raises(alkstore_sa.SchemaMissing, match=r"op\.alkstore_upgrade"):
        SyncStore(engine).queue("q").enqueue(1)
    engine.dispose()


def test_a_store_on_a_newer_database_says_so(empty: Database, look: Sql) -> None:
    operate(empty, up)
    look.execute("INSERT INTO alkstore.schema_version (version) VALUES (%s)", [alkstore_sa.models.SCHEMA_VERSION + 1])
    engine = create_engine(empty.url("psycopg"))
    with pytest.raises(SchemaMismatch, match="upgrade alkstore_sa"):
        SyncStore(engine).check()
    engine.dispose()


def test_the_first_statements_of_a_new_schema_find_pages_in_the_job_table(empty: Database, look: Sql) -> None:
    operate(empty, up)
    assert look.execute(
        "SELECT pg_relation_size('alkstore.job') > 1000000, (SELECT count(*) FROM alkstore.job)"
    ).fetchone() == (True, 0)


def test_migrate_is_what_the_tests_own_databases_are_made_by(empty: Database, look: Sql) -> None:
    migrate(empty)
    made = catalog(look, "alkstore")
    operate(empty, up)
    assert catalog(look, "alkstore") == made
