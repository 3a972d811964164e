"""What a claim costs the server, counted in the pages that it touches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from support.plans import buffers, explain, prepare

from alkstore_sa.statements import statements_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore

HEAD = {"queue": "'q'", "n": "100", "worker_id": "'w'"}


def pages(database: Database, name: str, values: Mapping[str, str]) -> int:
    """Return how many pages a claim of 100 jobs touches, without claiming them."""
    with psycopg.connect(database.dsn) as connection:
        order = prepare(connection, name, getattr(statements_for("alkstore"), name))
        plan = explain(connection, name, order, values, "ANALYZE, BUFFERS,")
        connection.rollback()
    return buffers(plan)


def from_marks(store: SyncStore) -> dict[str, str]:
    """Return the parameters of the claim that this store would make next, as SQL literals."""
    parameters: dict[str, list[Any]] = store._core.marks("q").parameters()
    literals = {name: "'{" + ",".join(f'"{value}"' for value in values) + "}'" for name, values in parameters.items()}
    return {**HEAD, **literals}


def drain(store: SyncStore, jobs: int) -> None:
    """Claim and acknowledge this many jobs in batches of 100, as a busy consumer does."""
    queue = store.queue("q")
    for _ in range(jobs // 100):
        assert queue.ack_many(queue.claim("w", 100)) == []


def test_finished_jobs_do_not_slow_a_busy_consumer_down_while_an_old_snapshot_is_held(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    sync_store.queue("q").enqueue_many(range(20_000))
    with psycopg.connect(database.dsn) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM alkstore.job")
        drain(sync_store, 1_000)
        early = pages(database, "claim_from_marks", from_marks(sync_store))
        drain(sync_store, 17_000)
        late = pages(database, "claim_from_marks", from_marks(sync_store))
        from_head = pages(database, "claim_from_head", HEAD)
    assert late <= 1.5 * early
    assert (
        from_head > 10 * late
    )  # so the snapshot does hold the finished jobs, and the marks do spare walking over them


def test_a_claim_beside_future_jobs_of_a_higher_priority_is_as_cheap_as_without_them(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    queue = sync_store.queue("q")
    queue.enqueue_many(range(1_000))
    alone = pages(database, "claim_from_head", HEAD)
    queue.enqueue_many(range(100_000), priority=5, delay=86_400)
    beside = pages(database, "claim_from_head", HEAD)
    assert beside <= alone + 20


def test_a_claim_changes_no_index(sync_store: SyncStore, database: Database) -> None:
    sync_store.queue("q").enqueue_many(range(100))
    with psycopg.connect(database.dsn) as connection:
        before = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'job'"
        )
        assert before.fetchone() == (0, 0)
        order = prepare(connection, "claim", statements_for("alkstore").claim_from_head)
        connection.execute(f"EXECUTE claim ({', '.join(HEAD[name] for name in order)})")
        after = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'job'"
        )
        assert after.fetchone() == (100, 100)
        connection.rollback()
