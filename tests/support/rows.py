"""Looking at rows, and moving the times in them instead of waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from psycopg.rows import dict_row

if TYPE_CHECKING:
    import psycopg

Sql: TypeAlias = "psycopg.Connection[tuple[object, ...]]"


def job_row(sql: Sql, job_id: int, *, table: str = "job") -> dict[str, Any] | None:
    """Return a row of the job or dead table as a dict, None if there is none."""
    with sql.cursor(row_factory=dict_row) as cursor:
        cursor.execute(f"SELECT * FROM alkstore.{table} WHERE id = %s", [job_id])
        return cursor.fetchone()


def lapse(sql: Sql, *job_ids: int) -> None:
    """Let the leases of these jobs have lapsed an hour ago."""
    moved = sql.execute(
        "UPDATE alkstore.job SET lease_expires_at = statement_timestamp() - interval '1 hour'"
        " WHERE id = ANY (%s) AND state = 'processing'",
        [list(job_ids)],
    )
    assert moved.rowcount == len(job_ids)


def make_due(sql: Sql, *job_ids: int) -> None:
    """Let the run time of these pending jobs have come a second ago."""
    moved = sql.execute(
        "UPDATE alkstore.job SET run_at = statement_timestamp() - interval '1 second' WHERE id = ANY (%s)",
        [list(job_ids)],
    )
    assert moved.rowcount == len(job_ids)


def expire(sql: Sql, *job_ids: int) -> None:
    """Let the validity of these jobs have passed an hour ago."""
    moved = sql.execute(
        "UPDATE alkstore.job SET expires_at = statement_timestamp() - interval '1 hour' WHERE id = ANY (%s)",
        [list(job_ids)],
    )
    assert moved.rowcount == len(job_ids)


def count(sql: Sql, table: str = "job") -> int:
    """Return how many rows the job or dead table has."""
    row = sql.execute(f"SELECT count(*) FROM alkstore.{table}".encode()).fetchone()
    assert row is not None
    return int(str(row[0]))
