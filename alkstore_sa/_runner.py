"""Where the engine's own operations run: in short transactions on the engine's pool, or on a connection it was given.

An operation is a function of a sync `Connection`. The sync door calls it; the async door has SQLAlchemy's bridge call
it. A single statement needs no transaction around it and is sent in AUTOCOMMIT, which spares two round trips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from alkstore_sa._failures import sqlstate
from alkstore_sa._session import refuse_autocommit, require_postgresql

if TYPE_CHECKING:
    from collections.abc import Callable

    from alkstore_sa._waker import Announcement

__all__ = ["AsyncRunner", "Runner"]

T = TypeVar("T")

SERIALIZATION_FAILURE: Final = "40001"
TRANSACTIONAL: Final = "READ COMMITTED"


class _Isolation:
    """An engine in the isolation levels that operations need: AUTOCOMMIT for one statement, else READ COMMITTED.

    A server or role whose default is a stricter level applies it to single statements too. The first serialization
    failure of one tells, and from then on they get transactions.
    """

    def __init__(self, engine: Engine) -> None:
        self._transactional: Engine = engine.execution_options(isolation_level=TRANSACTIONAL)
        self._single: Engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def engine(self, *, atomic: bool) -> Engine:
        """Return the engine for an operation of one statement, or of several that are `atomic`."""
        return self._transactional if atomic else self._single

    def is_transactional(self, engine: Engine) -> bool:
        """Tell whether what runs on `engine` must be committed; in AUTOCOMMIT it has been, one by one."""
        return engine is self._transactional

    def learns(self, error: DBAPIError, engine: Engine) -> bool:
        """Tell whether to run again, in a transaction, what has failed on `engine`: it has changed nothing."""
        if self.is_transactional(engine) or sqlstate(error) != SERIALIZATION_FAILURE:
            return False
        self._single = self._transactional
        return True


class Runner:
    """Runs operations on a sync engine, or on a connection with a transaction of the caller's."""

    def __init__(self, bind: Engine | Connection) -> None:
        require_postgresql(bind.dialect.name)
        self._connection = bind if isinstance(bind, Connection) else None
        self._isolation = _Isolation(bind.engine)

    @property
    def session_bind(self) -> Engine | Connection:
        """What a session of the engine's own is bound to."""
        return self._connection or self._isolation.engine(atomic=True)

    def run(
        self, operation: Callable[[Connection], T], *, atomic: bool = False, announce: Announcement | None = None
    ) -> T:
        """Run `operation`, and announce it when it has been committed.

        `atomic` says that it sends more than one statement, which stand or fall together.
        """
        if self._connection is not None:
            return _run_on(self._connection, operation, announce)
        while True:
            engine = self._isolation.engine(atomic=atomic)
            try:
                with engine.begin() if self._isolation.is_transactional(engine) else engine.connect() as connection:
                    result = operation(connection)
            except DBAPIError as error:
                if not self._isolation.learns(error, engine):
                    raise
            else:
                return _announced(announce, engine, result)


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

    @property
    def session_bind(self) -> AsyncEngine | AsyncConnection:
        """What a session of the engine's own is bound to."""
        return self._connection or self._engine.execution_options(isolation_level=TRANSACTIONAL)

    async def run(
        self, operation: Callable[[Connection], T], *, atomic: bool = False, announce: Announcement | None = None
    ) -> T:
        """Do what `Runner.run` does, without blocking the event loop."""
        if self._connection is not None:
            return await self._connection.run_sync(_run_on, operation, announce)
        return await greenlet_spawn(self._runner.run, operation, atomic=atomic, announce=announce)


def _run_on(connection: Connection, operation: Callable[[Connection], T], announce: Announcement | None) -> T:
    """Run `operation` on a connection of the caller's."""
    refuse_autocommit(connection)
    return _announced(announce, None, operation(connection))


def _announced(announcement: Announcement | None, engine: Engine | None, result: T) -> T:
    """Return `result` after saying that it is there; with no engine it is not committed, so to this process alone."""
    if announcement is not None:
        announcement.send(engine)
    return result
