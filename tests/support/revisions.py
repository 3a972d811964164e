"""Running the engine's migration operations as an application does: by Alembic, on any driver, or into a script."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING

from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from alembic import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from support.databases import Database

ENV = """
from alembic import context
from sqlalchemy import create_engine, pool

url = context.config.attributes["url"]
if context.is_offline_mode():
    context.configure(url=url, target_metadata=None, literal_binds=True, dialect_opts={"paramstyle": "named"})
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=None)
        with context.begin_transaction():
            context.run_migrations()
"""

REVISION = '''
"""{name}"""
from alembic import op
import sqlalchemy as sa
import alkstore_sa.migrations

revision = {name!r}
down_revision = {previous!r}


def upgrade() -> None:
    {upgrade}


def downgrade() -> None:
    {downgrade}
'''


def operate(
    database: Database, work: Callable[[Operations], Any], driver: str = "psycopg", **engine_options: Any
) -> None:
    """Call `work` with Alembic's operations, online, in one transaction."""

    def on(connection: Connection) -> None:
        work(Operations(MigrationContext.configure(connection)))

    if driver == "psycopg":
        engine = create_engine(database.url(driver), **engine_options)
        try:
            with engine.begin() as connection:
                on(connection)
        finally:
            engine.dispose()
    else:
        asyncio.run(_operate_async(database.url(driver), on, engine_options))


async def _operate_async(url: str, on: Callable[[Connection], None], engine_options: dict[str, Any]) -> None:
    engine = create_async_engine(url, **engine_options)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(on)
    finally:
        await engine.dispose()


def script(work: Callable[[Operations], Any], dialect: str = "postgresql+psycopg") -> str:
    """Return the SQL that `work` does in `--sql` mode."""
    buffer = io.StringIO()
    context = MigrationContext.configure(
        url=f"{dialect}://",
        dialect_opts={"paramstyle": "named"},
        opts={"as_sql": True, "output_buffer": buffer, "literal_binds": True},
    )
    with context.begin_transaction():
        work(Operations(context))
    return buffer.getvalue()


class Application:
    """An application with an Alembic environment of its own."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._count = 0
        (folder / "versions").mkdir()
        (folder / "env.py").write_text(ENV)
        self.config = Config()
        self.config.set_main_option("script_location", str(folder).replace("%", "%%"))
        self.config.set_main_option("path_separator", "os")
        self.config.attributes["url"] = database.url("psycopg")

    def add_revision(self, upgrade: str, downgrade: str) -> None:
        """Write a revision on top of the ones before; both bodies are one line of Python."""
        self._count += 1
        name, previous = f"r{self._count}", f"r{self._count - 1}" if self._count > 1 else None
        text = REVISION.format(name=name, previous=previous, upgrade=upgrade, downgrade=downgrade)
        (self._folder / "versions" / f"{name}.py").write_text(text)

    def upgrade(self, to: str = "head") -> None:
        command.upgrade(self.config, to)

    def downgrade(self, to: str = "base") -> None:
        command.downgrade(self.config, to)

    def script(self, to: str = "head") -> str:
        """Return what `alembic upgrade --sql` prints."""
        self.config.output_buffer = io.StringIO()
        command.upgrade(self.config, to, sql=True)
        return self.config.output_buffer.getvalue()
