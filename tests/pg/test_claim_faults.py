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


LOOK_FROM_THE_HEAD = "RECURSIVE"
MOVE_TO_DEAD = "WITH gone AS"


def break_before(part: str, engine: Engine, sql: Sql) -> None:
    """Have the server end the connection just before a statement with this part is sent, once."""
    armed = [True]

    def terminate(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
        if part in statement and armed:
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
    break_before(LOOK_FROM_THE_HEAD, sync_engine, sql)
    rest = queue.claim("w", 10)  # three from the marks on, then the look from the head, which breaks
    assert [job.id for job in first + rest] == ids
    assert queue.ack_many(first + rest) == []


def test_a_claim_that_broke_before_it_had_anything_raises_and_costs_nothing(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    queue = sync_store.queue("q")
    queue.enqueue(1)
    break_before(LOOK_FROM_THE_HEAD, sync_engine, sql)
    with pytest.raises(OperationalError):
        queue.claim("w", 10)
    (job,) = queue.claim("w", 10)
    assert job.attempts == 1


def test_a_connection_that_breaks_at_a_move_to_dead_costs_the_other_jobs_not_their_claim(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    queue = sync_store.queue("q", payload_type=int)
    queue.enqueue_many(["no number", 1, "no number either", 2])
    break_before(MOVE_TO_DEAD, sync_engine, sql)
    jobs = queue.claim("w", 10)
    assert [job.payload for job in jobs] == [1, 2]
    assert queue.ack_many(jobs) == []
    states = sql.execute("SELECT state, attempts FROM alkstore.job").fetchall()
    assert states == [("processing", 1), ("processing", 1)]
