"""The application's Alembic environment, on an async engine; nothing in it is special to the library."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from alembic import context
from examples.orders.models import Base

if TYPE_CHECKING:
    from sqlalchemy import Connection

URL = context.config.get_main_option("sqlalchemy.url") or os.environ["ORDERS_URL"]


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()


async def run_online() -> None:
    engine = create_async_engine(URL, poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


if context.is_offline_mode():
    context.configure(url=URL, target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    asyncio.run(run_online())
