"""What another writer does with plain SQL, and what the server's clock says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from support.rows import Sql


def insert_job(sql: Sql, queue: str, **expressions: str) -> int:
    """Insert a job whose columns have the values of these SQL expressions, and return its id."""
    names = "".join(f", {name}" for name in expressions)
    values = "".join(f", {expression}" for expression in expressions.values())
    payload = "" if "payload" in expressions else ", payload"
    return number(
        sql,
        f"INSERT INTO alkstore.job (queue{payload}{names})"
        f" VALUES (%s{', to_jsonb(1)' if payload else ''}{values}) RETURNING id",
        queue,
    )


def number(sql: Sql, query: str, *parameters: Any) -> int:
    """Return the one number that `query` answers with."""
    row = sql.execute(query, parameters or None).fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


def count(sql: Sql, table: str = "job") -> int:
    """Return how many rows the job or dead table has."""
    return number(sql, f"SELECT count(*) FROM alkstore.{table}")


def server_time(sql: Sql) -> datetime:
    """Return what the server's clock says."""
    row: Any = sql.execute("SELECT statement_timestamp()").fetchone()
    found: datetime = row[0]
    return found
