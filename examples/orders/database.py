"""A database for one run: made on the server that is there, migrated by the application's own Alembic environment.

Each run has a database of its own and drops it at its end. So a run on a server of yours touches nothing that is yours,
leaves nothing behind, and finds nothing of the run before. It needs a role that may create databases.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from alembic.config import Config
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from alembic import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alkstore_sa.embedded import PostgresServer


@contextmanager
def own_database(server: PostgresServer) -> Iterator[str]:
    """Make an empty database on `server`, yield its name, and drop it afterwards."""
    name = f"alkstore_demo_{secrets.token_hex(4)}"
    url = make_url(server.dsn).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    try:
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template0"))
    except DBAPIError as error:
        raise SystemExit(f"cannot make a database for this run: {error.orig}") from None
    try:
        yield name
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def migrate(url: str) -> None:
    """Do what `alembic upgrade head` does on the command line."""
    config = Config(Path(__file__).with_name("alembic.ini"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    command.upgrade(config, "head")
