"""Migrations of the engine's tables, for use inside the application's own Alembic revisions.

Importing this module (in `env.py` or in the revision) gives Alembic's `op` two operations:

    import alkstore_sa.migrations

    def upgrade() -> None:
        op.alkstore_upgrade(to=1, from_=0, schema="alkstore")

    def downgrade() -> None:
        op.alkstore_downgrade(to=0, from_=1, schema="alkstore")

`upgrade` and `downgrade` below do the same as functions, for projects whose type checker does not know what was added
to `op`. Both numbers are pinned in the revision, so it does the same with every later version of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alkstore_sa.migrations._operations import AlkstoreDowngradeOp, AlkstoreUpgradeOp
from alkstore_sa.migrations._steps import DEFAULT_SCHEMA, LATEST, current

if TYPE_CHECKING:
    from types import ModuleType

    from alembic.operations import Operations

__all__ = ["LATEST", "AlkstoreDowngradeOp", "AlkstoreUpgradeOp", "current", "downgrade", "upgrade"]


def upgrade(op: Operations | ModuleType, *, to: int, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
    """Bring the engine's tables in `schema` from version `from_` up to `to`, inside the revision's transaction.

    Online, the steps that the database already has are left out, so a repeated revision does no harm. An interrupted
    one leaves nothing, unless the environment runs without a transaction.
    Version 0 means that there are no tables yet. The schema is created if it is missing; one that an administrator
    made beforehand is used as it is.

    Args:
        op: Alembic's `op` module, or an `Operations` object.
        to: the version to reach, at most `LATEST`.
        from_: the version to start from, in effect only in `--sql` mode, where no database can be asked.
        schema: the schema of the engine's own.

    Raises:
        SchemaMismatch: this package is older than `to`.
    """
    _operations(op).invoke(AlkstoreUpgradeOp(to, from_=from_, schema=schema))


def downgrade(op: Operations | ModuleType, *, to: int, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
    """Undo the steps from version `from_` down to `to`; 0 removes the tables and all that is in them.

    The schema itself is dropped only if `upgrade` created it and nothing else is in it.

    Raises:
        SchemaMismatch: this package is older than `from_`.
    """
    _operations(op).invoke(AlkstoreDowngradeOp(to, from_=from_, schema=schema))


def _operations(op: Operations | ModuleType) -> Operations:
    """Return the `Operations` behind `op`, which is a module of proxies in a revision."""
    # alembic.op proxies invoke() like every public method of Operations, but its stub does not declare it as one.
    return op  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
