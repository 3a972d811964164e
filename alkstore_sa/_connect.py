"""Connections of an engine's pool for the engine's own operations: single statements, and transactions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from alkstore_sa._failures import NO_SUCH_STATEMENT, sqlstate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import Connection, Engine

__all__ = ["Executor", "connect", "is_autocommit", "prepare"]

T = TypeVar("T")

IsolationLevel: TypeAlias = Literal["AUTOCOMMIT", "READ COMMITTED"]

NEEDS_TRANSACTION: Final = ("40001", *NO_SUCH_STATEMENT)


class Executor:
    """Runs operations over connections of an engine's pool: in AUTOCOMMIT, or those that are atomic in a transaction.

    A single statement needs no transaction around it, which would be two more round trips. Unless the server's or the
    role's default isolation is stricter than READ COMMITTED, which applies to single statements too; or a transaction
    pooler sends a statement to another server connection than the one on which asyncpg has prepared it. The first
    failure of that kind, which has changed nothing, tells, and from then on everything gets transactions.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._always_atomic = False

    def run(self, operation: Callable[[Connection], T], *, atomic: bool = False) -> T:
        """Run `operation`; `atomic` says that it sends more than one statement, which stand or fall together."""
        atomic = atomic or self._always_atomic
        try:
            return self._run(operation, atomic=atomic)
        except DBAPIError as error:
            if atomic or sqlstate(error) not in NEEDS_TRANSACTION:
                raise
        self._always_atomic = True
        return self._run(operation, atomic=True)

    def _run(self, operation: Callable[[Connection], T], *, atomic: bool) -> T:
        with connect(self.engine, "READ COMMITTED" if atomic else "AUTOCOMMIT") as connection:
            if not atomic:
                return operation(connection)
            with connection.begin():
                return operation(connection)


@contextmanager
def connect(engine: Engine, isolation_level: IsolationLevel) -> Generator[Connection]:
    """Take a connection, whatever the engine is set to, in this isolation level for the time of the block."""
    with engine.connect() as connection:
        prepare(connection, isolation_level)
        yield connection


def prepare(connection: Connection, isolation_level: IsolationLevel) -> None:
    """Set the isolation level of a connection that was just taken, until it is given back.

    The level is the connection's option, not the engine's: on an engine that was itself made by `execution_options`, an
    engine's option loses against the first one.
    """
    if getattr(connection.dialect, "default_isolation_level", None) is None:
        # SQLAlchemy asks the server for it over an engine's first connection, and does not have others wait for that.
        connection.dialect.initialize(connection)
        connection.rollback()
    if isinstance(connection.engine.pool, (QueuePool, NullPool)):  # other pools may share it with a session
        # The application's own listeners may have left a new connection in a transaction, where its level cannot change
        # any more. Otherwise this sends nothing.
        connection.connection.commit()
    connection.execution_options(isolation_level=isolation_level)


def is_autocommit(connection: Connection) -> bool:
    """Tell whether each statement on a connection of an `Executor` is committed by itself."""
    return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
