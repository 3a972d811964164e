"""Where the engine's own operations run: in short transactions on the engine's pool, or on a connection it was given.

An operation is a function of a sync `Connection`. The sync door calls it; the async door has SQLAlchemy's bridge call
it. A single statement needs no transaction around it and is sent in AUTOCOMMIT, which spares two round trips.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from alkstore_sa._session import refuse_autocommit, require_postgresql

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["AsyncRunner", "Runner", "is_transient"]

T = TypeVar("T")

SERIALIZATION_FAILURE: Final = "40001"
# Classes of SQLSTATE that pass by themselves: connection, deadlock or serialization, resources, lock, shutdown.
TRANSIENT_CLASSES: Final = ("08", "40", "53", "55", "57")


def is_transient(error: Exception) -> bool:
    """Tell whether a loop should try again later: the server is away, restarting, or out of something."""
    if isinstance(error, DBAPIError):
        sqlstate = getattr(error.orig, "sqlstate", None)
        return error.connection_invalidated or sqlstate is None or str(sqlstate).startswith(TRANSIENT_CLASSES)
    return isinstance(error, (OSError, PoolTimeout, asyncio.TimeoutError))


class _Isolation:
    """The choice between AUTOCOMMIT and an explicit READ COMMITTED transaction for single statements.

    A server or role whose default is a stricter level applies it to single statements too. The first serialization
    failure of one tells, and from then on they get transactions.
    """

    def __init__(self) -> None:
        self._explicit = False

    def level(self, *, atomic: bool) -> str:
        return "READ COMMITTED" if atomic or self._explicit else "AUTOCOMMIT"

    def learns(self, error: DBAPIError, *, atomic: bool) -> bool:
        """Tell whether to run the operation again, now in a transaction: the failed statement has changed nothing."""
        if atomic or self._explicit or getattr(error.orig, "sqlstate", None) != SERIALIZATION_FAILURE:
            return False
        self._explicit = True
        return True


class Runner:
    """Runs operations on a sync engine, or on a connection with a transaction of the caller's."""

    def __init__(self, bind: Engine | Connection) -> None:
        require_postgresql(bind.dialect.name)
        self.bind = bind
        self._isolation = _Isolation()

    def run(self, operation: Callable[[Connection], T], *, atomic: bool = False) -> T:
        """Run `operation`; `atomic` says that it sends more than one statement, which stand or fall together."""
        if isinstance(self.bind, Connection):
            refuse_autocommit(self.bind)
            return operation(self.bind)
        while True:
            engine = self.bind.execution_options(isolation_level=self._isolation.level(atomic=atomic))
            try:
                with engine.begin() as connection:
                    return operation(connection)
            except DBAPIError as error:
                if not self._isolation.learns(error, atomic=atomic):
                    raise


class AsyncRunner:
    """Runs operations on an async engine, or on a connection with a transaction of the caller's."""

    def __init__(self, bind: AsyncEngine | AsyncConnection) -> None:
        require_postgresql(bind.dialect.name)
        self.bind: Any = bind
        self._isolation = _Isolation()

    async def run(self, operation: Callable[[Connection], T], *, atomic: bool = False) -> T:
        """Run `operation`; `atomic` says that it sends more than one statement, which stand or fall together."""
        if isinstance(self.bind, AsyncConnection):
            await self.bind.run_sync(refuse_autocommit)
            return await self.bind.run_sync(operation)
        while True:
            engine: AsyncEngine = self.bind.execution_options(isolation_level=self._isolation.level(atomic=atomic))
            try:
                async with engine.begin() as connection:
                    return await connection.run_sync(operation)
            except DBAPIError as error:
                if not self._isolation.learns(error, atomic=atomic):
                    raise
