"""The errors of the engine: one root, a flat family below it.

Bad arguments also derive from `ValueError`, so that a caller who validates input can treat them alike.
Errors of the database itself are not wrapped: they stay SQLAlchemy's own.
"""

from __future__ import annotations

__all__ = [
    "AlkstoreError",
    "BindError",
    "InvalidName",
    "InvalidSpec",
    "Lagged",
    "LeadershipLost",
    "LeaseLost",
    "LockHeld",
    "LockLost",
    "PayloadError",
    "PayloadTooLarge",
    "ReservedName",
    "SchemaMismatch",
    "SchemaMissing",
    "UnsupportedDialect",
]


class AlkstoreError(Exception):
    """Root of every error that the engine raises by itself."""


class InvalidName(AlkstoreError, ValueError):
    """A name is empty, longer than 200 characters, no `str`, or holds a NUL."""


class ReservedName(AlkstoreError, ValueError):
    """A caller's name begins with the prefix that the engine keeps for itself."""


class InvalidSpec(AlkstoreError, ValueError):
    """A schedule's spec is not `@every <n><unit>`."""


class PayloadError(AlkstoreError, ValueError):
    """A payload has no JSON form, or its JSON does not decode into the expected type."""


class PayloadTooLarge(PayloadError):
    """A payload's JSON text is over the size limit."""


class LeaseLost(AlkstoreError):
    """The claim that a handle stands for is over: the operation changed nothing."""


class LockHeld(AlkstoreError):
    """Another owner holds the named lock."""


class LockLost(AlkstoreError):
    """A named lock was lost while its body ran."""


class LeadershipLost(AlkstoreError):
    """Another runner leads the schedules."""


class Lagged(AlkstoreError):
    """A subscriber read too slowly and missed notifications.

    `missed` counts them.
    """

    def __init__(self, missed: int) -> None:
        super().__init__(missed)
        self.missed = missed

    def __str__(self) -> str:
        return f"{self.missed} notifications were dropped because this subscriber read too slowly"


class BindError(AlkstoreError):
    """A session or connection cannot carry the engine's rows in one transaction with the caller's."""


class UnsupportedDialect(BindError):
    """The database is not PostgreSQL."""


class SchemaMissing(AlkstoreError):
    """The database holds no tables of the engine under the given schema name."""


class SchemaMismatch(AlkstoreError):
    """The version of the engine's tables is older or newer than this package can work on."""
