"""One interface to both doors, for tests of what does not depend on the door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from alkstore_sa import Store, SyncStore

if TYPE_CHECKING:
    from alkstore_sa import JobHandle, SyncJobHandle

DOORS = ("asyncpg", "psycopg", "sync")


@dataclass
class Door:
    """A store of either kind; every operation is awaited."""

    store: Store | SyncStore
    engine: AsyncEngine | Engine

    async def enqueue_many(self, payloads: list[Any], *, queue: str = "q", **options: Any) -> list[int]:
        if isinstance(self.store, Store):
            return await self.store.queue(queue).enqueue_many(payloads, **options)
        return self.store.queue(queue).enqueue_many(payloads, **options)

    async def enqueue_tx(self, payloads: list[Any], *, queue: str = "q", **options: Any) -> list[int]:
        """Enqueue in a session's transaction and commit it."""
        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine) as session:
                jobs = self.store.queue(queue).enqueue_many_tx(session, payloads, **options)
                await session.commit()
        else:
            with Session(self.engine) as session:
                jobs = self.store.queue(queue).enqueue_many_tx(session, payloads, **options)
                session.commit()
        return [job.id for job in jobs]

    async def claim(
        self, n: int, *, queue: str = "q", payload_type: type[Any] = object
    ) -> list[JobHandle[Any]] | list[SyncJobHandle[Any]]:
        if isinstance(self.store, Store):
            return await self.store.queue(queue, payload_type=payload_type).claim("w", n)
        return self.store.queue(queue, payload_type=payload_type).claim("w", n)

    async def close(self) -> None:
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            self.engine.dispose()


def open_door(kind: str, url: str, *, max_payload_bytes: int | None = None, **engine_options: Any) -> Door:
    """Return a door of one of the `DOORS`; `url` is for the driver of that name, psycopg for the sync one."""
    options: dict[str, Any] = {} if max_payload_bytes is None else {"max_payload_bytes": max_payload_bytes}
    if kind == "sync":
        engine = create_engine(url, **engine_options)
        return Door(SyncStore(engine, **options), engine)
    async_engine = create_async_engine(url, **engine_options)
    return Door(Store(async_engine, **options), async_engine)


def driver_of(kind: str) -> str:
    """Return the driver that a door needs."""
    return "psycopg" if kind == "sync" else kind
