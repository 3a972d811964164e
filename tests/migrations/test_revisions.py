from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError
from support.catalog import catalog, has_schema
from support.revisions import Application

from alkstore_sa import SchemaMismatch, migrations

if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database, Databases
    from support.rows import Sql

LATEST = migrations.LATEST
WAYS = {
    "op": (
        f"op.alkstore_upgrade(to={LATEST}, from_=0, schema='alkstore')",
        f"op.alkstore_downgrade(to=0, from_={LATEST}, schema='alkstore')",
    ),
    "function": (
        f"alkstore_sa.migrations.upgrade(op, to={LATEST}, from_=0, schema='alkstore')",
        f"alkstore_sa.migrations.downgrade(op, to=0, from_={LATEST}, schema='alkstore')",
    ),
    "default schema": (f"op.alkstore_upgrade({LATEST}, from_=0)", f"op.alkstore_downgrade(0, from_={LATEST})"),
}
ORDERS = "op.create_table('orders', sa.Column('id', sa.Integer, primary_key=True))"
FAIL = "op.execute('SELECT 1 / 0')"


@pytest.fixture
def application(tmp_path: Path, empty: Database) -> Application:
    return Application(tmp_path, empty)


def tables(look: Sql, schema: str = "public") -> set[str]:
    rows = look.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]).fetchall()
    return {str(row[0]) for row in rows}


@pytest.mark.parametrize("way", WAYS)
def test_an_applications_revision_makes_its_own_tables_and_the_engines(
    application: Application, look: Sql, way: str
) -> None:
    up, down = WAYS[way]
    application.add_revision(f"{ORDERS}; {up}", f"{down}; op.drop_table('orders')")
    application.upgrade()
    assert tables(look) == {"orders", "alembic_version"}
    assert "job" in tables(look, "alkstore")
    application.downgrade()
    assert tables(look) == {"alembic_version"}
    assert not has_schema(look, "alkstore")


@pytest.mark.parametrize("way", WAYS)
def test_a_revision_that_fails_after_the_engines_part_leaves_nothing_of_it(
    application: Application, look: Sql, way: str
) -> None:
    up, down = WAYS[way]
    application.add_revision(f"{ORDERS}; {up}; {FAIL}", down)
    with pytest.raises(DBAPIError):
        application.upgrade()
    assert tables(look) == set()
    assert not has_schema(look, "alkstore")


def test_a_downgrade_that_fails_after_the_engines_part_leaves_all_of_it(application: Application, look: Sql) -> None:
    up, down = WAYS["op"]
    application.add_revision(up, f"{down}; {FAIL}")
    application.upgrade()
    before = catalog(look, "alkstore")
    with pytest.raises(DBAPIError):
        application.downgrade()
    assert catalog(look, "alkstore") == before


@pytest.mark.parametrize("way", WAYS)
def test_the_script_of_a_revision_does_the_same_as_the_revision(
    application: Application, databases: Databases, look: Sql, way: str
) -> None:
    application.add_revision(f"{ORDERS}; {WAYS[way][0]}", "pass")
    other = databases.create()
    with psycopg.connect(other.dsn, autocommit=True) as connection:
        connection.execute(application.script().encode())
        replayed = catalog(connection, "alkstore"), tables(connection)
    databases.drop(other)
    application.upgrade()
    assert replayed == (catalog(look, "alkstore"), tables(look))


def test_a_script_is_right_whatever_paramstyle_the_environment_asks_for(
    application: Application, look: Sql, tmp_path: Path
) -> None:
    env = tmp_path / "env.py"
    env.write_text(env.read_text().replace(', dialect_opts={"paramstyle": "named"}', ""))
    application.add_revision(WAYS["op"][0], "pass")
    look.execute(application.script().encode())
    assert "job" in tables(look, "alkstore")


def test_a_script_asks_no_database(application: Application) -> None:
    application.add_revision(WAYS["op"][0], "pass")
    application.config.attributes["url"] = "postgresql+psycopg://nobody@host.invalid/none"
    assert re.search(r'CREATE TABLE "alkstore"\.job', application.script())


def test_the_engines_tables_may_come_in_a_later_revision(application: Application, look: Sql) -> None:
    up, down = WAYS["op"]
    application.add_revision(ORDERS, "op.drop_table('orders')")
    application.add_revision(up, down)
    application.upgrade("r1")
    assert not has_schema(look, "alkstore")
    application.upgrade()
    application.downgrade("r1")
    assert tables(look) == {"orders", "alembic_version"}
    assert not has_schema(look, "alkstore")


def test_a_revision_stamped_back_and_run_again_does_no_harm(application: Application, look: Sql) -> None:
    application.add_revision(*WAYS["op"])
    application.upgrade()
    look.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('q', '1')")
    look.execute("DELETE FROM alembic_version")
    application.upgrade()
    assert look.execute("SELECT count(*) FROM alkstore.job").fetchone() == (1,)


def test_a_revision_for_a_later_package_says_what_to_do(application: Application, look: Sql) -> None:
    application.add_revision(f"op.alkstore_upgrade(to={LATEST + 1}, from_={LATEST})", "pass")
    with pytest.raises(SchemaMismatch, match="upgrade alkstore_sa"):
        application.upgrade()
    assert not has_schema(look, "alkstore")


def test_both_numbers_are_asked_for(application: Application) -> None:
    application.add_revision("op.alkstore_upgrade(to=1)", "pass")
    with pytest.raises(TypeError, match="from_"):
        application.upgrade()


def test_each_operation_knows_its_reverse() -> None:
    up = migrations.AlkstoreUpgradeOp(2, from_=1, schema="x")
    down = up.reverse()
    assert isinstance(down, migrations.AlkstoreDowngradeOp)
    assert (down.to, down.from_, down.schema) == (1, 2, "x")
    assert down.reverse().to_diff_tuple() == up.to_diff_tuple()
