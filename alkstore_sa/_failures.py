"""Telling failures of the database apart, by SQLSTATE and never by their text."""

from __future__ import annotations

import asyncio
from typing import Final

from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

__all__ = ["NO_SUCH_STATEMENT", "is_transient", "sqlstate"]

NO_SUCH_STATEMENT: Final = ("26000", "42P05")
"""What a transaction pooler makes of statements that a driver prepares: on another connection there is none, or one."""

# The beginnings of SQLSTATEs that pass by themselves: connection, read-only (a failover under way), idle timeout,
# deadlock or serialization, resources, lock, shutdown.
TRANSIENT: Final = ("08", "25006", "25P03", "40", "53", "55", "57")


def sqlstate(error: BaseException | None) -> str | None:
    """Return the server's code for an error, None where it did not come from the server.

    SQLAlchemy 2.0 does not wrap what asyncpg raises while it connects, hence any exception.
    """
    state: object = getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None)
    return state if isinstance(state, str) else None


def is_transient(error: BaseException) -> bool:
    """Tell whether a loop should try again later: the server is away, restarting, or out of something."""
    state = sqlstate(error)
    if state is not None:
        return state.startswith(TRANSIENT)
    return isinstance(error, (DBAPIError, OSError, PoolTimeout, asyncio.TimeoutError))
