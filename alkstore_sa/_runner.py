"""Where the engine's own operations run: in short transactions on the engine's pool, or on a connection it was given.

An operation is a function of a sync `Connection`. The sync door calls it; the async door has SQLAlchemy's bridge call
it. A single statement needs no transaction around it and is sent in AUTOCOMMIT, which spares two round trips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from alkstore_sa._failures import sqlstate
from alkstore_sa._session import refuse_autocommit, require_postgresql

if TYPE_CHECKING:
    from collections.abc import Callable

    from alkstore_sa._waker import Announcement

__all__ = ["AsyncRunner", "Runner"]

T = TypeVar("T")

SERIALIZATION_FAILURE: Final = "40001"
AnyEngine = TypeVar("AnyEngine", Engine, AsyncEngine)


class _Isolation(Generic[AnyEngine]):
    """An engine in the isolation levels that operations need: AUTOCOMMIT for one statement, else READ COMMITTED.

    A server or role whose default is a stricter level applies it to single statements too. The first serialization
    failure of one tells, and from then on they get transactions.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._transactional: AnyEngine = engine.execution_options(isolation_level="READ COMMITTED")
        self._single: AnyEngine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def engine(self, *, atomic: bool) -> AnyEngine:
        """Return the engine for an operation of one statement, or of several that are `atomic`."""
        return self._transactional if atomic else self._single

    def is_transactional(self, engine: AnyEngine) -> bool:
        """Tell whether what runs on `engine` must be committed; in AUTOCOMMIT it has been, one by one."""
        return engine is self._transactional

    def learns(self, error: DBAPIError, engine: AnyEngine) -> bool:
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
            refuse_autocommit(self._connection)
            return _announced(announce, None, operation(self._connection))
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
    """Runs operations on an async engine, or on a connection with a transaction of the caller's."""

    def __init__(self, bind: AsyncEngine | AsyncConnection) -> None:
        require_postgresql(bind.dialect.name)
        self._connection = bind if isinstance(bind, AsyncConnection) else None
        self._isolation = _Isolation(bind.engine if isinstance(bind, AsyncConnection) else bind)

    @property
    def session_bind(self) -> AsyncEngine | AsyncConnection:
        """What a session of the engine's own is bound to."""
        return self._connection or self._isolation.engine(atomic=True)

    async def run(
        self, operation: Callable[[Connection], T], *, atomic: bool = False, announce: Announcement | None = None
    ) -> T:
        """Run `operation`, and announce it when it has been committed.

        `atomic` says that it sends more than one statement, which stand or fall together.
        """
        if self._connection is not None:
            await self._connection.run_sync(refuse_autocommit)
            return _announced(announce, None, await self._connection.run_sync(operation))
        while True:
            engine = self._isolation.engine(atomic=atomic)
            try:
                async with (
                    engine.begin() if self._isolation.is_transactional(engine) else engine.connect() as connection
                ):
                    result = await connection.run_sync(operation)
            except DBAPIError as error:
                if not self._isolation.learns(error, engine):
                    raise
            else:
                return _announced(announce, engine.sync_engine, result)


def _announced(announcement: Announcement | None, engine: Engine | None, result: T) -> T:
    """Return `result` after saying that it is there; with no engine it is not committed, so to this process alone."""
    if announcement is not None:
        announcement.send(engine)
    return result
