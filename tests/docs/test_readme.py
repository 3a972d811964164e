"""The code in the README and the guide works as it stands there."""

from __future__ import annotations

import asyncio
import re
import textwrap
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Numeric, Text, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from support.waiting import DEADLINE

from alkstore_sa import DeadJob, StopToken, Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database

ROOT: Final = Path(__file__).parents[2]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(Text, primary_key=True)
    amount: Mapped[Decimal] = mapped_column(Numeric)


class Sent(Base):
    __tablename__ = "sent"
    to: Mapped[str] = mapped_column(Text, primary_key=True)


class Invoice(Base):
    __tablename__ = "invoice"
    order: Mapped[str] = mapped_column(Text, primary_key=True)


def block(page: str, containing: str) -> str:
    """Return the one Python block of a page that contains these words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [source for source in blocks if containing in source]
    return str(found)


async def run_inside(source: str, names: dict[str, Any]) -> None:
    """Run a block that awaits at its top level."""
    exec("async def body():\n" + textwrap.indent(source, "    "), names)
    await names["body"]()


async def test_the_application_of_the_readme_places_and_delivers_an_order(database: Database) -> None:
    posted: list[tuple[str, Any, int]] = []
    stop = StopToken()

    async def post(url: str, payload: Any, *, idempotency_key: int) -> None:
        posted.append((url, payload, idempotency_key))
        stop.cancel()

    url = database.url("asyncpg")
    source = block("README.md", "async def place_order").replace("postgresql+asyncpg://localhost/shop", url)
    names: dict[str, Any] = {
        "create_async_engine": create_async_engine,
        "async_sessionmaker": async_sessionmaker,
        "Decimal": Decimal,
        "Any": Any,
        "Order": Order,
        "post": post,
    }
    exec(source, names)
    async with names["engine"].begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await names["place_order"]("A-1", Decimal("9.90"))
    await asyncio.wait_for(names["deliver_orders"](stop), 10)
    ((_, payload, _),) = posted
    assert payload == {"order": "A-1"}
    stats = await names["outbox"].stats()
    assert (stats.pending, stats.processing, stats.dead) == (0, 0, 0)
    await names["engine"].dispose()


async def test_the_queue_of_the_readme_and_the_redrive_of_the_guide_work(store: Store, engine: Any) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    names: dict[str, Any] = {
        "store": store,
        "sessions": async_sessionmaker(engine),
        "Sent": Sent,
        "select": select,
        "DeadJob": DeadJob,
        "emails": store.queue("emails"),
    }
    await names["emails"].enqueue({"to": "b@example.org"})
    await run_inside(block("README.md", "ack_tx"), names)
    async with store.begin() as session:
        assert (await session.scalars(select(Sent.to))).all() == ["b@example.org"]
    await names["emails"].enqueue({"to": "c@example.org"})
    (job,) = await names["emails"].claim("w")
    await job.fail("no such mailbox")
    await run_inside(block("docs/guide.md", "dead.payload"), names)
    (again,) = await names["emails"].claim("w")
    assert again.payload == {"to": "c@example.org"}
    assert again.id != job.id


async def ends_by_itself(
    source: str, names: dict[str, Any], store: Store, reached: Callable[[], Awaitable[bool]]
) -> None:
    """Run a loop of a page until `reached()` is true, then close the store, which ends it."""
    running = asyncio.create_task(run_inside(source, names))
    end = asyncio.get_running_loop().time() + DEADLINE
    while not await reached():
        assert not running.done(), running.exception()
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)
    await store.close()
    await asyncio.wait_for(running, DEADLINE)


async def test_the_consumer_of_the_readme_works(store: Store) -> None:
    emails = store.queue("emails")
    await emails.enqueue({"to": "a@example.org"})

    async def is_empty() -> bool:
        return (await emails.stats()).pending + (await emails.stats()).processing == 0

    await ends_by_itself(block("README.md", "emails.consume"), {"emails": emails}, store, is_empty)


async def test_the_stream_of_the_readme_works(store: Store, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine)
    publish, subscribe = block("README.md", "publish_tx").split("\n\n")
    names: dict[str, Any] = {"store": store, "sessions": sessions, "Invoice": Invoice, "number": "A-1"}
    async with sessions.begin() as names["session"]:
        exec(publish, names)

    async def is_invoiced() -> bool:
        return bool((await store.stream("orders").get_offset("billing")) == 1)

    await ends_by_itself(subscribe, names, store, is_invoiced)
    async with sessions() as session:
        assert (await session.scalars(select(Invoice.order))).all() == ["A-1"]


async def test_the_notifications_of_the_guide_work(
    store: Store, engine: AsyncEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    listen, notify = block("docs/guide.md", "is_reconnect").split("\n\n")
    names: dict[str, Any] = {"store": store}

    async def is_heard() -> bool:
        async with async_sessionmaker(engine).begin() as names["session"]:
            await run_inside(notify, names)
        return "prices eur" in capsys.readouterr().out

    await ends_by_itself(listen, names, store, is_heard)
