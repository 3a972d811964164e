"""Runs the example: a server, a database, the orders, the table. The package's docstring says how, and what to read."""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from alkstore_sa import StopToken, embedded
from examples.orders import demo, demo_sync
from examples.orders.database import migrate, own_database
from examples.orders.delivery import HttpDelivery
from examples.orders.models import Order
from examples.orders.receiver import Receiver
from examples.orders.run import Run

if TYPE_CHECKING:
    from types import FrameType

    from examples.orders.report import Report

INTERRUPTED = 130


def main() -> int:
    """Run, and return the exit code: 0, or 1 when something came out wrong, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m examples.orders",
        description="Place 600 orders and deliver their messages.",
        epilog="ALKSTORE_DEMO_DSN=postgresql://... names a server to use; the run makes and drops a database on it.",
    )
    parser.add_argument("door", nargs="?", choices=["async", "sync"], default="async", help="default: async")
    door = parser.parse_args().door

    stop = StopToken()
    stop_at_ctrl_c(stop)
    begun = time.monotonic()
    try:
        with embedded.provide(dsn=os.environ.get("ALKSTORE_DEMO_DSN") or None, durable=True) as server:
            print(f"PostgreSQL: {server.source}", flush=True)
            with own_database(server) as database:
                outcome = run_on(server, database, door, stop)
    except (embedded.PostgresNotFound, embedded.PostgresFailed) as error:
        print(error, file=sys.stderr)
        return 1
    if outcome is None:
        print("Stopped. The database of this run is dropped.", file=sys.stderr)
        return INTERRUPTED
    outcome.print(time.monotonic() - begun)
    return 1 if outcome.wrong else 0


def run_on(server: embedded.PostgresServer, database: str, door: str, stop: StopToken) -> Report | None:
    """Migrate a new database, and run the application on it."""
    driver = demo_sync.DRIVER if door == "sync" else demo.DRIVER
    url = server.url(driver, database)
    migrate(url)
    run = Run(read_orders(), Receiver(), stop)
    print(f"Placing {len(run.orders)} orders, {door} by {driver}, in the database {database}", flush=True)
    with run.receiver.listening() as port:
        delivery = HttpDelivery(port)
        try:
            if door == "sync":
                return demo_sync.main(url, delivery, run)
            return asyncio.run(demo.main(url, delivery, run))
        finally:
            run.progress.end()


def read_orders() -> list[Order]:
    """Read what the shop's customers want."""
    with Path(__file__).with_name("orders.csv").open(newline="", encoding="utf-8") as file:
        return [
            Order(number=row["number"], customer=row["customer"], amount=Decimal(row["amount"]), status="placed")
            for row in csv.DictReader(file)
        ]


def stop_at_ctrl_c(stop: StopToken) -> None:
    """Have the first Ctrl-C (or SIGTERM) end the run in good order, and a second one at once."""

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        stop.cancel()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


if __name__ == "__main__":
    sys.exit(main())
