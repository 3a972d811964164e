"""Where the engine's own operations run: in short transactions on the engine's pool, or on a connection it was given.

An operation is a function of a sync `Connection`. The sync door calls it; the async door has SQLAlchemy's bridge call
it. A single statement needs no transaction around it and is sent in AUTOCOMMIT, which spares two round trips.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from alkstore_sa._connect import Executor, connect, prepare
from alkstore_sa._session import refuse_autocommit, require_postgresql

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from alkstore_sa._waker import Announcement

__all__ = ["AsyncRunner", "Runner"]

T = TypeVar("T")


class Runner:
    """Runs operations on a sync engine, or on a connection with a transaction of the caller's."""

    def __init__(self, bind: Engine | Connection) -> None:
        require_postgresql(bind.dialect.name)
        self._connection = bind if isinstance(bind, Connection) else None
        self._executor = Executor(bind.engine)

    def connect(self) -> AbstractContextManager[Connection]:
        """Take a connection in READ COMMITTED for a session of the engine's own; on a connection, that one."""
        return nullcontext(self._connection) if self._connection else connect(self._executor.engine, "READ COMMITTED")

    def run(
        self, operation: Callable[[Connection], T], *, atomic: bool = False, announce: Announcement | None = None
    ) -> T:
        """Run `operation`, and announce it when it has been committed.

        `atomic` says that it sends more than one statement, which stand or fall together.
        """
        if self._connection is not None:
            return _run_on(self._connection, operation, announce)
        return _announced(announce, self._executor.engine, self._executor.run(operation, atomic=atomic))


class AsyncRunner:
    """Runs operations on an async engine, or on a connection with a transaction of the caller's.

    The whole of an operation, from taking a connection to giving it back, is the sync runner's, within SQLAlchemy's
    bridge. An `AsyncConnection` would cross that bridge three times, and start a task to be closed.
    """

    def __init__(self, bind: AsyncEngine | AsyncConnection) -> None:
        require_postgresql(bind.dialect.name)
        self._connection = bind if isinstance(bind, AsyncConnection) else None
        self._engine = bind.engine if isinstance(bind, AsyncConnection) else bind
        self._runner = Runner(self._engine.sync_engine)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[AsyncConnection]:
        """Take a connection in READ COMMITTED for a session of the engine's own; on a connection, that one."""
        if self._connection is not None:
            yield self._connection
            return
        async with self._engine.connect() as connection:
            await connection.run_sync(prepare, "READ COMMITTED")
            yield connection

    async def run(
        self, operation: Callable[[Connection], T], *, atomic: bool = False, announce: Announcement | None = None
    ) -> T:
        """Do what `Runner.run` does, without blocking the event loop."""
        if self._connection is not None:
            return await self._connection.run_sync(_run_on, operation, announce)
        return await greenlet_spawn(partial(self._runner.run, operation, atomic=atomic, announce=announce))


def _run_on(connection: Connection, operation: Callable[[Connection], T], announce: Announcement | None) -> T:
    """Run `operation` on a connection of the caller's."""
    refuse_autocommit(connection)
    return _announced(announce, None, operation(connection))


def _announced(announcement: Announcement | None, engine: Engine | None, result: T) -> T:
    """Return `result` after saying that it is there; with no engine it is not committed, so to this process alone."""
    if announcement is not None:
        announcement.send(engine)
    return result
