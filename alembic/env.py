"""The stand-alone Alembic environment: builds the engine's tables and nothing else.

The database is named by `-x url=...` or the environment variable `ALKSTORE_URL`, the schema by `-x schema=...`
(default: alkstore). The URL may name a synchronous or an asynchronous driver.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from logging.config import fileConfig

from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from alembic import context

if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

ARGUMENTS = context.get_x_argument(as_dictionary=True)
SCHEMA = ARGUMENTS.get("schema", "alkstore")
# A schema each has its own record of revisions, in the role's default schema, under a name that is short enough.
VERSION_TABLE = "alkstore_alembic_version"
if SCHEMA != "alkstore":
    VERSION_TABLE += "_" + hashlib.sha256(SCHEMA.encode()).hexdigest()[:16]


def database_url() -> str:
    """Return the URL that the command line or the environment names."""
    url = ARGUMENTS.get("url") or context.config.get_main_option("sqlalchemy.url") or os.environ.get("ALKSTORE_URL")
    if not url:
        raise SystemExit("name the database: alembic -x url=postgresql+psycopg://... upgrade head, or set ALKSTORE_URL")
    return url


def run(connection: Connection) -> None:
    """Run the revisions on `connection`, in one transaction."""
    context.configure(connection=connection, target_metadata=None, version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()


async def run_async(url: str) -> None:
    """Run the revisions through an asynchronous driver."""
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


if context.is_offline_mode():
    context.configure(
        url=database_url(),
        target_metadata=None,
        version_table=VERSION_TABLE,
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
    )
    with context.begin_transaction():
        context.run_migrations()
elif make_url(database_url()).get_dialect().is_async:
    asyncio.run(run_async(database_url()))
else:
    engine = create_engine(database_url(), poolclass=NullPool)
    with engine.connect() as connection:
        run(connection)
