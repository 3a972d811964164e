"""Both doors behind one face: a `SyncStore` that is awaited like a `Store`, so that one test proves a rule of both."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from alkstore_sa import Store, SyncStore
from alkstore_sa.job import ClaimedJob

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database

BOTH_DOORS: Final = ("asyncpg", "psycopg", "sync")


@asynccontextmanager
async def open_store(kind: str, database: Database) -> AsyncIterator[Store]:
    """Yield a store on `database`: an async one on the driver `kind`, or for "sync" a sync one that can be awaited."""
    if kind == "sync":
        plain = create_engine(database.url("psycopg"))
        with SyncStore(plain) as sync_store:
            yield cast(Store, _Awaited(sync_store))
        plain.dispose()
        return
    engine = create_async_engine(database.url(kind))
    async with Store(engine) as store:
        yield store
    await engine.dispose()


class _Awaited:
    """A sync store, queue or handle, whose blocking methods are called when what they return is awaited."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        if name == "queue":
            return lambda *args, **kwargs: _Awaited(value(*args, **kwargs))

        async def call(*args: Any, **kwargs: Any) -> Any:
            return _wrapped(value(*[_unwrapped(arg) for arg in args], **kwargs))

        return call


def _wrapped(value: Any) -> Any:
    if isinstance(value, ClaimedJob):
        return _Awaited(value)
    return [_wrapped(item) for item in value] if isinstance(value, list) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Awaited):
        return value._target
    return [_unwrapped(item) for item in value] if isinstance(value, list) else value
