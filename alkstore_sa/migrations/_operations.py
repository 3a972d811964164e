"""The two operations that Alembic's `op` learns: what they carry, and how they are carried out."""

from __future__ import annotations

from typing import Any

from alembic.operations import MigrateOperation, Operations

from alkstore_sa.migrations._steps import DEFAULT_SCHEMA, run_downgrade, run_upgrade

__all__ = ["AlkstoreDowngradeOp", "AlkstoreUpgradeOp"]


@Operations.register_operation("alkstore_upgrade")
class AlkstoreUpgradeOp(MigrateOperation):
    """Bring the engine's tables from one version up to another."""

    def __init__(self, to: int, *, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
        self.to = to
        self.from_ = from_
        self.schema = schema

    @classmethod
    def alkstore_upgrade(cls, operations: Operations, to: int, *, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
        """Bring the engine's tables in `schema` from version `from_` up to `to`."""
        operations.invoke(cls(to, from_=from_, schema=schema))

    def reverse(self) -> AlkstoreDowngradeOp:
        """Return the operation that undoes this one."""
        return AlkstoreDowngradeOp(self.from_, from_=self.to, schema=self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return what `alembic check` prints for this operation."""
        return ("alkstore_upgrade", self.schema, self.from_, self.to)


@Operations.register_operation("alkstore_downgrade")
class AlkstoreDowngradeOp(MigrateOperation):
    """Undo the steps from one version down to another."""

    def __init__(self, to: int, *, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
        self.to = to
        self.from_ = from_
        self.schema = schema

    @classmethod
    def alkstore_downgrade(cls, operations: Operations, to: int, *, from_: int, schema: str = DEFAULT_SCHEMA) -> None:
        """Undo the steps of the engine's tables in `schema` from version `from_` down to `to`."""
        operations.invoke(cls(to, from_=from_, schema=schema))

    def reverse(self) -> AlkstoreUpgradeOp:
        """Return the operation that this one undoes."""
        return AlkstoreUpgradeOp(self.from_, from_=self.to, schema=self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return what `alembic check` prints for this operation."""
        return ("alkstore_downgrade", self.schema, self.from_, self.to)


@Operations.implementation_for(AlkstoreUpgradeOp)
def _upgrade(operations: Operations, operation: AlkstoreUpgradeOp) -> None:
    run_upgrade(operations, to=operation.to, from_=operation.from_, schema=operation.schema)


@Operations.implementation_for(AlkstoreDowngradeOp)
def _downgrade(operations: Operations, operation: AlkstoreDowngradeOp) -> None:
    run_downgrade(operations, to=operation.to, from_=operation.from_, schema=operation.schema)
