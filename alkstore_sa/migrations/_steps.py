"""Running the numbered steps, online or into a script, and reading the version that a database has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from sqlalchemy import text

from alkstore_sa._rules import check_schema_name
from alkstore_sa.errors import SchemaMismatch, UnsupportedDialect
from alkstore_sa.migrations.steps import v0001

if TYPE_CHECKING:
    from alembic.operations import Operations
    from sqlalchemy import Connection

__all__ = ["DEFAULT_SCHEMA", "LATEST", "Step", "current", "run_downgrade", "run_upgrade"]

DEFAULT_SCHEMA: Final = "alkstore"


class Step(Protocol):
    """One numbered step: the statements that reach its version from the one before, and those that go back."""

    def upgrade(self, schema: str) -> list[str]:
        """Return the statements that reach this version; `schema` is the plain name."""
        ...

    def downgrade(self, schema: str) -> list[str]:
        """Return the statements that go back to the version before."""
        ...


STEPS: Final[dict[int, Step]] = {1: v0001}
LATEST: Final = max(STEPS)


def run_upgrade(operations: Operations, *, to: int, from_: int, schema: str) -> None:
    """Carry out the steps above the database's version (in `--sql` mode above `from_`) up to `to`."""
    _require(operations, schema, to, from_)
    for version in range(_start(operations, from_, schema) + 1, to + 1):
        _execute(operations, STEPS[version].upgrade(schema))
        _execute(operations, [f"INSERT INTO {_version_table(schema)} (version) VALUES ({version})"])


def run_downgrade(operations: Operations, *, to: int, from_: int, schema: str) -> None:
    """Undo the steps from the database's version (in `--sql` mode from `from_`) down to `to`."""
    _require(operations, schema, to, from_)
    start = _start(operations, from_, schema)
    if start > LATEST:
        raise SchemaMismatch(
            f"schema {schema!r} has version {start}, this package knows versions up to {LATEST}: upgrade alkstore_sa"
        )
    for version in range(start, to, -1):
        _execute(operations, [f"DELETE FROM {_version_table(schema)} WHERE version = {version}"])
        _execute(operations, STEPS[version].downgrade(schema))


def current(connection: Connection, schema: str = DEFAULT_SCHEMA) -> int:
    """Return the version of the engine's tables in `schema`; 0 when there are none."""
    table = _version_table(schema)
    if connection.scalar(text("SELECT to_regclass(:table)"), {"table": table}) is None:
        return 0
    return connection.scalar(text(f"SELECT coalesce(max(version), 0) FROM {_escape(table)}")) or 0


def _start(operations: Operations, from_: int, schema: str) -> int:
    return from_ if operations.get_context().as_sql else current(operations.get_bind(), schema)


def _require(operations: Operations, schema: str, *versions: int) -> None:
    """Refuse what cannot work before the first statement."""
    dialect = operations.get_context().dialect.name
    if dialect != "postgresql":
        raise UnsupportedDialect(f"the engine's tables need PostgreSQL, this migration runs on {dialect}")
    check_schema_name(schema)
    for version in versions:
        if not 0 <= version <= LATEST:
            raise SchemaMismatch(
                f"version {version} of the engine's tables: this package knows 0 to {LATEST}, upgrade alkstore_sa"
            )


def _execute(operations: Operations, statements: list[str]) -> None:
    context = operations.get_context()
    for statement in statements:
        if context.as_sql:  # as it is: compiling it would double each % where the environment's paramstyle needs that
            context.impl.static_output(statement + context.impl.command_terminator)
        else:
            operations.execute(text(_escape(statement)))


def _escape(sql: str) -> str:
    """Return `sql` for `text()`, where a colon would begin a parameter."""
    return sql.replace(":", r"\:")


def _version_table(schema: str) -> str:
    return f"{v0001.quote(schema)}.schema_version"
