"""The application with a plain `Session` and `SyncStore`: orders are placed while threads deliver their messages."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from alkstore_sa import SyncStore
from examples.orders.report import Report, report
from examples.orders.service import CreditLimitExceeded, place_order_sync

if TYPE_CHECKING:
    from alkstore_sa import SyncOutbox
    from examples.orders.delivery import HttpDelivery
    from examples.orders.run import Run

DRIVER = "psycopg"
THREADS = 3


def main(url: str, delivery: HttpDelivery, run: Run) -> Report | None:
    """Place all orders and deliver all messages; None if the run was stopped before that."""
    engine = create_engine(url)
    sessions = sessionmaker(engine, expire_on_commit=False)
    try:
        with SyncStore(engine) as store, ThreadPoolExecutor(THREADS) as threads:
            outbox = store.outbox("orders")
            delivering = [threads.submit(deliver, outbox, f"demo-{n}", delivery, run) for n in range(THREADS)]
            try:
                place_all(sessions, outbox, run)
                finished = all_delivered(outbox, run)
            finally:
                run.stop.cancel()
                for thread in delivering:
                    thread.result()
        if not finished:
            return None
        with sessions() as session:
            return report(session, run)
    finally:
        engine.dispose()


def deliver(outbox: SyncOutbox, worker_id: str, delivery: HttpDelivery, run: Run) -> None:
    """Deliver one message after the other until the run is stopped."""
    try:
        while not run.stop.cancelled:
            if not outbox.run_once(worker_id, delivery):
                time.sleep(0.05)  # nothing is due
    finally:
        run.stop.cancel()  # should it fail, everything stops


def place_all(sessions: sessionmaker[Session], outbox: SyncOutbox, run: Run) -> None:
    """Place each order in a transaction of its own."""
    for order in run.orders:
        if run.stop.cancelled:
            break
        try:
            with sessions.begin() as session:
                place_order_sync(session, outbox, order)
        except CreditLimitExceeded:
            run.rolled_back.append(order.number)
        else:
            run.placed.append(order.number)
        run.show()


def all_delivered(outbox: SyncOutbox, run: Run) -> bool:
    """Wait until no message is left to deliver, and return True; False if the run was stopped before that."""
    while not run.stop.cancelled:
        stats = outbox.stats()
        waiting = stats.pending + stats.processing
        if not waiting:
            return True
        run.show(waiting)
        time.sleep(0.1)
    return False
