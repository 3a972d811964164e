"""Placing an order: the order and the message about it in one transaction, which the caller commits or rolls back.

Both functions do the same, one for an `AsyncSession`, one for a plain `Session`. `enqueue_tx` is the same call in both:
like `session.add` it does no I/O, so there is nothing to await.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from examples.orders.models import Order

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from alkstore_sa import Outbox, SyncOutbox

CREDIT_LIMIT = Decimal(1000)

MAX_ATTEMPTS = 5
FIRST_RETRY_AFTER = 0.1  # seconds; so short that the demonstration ends soon. The default is 5.

# What a customer owes, the order that is being placed included: the session flushes before a query, which inserts both
# the order and the message.
OWED = select(func.sum(Order.amount)).where(Order.customer == bindparam("customer"), Order.status == "placed")


class CreditLimitExceeded(Exception):
    """The customer would owe more than the shop allows: the order must not exist, and nobody may hear of it."""


async def place_order(session: AsyncSession, outbox: Outbox, order: Order) -> None:
    """Add an order and its message to the session's transaction.

    Raises:
        CreditLimitExceeded: the caller lets its transaction roll back, and order and message are gone with it.
    """
    session.add(order)
    outbox.enqueue_tx(session, message(order), max_attempts=MAX_ATTEMPTS, backoff_base=FIRST_RETRY_AFTER)
    refuse_beyond_limit(order, await session.scalar(OWED, {"customer": order.customer}))


def place_order_sync(session: Session, outbox: SyncOutbox, order: Order) -> None:
    """Do the same in a plain `Session`: see `place_order`."""
    session.add(order)
    outbox.enqueue_tx(session, message(order), max_attempts=MAX_ATTEMPTS, backoff_base=FIRST_RETRY_AFTER)
    refuse_beyond_limit(order, session.scalar(OWED, {"customer": order.customer}))


def message(order: Order) -> dict[str, Any]:
    """Return what the other system is told. The order's number is known by now; a key made by the database is not."""
    return {"order": order.number, "customer": order.customer, "amount": order.amount}


def refuse_beyond_limit(order: Order, owed: Decimal | None) -> None:
    # Two orders of one customer at the same time would need a lock on the customer; here they come one after the other.
    if owed is None or owed > CREDIT_LIMIT:
        raise CreditLimitExceeded(f"order {order.number}: {order.customer} would owe {owed}, more than {CREDIT_LIMIT}")
