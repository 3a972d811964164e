"""What came of a run, counted in the database and at the receiver, and whether it is what should have come of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text

from alkstore_sa import DeadJob, Job
from examples.orders.models import Order
from examples.orders.receiver import never_accepted

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from examples.orders.run import Run

LEFT_BY_ROLLED_BACK = text("""
    SELECT (SELECT count(*) FROM orders WHERE number = ANY (CAST(:numbers AS text[]))) AS orders,
           (SELECT count(*) FROM alkstore.job WHERE payload ->> 'order' = ANY (CAST(:numbers AS text[])))
         + (SELECT count(*) FROM alkstore.dead WHERE payload ->> 'order' = ANY (CAST(:numbers AS text[]))) AS messages
""")


@dataclass(frozen=True)
class Report:
    """The rows of the table, and what is wrong."""

    rows: list[tuple[str, int, str]]
    wrong: list[str]

    def print(self, seconds: float) -> None:
        """Print the table, aligned, and the verdict."""
        print()
        for name, count, remark in self.rows:
            print(f"  {name:<12}{count:>6}   {remark}")
        print(f"  {'time':<12}{seconds:>6.1f}   seconds\n")
        print("\n".join(f"WRONG: {sentence}" for sentence in self.wrong) or "All is as it should be.")


def report(session: Session, run: Run) -> Report:
    """Look at the database and at the receiver, and compare."""
    orders = set(session.scalars(select(Order.number)))
    unfinished = session.scalar(select(func.count()).select_from(Job))
    dead = {job.payload["order"]: job.last_error for job in session.scalars(select(DeadJob).order_by(DeadJob.id))}
    left = session.execute(LEFT_BY_ROLLED_BACK, {"numbers": run.rolled_back}).one()

    received = run.receiver.received
    leaked = sum(received[number] for number in run.rolled_back)
    delivered = [number for number in run.placed if number not in dead]
    exactly_once = received == Counter(delivered)

    rows = [
        ("placed", len(run.placed), "orders, each with its message in the same transaction"),
        ("rolled back", len(run.rolled_back), f"orders; SQL finds {left.orders} of them and {left.messages} messages"),
        ("delivered", len(delivered), "messages"),
        ("retried", run.receiver.retried, "messages, those that died included"),
        ("dead", len(dead), f"messages: {', '.join(dead)} ({', '.join(str(error) for error in set(dead.values()))})"),
        ("received", sum(received.values()), f"orders, {'each' if exactly_once else 'NOT each'} exactly once"),
        ("repeated", run.receiver.repeats, "deliveries after a lost answer, recognised by their Idempotency-Key"),
    ]
    findings = [
        (orders != set(run.placed), "the orders in the database are not those whose transactions were committed"),
        (left.orders or left.messages, "something is left of orders that were rolled back"),
        (leaked, f"{leaked} orders that were rolled back were received"),
        (unfinished, f"{unfinished} messages are neither delivered nor dead"),
        (set(dead) != set(filter(never_accepted, run.placed)), "the wrong messages are dead"),
        (not exactly_once, "not every delivered order was received exactly once"),
    ]
    return Report(rows, [sentence for is_wrong, sentence in findings if is_wrong])
