"""A server that dies and comes back while an outbox is being delivered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import create_async_engine
from support.databases import Database
from support.waiting import until

from alkstore_sa import StopToken, Store

if TYPE_CHECKING:
    from alkstore_sa import JobHandle
    from alkstore_sa.embedded import LocalServer


async def test_a_killed_server_costs_no_message_and_repeats_none_that_it_had_taken(
    own_server: LocalServer, driver: str
) -> None:
    database = Database(own_server.dsn)
    engine = create_async_engine(database.url(driver))
    outbox = Store(engine).outbox("mail")
    await outbox.enqueue_many(range(50))
    delivered: list[Any] = []
    stop = StopToken()

    def restart() -> None:
        own_server.kill()
        own_server.start_again()

    async def deliver(job: JobHandle[Any]) -> None:
        if len(delivered) == 10:
            await asyncio.to_thread(restart)
        delivered.append(job.payload)

    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=1))
    await until(lambda: len(set(delivered)) == 50)
    stop.cancel()
    await asyncio.wait_for(running, 30)
    assert sorted(delivered) == list(range(50))
    stats = await outbox.stats()
    assert (stats.pending, stats.processing, stats.dead) == (0, 0, 0)
    await engine.dispose()
