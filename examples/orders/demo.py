"""The application with `AsyncSession` and `Store`: orders are placed while a task delivers their messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from alkstore_sa import Store
from examples.orders.report import Report, report
from examples.orders.service import CreditLimitExceeded, place_order

if TYPE_CHECKING:
    from alkstore_sa import Outbox
    from examples.orders.delivery import HttpDelivery
    from examples.orders.run import Run

DRIVER = "asyncpg"


async def main(url: str, delivery: HttpDelivery, run: Run) -> Report | None:
    """Place all orders and deliver all messages; None if the run was stopped before that."""
    engine = create_async_engine(url)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    try:
        async with Store(engine) as store:
            outbox = store.outbox("orders")
            # In a real application this loop is a task of the web process, or a process of its own.
            delivering = asyncio.create_task(outbox.run("demo", delivery, run.stop))
            delivering.add_done_callback(lambda _: run.stop.cancel())  # should it fail, everything stops
            try:
                await place_all(sessions, outbox, run)
                finished = await all_delivered(outbox, run)
            finally:
                run.stop.cancel()
                await delivering
        if not finished:
            return None
        async with sessions() as session:
            return await session.run_sync(report, run)
    finally:
        await engine.dispose()


async def place_all(sessions: async_sessionmaker[AsyncSession], outbox: Outbox, run: Run) -> None:
    """Place each order in a transaction of its own."""
    for order in run.orders:
        if run.stop.cancelled:
            break
        try:
            async with sessions.begin() as session:
                await place_order(session, outbox, order)
        except CreditLimitExceeded:
            run.rolled_back.append(order.number)
        else:
            run.placed.append(order.number)
        run.show()


async def all_delivered(outbox: Outbox, run: Run) -> bool:
    """Wait until no message is left to deliver, and return True; False if the run was stopped before that."""
    while not run.stop.cancelled:
        stats = await outbox.stats()
        waiting = stats.pending + stats.processing
        if not waiting:
            return True
        run.show(waiting)
        await run.stop.wait(0.1)
    return False
