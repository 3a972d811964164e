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

from alkstore_sa import DeadJob, StopToken, Store

if TYPE_CHECKING:
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
