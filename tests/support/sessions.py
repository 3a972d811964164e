"""A caller's side: a business table, and sessions of every kind to write to it with."""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Integer, UniqueConstraint, create_engine, event, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session

from alkstore_sa import Store, SyncStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.databases import Database
    from support.rows import Sql

DOORS: Final = ("asyncpg", "psycopg", "sync psycopg")
JOIN_MODES: Final = ("conditional_savepoint", "rollback_only", "control_fully", "create_savepoint")
NOTHING: Final[tuple[list[object], list[object]]] = ([], [])


class Base(DeclarativeBase):
    """The application's own models."""


class Order(Base):
    """A business row; a reference that is there twice is refused by the server, and only at the commit."""

    __tablename__ = "orders"
    __table_args__ = (UniqueConstraint("reference", deferrable=True, initially="DEFERRED"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str]


class Customer(Base):
    """Another business row, in a module that comes first in the alphabet: a flush writes it before any job."""

    __module__ = "accounts"
    __tablename__ = "customers"

    id = mapped_column(Integer, primary_key=True)


async def done(value: Any) -> Any:
    """Await what an async session returns; take what a sync one returns as it is."""
    return await value if inspect.isawaitable(value) else value


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, 10 seconds at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true in time"
        await asyncio.sleep(0.005)


class Door:
    """One kind of store, and sessions and engines of the same kind on the same database."""

    def __init__(self, database: Database, kind: str) -> None:
        self._database = database
        self._closing: list[Any] = []
        self._engines: list[Any] = []
        self.kind = kind
        self.driver = kind.rpartition(" ")[2]
        self.is_async = kind == self.driver
        self.engine = self.new_engine()
        self.store: Any = Store(self.engine) if self.is_async else SyncStore(self.engine)

    def new_engine(self, **options: Any) -> Any:
        """Make a further engine on the database."""
        make = create_async_engine if self.is_async else create_engine
        engine = make(self._database.url(self.driver), **options)
        self._engines.append(engine)
        return engine

    def new_store(self, bind: Any, **options: Any) -> Any:
        """Make a further store on an engine or a connection."""
        return Store(bind, **options) if self.is_async else SyncStore(bind, **options)

    def session(self, bind: Any = "engine", *, cls: type[Session] = Session, **options: Any) -> Any:
        """Make a session, bound to the engine unless something else is said, be it None."""
        bind = self.engine if bind == "engine" else bind
        session: Any = AsyncSession(bind, sync_session_class=cls, **options) if self.is_async else cls(bind, **options)
        self._closing.append(session)
        return session

    def scoped_session(self) -> Any:
        """Make a registry of sessions, with one scope."""
        if not self.is_async:
            return scoped_session(self.session, scopefunc=lambda: 1)  # type: ignore[arg-type]
        return async_scoped_session(self.session, scopefunc=lambda: 1)  # type: ignore[arg-type]

    async def connect(self, engine: Any = None) -> Any:
        """Open a connection."""
        connection = await done((self.engine if engine is None else engine).connect())
        self._closing.append(connection)
        return connection

    def sync_engine(self, engine: Any = None) -> Any:
        """Return the plain engine at the bottom, which has the events and the pool."""
        engine = self.engine if engine is None else engine
        return engine.sync_engine if self.is_async else engine

    def sync_session(self, session: Any) -> Session:
        """Return the plain session at the bottom, which has the events."""
        return cast("Session", session.sync_session if self.is_async else session)

    def statements(self, engine: Any = None) -> list[str]:
        """Return a list that grows by each statement that the engine sends from now on, but for the store's wakes."""
        sent: list[str] = []

        def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            if "pg_notify(wake.channel" not in statement:
                sent.append(statement)

        event.listen(self.sync_engine(engine), "before_cursor_execute", note)
        return sent

    async def close(self) -> None:
        """Close everything that was opened here."""
        for closing in reversed(self._closing):
            await done(closing.close())
        for engine in self._engines:
            await done(engine.dispose())


@asynccontextmanager
async def open_door(database: Database, kind: str) -> AsyncIterator[Door]:
    """Open a door to a database; its business table is made first."""
    engine = create_engine(database.url("psycopg"))
    Base.metadata.create_all(engine)
    engine.dispose()
    door = Door(database, kind)
    try:
        yield door
    finally:
        await door.close()


@asynccontextmanager
async def begun(store: Any) -> AsyncIterator[Any]:
    """Enter `store.begin()` of either kind."""
    block = store.begin()
    if hasattr(block, "__aenter__"):
        async with block as session:
            yield session
    else:
        with block as session:
            yield session


def stored(sql: Sql) -> tuple[list[object], list[object]]:
    """Return what everybody can see: the references of the orders, and of the jobs for them."""
    orders = sql.execute("SELECT reference FROM orders ORDER BY id").fetchall()
    jobs = sql.execute("SELECT payload ->> 'order' FROM alkstore.job ORDER BY id").fetchall()
    return [row[0] for row in orders], [row[0] for row in jobs]


async def order_count(session: Any) -> int:
    """Read through the session how many orders there are."""
    return len((await done(session.scalars(select(Order.id)))).all())
