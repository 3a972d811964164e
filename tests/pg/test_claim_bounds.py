"""How long a job may be overtaken after a claim that had to wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from support.waiting import until

if TYPE_CHECKING:
    from support.rows import Sql

    from alkstore_sa import Store


def waits_for_a_lock(sql: Sql, span: str) -> bool:
    """Tell whether another connection has been waiting for a lock for at least this span."""
    sql.execute("SELECT pg_stat_clear_snapshot()")  # in a transaction the view is read once
    found = sql.execute(
        "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        " AND clock_timestamp() - query_start >= %s::interval",
        [span],
    )
    return found.fetchone() is not None


async def test_a_claim_that_waited_for_a_lock_does_not_put_the_next_look_from_the_head_off(
    store: Store, sql: Sql
) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(20_000))
    with sql.transaction():
        sql.execute("LOCK TABLE alkstore.job IN ACCESS EXCLUSIVE MODE")
        claiming = asyncio.create_task(queue.claim("w"))
        await until(lambda: waits_for_a_lock(sql, "0.6 s"))
    assert len(await claiming) == 1
    sql.execute("""INSERT INTO alkstore.job (queue, payload, priority) VALUES ('q', '"urgent"', 9)""")
    end = time.monotonic() + 4
    claimed = None
    while claimed != "urgent" and time.monotonic() < end:
        (job,) = await queue.claim("w")
        claimed = job.payload
    assert claimed == "urgent"
