"""Watching loops that wait for work: when they sleep, what they ask, and who may wake them."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from alkstore_sa import JobHandle, Outbox, Queue, Store, SyncStore
    from alkstore_sa._hub import Wakeup

NEVER: Final = 3600.0
"""A re-poll that comes too late for any test: what happens before it was not found by it."""

A_CLAIM: Final = "nextval("
A_LOOK_AHEAD: Final = "AS soonest"


class Naps:
    """The sleeps of all loops: how long each was meant to be, and which are under way."""

    def __init__(self) -> None:
        self.lengths: list[float | None] = []
        self.under_way: list[Wakeup] = []

    def noting(
        self, wait: Callable[[Wakeup, float | None], Awaitable[None]]
    ) -> Callable[[Wakeup, float | None], Awaitable[None]]:
        """Return `Wakeup.wait`, noted."""

        async def noted(wakeup: Wakeup, seconds: float | None) -> None:
            self.lengths.append(seconds)
            self.under_way.append(wakeup)
            try:
                await wait(wakeup, seconds)
            finally:
                self.under_way.remove(wakeup)

        return noted

    def asleep(self) -> int:
        """Return how many loops sleep and have heard of nothing yet."""
        return sum(not wakeup.woken for wakeup in self.under_way)


def is_listening(store: Store, source: Queue[Any] | Outbox) -> bool:
    """Tell whether the store hears of what comes into this queue or outbox."""
    return source._core.announcement.channel in store._listener._listening


async def until_asleep(naps: Naps, *loops: tuple[Store, Queue[Any] | Outbox]) -> None:
    """Wait until every one of these loops has looked in vain, or has no free slot, since it began to listen."""
    await until(lambda: all(is_listening(*loop) for loop in loops) and naps.asleep() == len(loops))


async def ack(job: JobHandle[Any]) -> None:
    """Finish a job."""
    await job.ack()


@asynccontextmanager
async def consuming(
    queue: Queue[Any],
    body: Callable[[JobHandle[Any]], Awaitable[None]] = ack,
    *,
    worker: str = "w",
    batch: int = 1,
    poll: float = NEVER,
) -> AsyncIterator[list[Any]]:
    """Consume in a task for the time of the block; yield the list that the payloads are added to."""
    seen: list[Any] = []

    async def consume() -> None:
        async with aclosing(queue.consume(worker, batch=batch, poll=poll)) as jobs:
            async for job in jobs:
                seen.append(job.payload)
                await body(job)

    task = asyncio.create_task(consume())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def statements(engine: Engine, part: str = "") -> list[str]:
    """Return a list that grows by each statement with `part` in it; the store's own wakes are not counted."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: Any) -> None:
        if part in statement and "pg_notify(wake.channel" not in statement:
            sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    return sent


@dataclass(frozen=True)
class Producers:
    """Those who may enqueue: the consumer's own store, and others, each with an engine of its own.

    `into` makes of a store the queue or outbox that they enqueue "late" into.
    """

    store: Store
    other: Store
    other_engine: AsyncEngine
    sync_store: SyncStore
    sync_engine: Engine
    into: Callable[[Any], Any]

    async def enqueue(self, way: str) -> None:
        """Enqueue in one of the `WAYS`."""
        await getattr(self, way)()

    async def by_the_same_store(self) -> None:
        await self.into(self.store).enqueue("late")

    async def by_another_store(self) -> None:
        await self.into(self.other).enqueue("late")

    async def by_a_sync_store(self) -> None:
        await asyncio.to_thread(self.into(self.sync_store).enqueue, "late")

    async def by_a_commit_of_the_same_store(self) -> None:
        async with self.store.begin() as session:
            self.into(self.store).enqueue_tx(session, "late")

    async def by_a_commit_of_another_store(self) -> None:
        async with self.other.begin() as session:
            self.into(self.other).enqueue_tx(session, "late")

    async def by_a_commit_of_a_session(self) -> None:
        async with AsyncSession(self.other_engine) as session:
            self.into(self.other).enqueue_tx(session, "late")
            await session.commit()

    async def by_a_commit_of_a_sync_session(self) -> None:
        def commit() -> None:
            with Session(self.sync_engine) as session:
                self.into(self.sync_store).enqueue_tx(session, "late")
                session.commit()

        await asyncio.to_thread(commit)


WAYS: Final = [name for name in vars(Producers) if name.startswith("by_")]
