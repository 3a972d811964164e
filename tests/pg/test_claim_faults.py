"""A claim whose connection breaks in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from support.rows import Sql

    from alkstore_sa import SyncStore


def break_at_the_next_look_from_the_head(engine: Engine, sql: Sql) -> None:
    """Have the server end the connection just before it would send that statement, once."""
    armed = [True]

    def terminate(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
        if "RECURSIVE" in statement and armed:
            armed.clear()
            sql.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    event.listen(engine, "before_cursor_execute", terminate)


def test_what_was_claimed_before_the_connection_broke_is_handed_out(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    queue = sync_store.queue("q")
    ids = queue.enqueue_many(range(5))
    first = queue.claim("w", 2)
    break_at_the_next_look_from_the_head(sync_engine, sql)
    rest = queue.claim("w", 10)  # three from the marks on, then the look from the head, which breaks
    assert [job.id for job in first + rest] == ids
    assert queue.ack_many(first + rest) == []


def test_a_claim_that_broke_before_it_had_anything_raises_and_costs_nothing(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    queue = sync_store.queue("q")
    queue.enqueue(1)
    break_at_the_next_look_from_the_head(sync_engine, sql)
    with pytest.raises(OperationalError):
        queue.claim("w", 10)
    (job,) = queue.claim("w", 10)
    assert job.attempts == 1
