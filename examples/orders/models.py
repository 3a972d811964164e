"""The application's own tables."""

from decimal import Decimal

from sqlalchemy import Numeric
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's base. The library's tables are not on it: they have a schema and a base of their own."""


class Order(Base):
    """An order, known to everybody by the number that the shop has given it."""

    __tablename__ = "orders"

    number: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(index=True)
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    status: Mapped[str]
