"""A database for each test, cloned from a template that the library's own migrations built."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
from alembic.config import Config
from psycopg import sql
from sqlalchemy import make_url

from alembic import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alkstore_sa.embedded import PostgresServer

PREFIX: Final = "alkstore_test"
ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Database:
    """One database of the test server."""

    dsn: str

    def url(self, driver: str) -> str:
        """Return the SQLAlchemy URL for `driver`."""
        return make_url(self.dsn).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)


class Databases:
    """Makes and drops databases on a server; those that a killed run has left behind are dropped at the next start.

    Each run holds an advisory lock for as long as it lives, and its number is in the names of its databases.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._run = secrets.randbelow(2**31)
        self._count = 0
        self._connection = psycopg.connect(server.dsn, autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(%s)", [self._run])
        self._drop_left_behind()
        self.template = self.create()
        migrate(self.template)

    def _drop_left_behind(self) -> None:
        names = self._connection.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", [f"{PREFIX}\\_%"])
        for (name,) in names.fetchall():
            (owner_is_gone,) = self._row("SELECT pg_try_advisory_lock(%s)", [int(name.split("_")[2])])
            if owner_is_gone and int(name.split("_")[2]) != self._run:
                self._drop(name)

    def _row(self, query: str, parameters: list[int]) -> tuple[object, ...]:
        row = self._connection.execute(query, parameters).fetchone()
        assert row is not None
        return row

    def create(self, template: str = "template0") -> Database:
        """Make a database as a copy of `template`."""
        self._count += 1
        name = f"{PREFIX}_{self._run}_{self._count}"
        self._connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
        )
        dsn = make_url(self._server.dsn).set(database=name).render_as_string(hide_password=False)
        return Database(dsn)

    def drop(self, database: Database) -> None:
        """Drop a database, whoever is still connected to it."""
        self._drop(str(make_url(database.dsn).database))

    def _drop(self, name: str) -> None:
        self._connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def clone(self) -> Iterator[Database]:
        """Yield a copy of the template, and drop it afterwards."""
        database = self.create(str(make_url(self.template.dsn).database))
        yield database
        self.drop(database)

    def close(self) -> None:
        """Drop the template and let go of the server."""
        self.drop(self.template)
        self._connection.close()


def alembic_config(database: Database, *, schema: str = "alkstore", driver: str = "psycopg") -> Config:
    """Return the configuration of the stand-alone environment for `database`."""
    config = Config(ROOT / "alembic.ini")
    config.set_main_option("sqlalchemy.url", database.url(driver).replace("%", "%%"))
    config.cmd_opts = type("Options", (), {"x": [f"schema={schema}"]})()
    config.attributes["quiet"] = True
    return config


def migrate(database: Database, *, schema: str = "alkstore", driver: str = "psycopg") -> None:
    """Bring `database` up to the newest version, by the stand-alone environment."""
    command.upgrade(alembic_config(database, schema=schema, driver=driver), "head")
