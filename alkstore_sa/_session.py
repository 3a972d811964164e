"""The seam between the engine and a caller's session: joining its transaction, and refusing what cannot be joined.

What joins a session belongs to that session's transaction alone. So this module finds the connection that the session
writes through, and refuses three things: AUTOCOMMIT, where nothing could be rolled back; writes that go to a second
connection, where one could commit without the other; and a commit after `LeaseLost`. It looks before each flush and
each commit of a session that has carried the engine's rows, and wakes who waits for them after the commit, through
listeners on that one session, never on the `Session` class.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary, ref

from sqlalchemy import delete, event, inspect
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, object_mapper, scoped_session

from alkstore_sa._failures import sqlstate
from alkstore_sa.errors import BindError, LeaseLost, UnsupportedDialect
from alkstore_sa.models import JobTable, StreamEventTable
from alkstore_sa.statements import DOOM, HAS_WRITTEN, PROBE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from sqlalchemy import Connection, Delete, Engine
    from sqlalchemy.orm import SessionTransaction

    from alkstore_sa._types import AnySession, AnySyncSession, AsyncAnySession
    from alkstore_sa._waker import Announcement
    from alkstore_sa.models import Models

__all__ = [
    "add_rows",
    "doom",
    "in_session",
    "read_connection",
    "refuse_autocommit",
    "refuse_twophase",
    "require_postgresql",
    "write_connection",
]

P = ParamSpec("P")
T = TypeVar("T")

IN_FAILED_TRANSACTION: Final = "25P02"
AUTOCOMMIT: Final = (
    "the session is in AUTOCOMMIT: a job added in it would be committed even if the rest is not; give the session an"
    " engine or connection with a transactional isolation level, or use the operation without _tx"
)


class _Watch:
    """What is known of one session's current transaction.

    It holds nothing that would keep a session alive which the application has dropped, or its connection.
    """

    __slots__ = ("_carrier", "announcements", "doomed", "lost", "transaction")

    def __init__(self) -> None:
        self.transaction: ref[SessionTransaction] | None = None
        """The transaction that the following belongs to."""
        self._carrier: ref[Connection] | None = None
        self.doomed: ref[SessionTransaction] | None = None
        """The transaction or savepoint in which a lease turned out to be lost."""
        self.lost = ""
        self.announcements: set[Announcement] = set()
        """What to say after the commit."""

    @property
    def carrier(self) -> Connection | None:
        """The connection that carries the engine's rows."""
        return None if self._carrier is None else self._carrier()

    @carrier.setter
    def carrier(self, connection: Connection | None) -> None:
        self._carrier = None if connection is None else ref(connection)


# Not in session.info, which applications copy and clear.
_watches: WeakKeyDictionary[Session, _Watch] = WeakKeyDictionary()

# What to say of a row after the commit of the transaction that stores it, which need not be the one of its adding.
_announcements: WeakKeyDictionary[JobTable | StreamEventTable, Announcement] = WeakKeyDictionary()


@overload
def in_session(
    session: AnySyncSession, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
) -> T: ...
@overload
def in_session(
    session: AsyncAnySession, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
) -> Awaitable[T]: ...
@overload
def in_session(
    session: AnySession, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
) -> T | Awaitable[T]: ...
def in_session(
    session: AnySession, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
) -> T | Awaitable[T]:
    """Run `operation` on the sync session behind `session`: at once, or as an awaitable where that is an async one."""
    actual = _unwrap(session)
    if isinstance(actual, AsyncSession):
        return actual.run_sync(operation, *args, **kwargs)
    return operation(actual, *args, **kwargs)


def add_rows(
    session: AnySession, models: Models, rows: Iterable[JobTable | StreamEventTable], announcement: Announcement
) -> None:
    """Add pending rows to the session's unit of work, without I/O, and have them announced after its commit.

    Raises:
        BindError: the session has no bind for the engine's models, or is known to be in AUTOCOMMIT.
        UnsupportedDialect: it is bound to another database than PostgreSQL.
        TypeError: it is no session.
    """
    actual = _unwrap(session)
    sync_session = actual.sync_session if isinstance(actual, AsyncSession) else actual
    bind = _bind_of(sync_session, models)
    require_postgresql(bind.dialect.name)
    if _is_autocommit(sync_session, bind):
        raise BindError(AUTOCOMMIT)
    for row in rows:
        _announcements[row] = announcement
        sync_session.add(row)
    _watch(sync_session)
    if sync_session._flushing:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        _before_flush(sync_session)  # a listener of the caller's adds them, and ours may not be called any more


def write_connection(session: Session, models: Models) -> Connection:
    """Return the connection through which `session` writes, in its transaction, and watch what else that writes to."""
    _bind_of(session, models)
    connection = session.connection(bind_arguments=_bind_arguments(models))
    _carry(session, connection)
    return connection


def read_connection(session: Session, models: Models) -> Connection:
    """Return the same connection for a read that sees the transaction's own writes, those not yet flushed included.

    A session that does not flush by itself (`autoflush=False`) is left to do as it was told.
    """
    if session.autoflush:
        session.flush()
    bind = _bind_of(session, models)
    require_postgresql(bind.dialect.name)
    return session.connection(bind_arguments=_bind_arguments(models))


def doom(session: Session, connection: Connection, error: LeaseLost) -> None:
    """See to it that the transaction, or the innermost savepoint, of `session` can only be rolled back.

    The server is told by a statement that fails. It would take a COMMIT for a ROLLBACK now, without a word, so the
    session answers a commit with `LeaseLost` again, and so does the connection, which may be committed around it.
    """
    watch = _watch(session)
    if not watch.lost:
        _listen(session, "after_transaction_end", _forget_doom)
    transaction = session.get_nested_transaction() or session.get_transaction()
    watch.doomed = None if transaction is None else ref(transaction)
    watch.lost = str(error)
    refuse = partial(_refuse_doomed, watch.lost, connection.get_transaction())
    for name in ("commit", "prepare_twophase", "commit_twophase"):
        event.listen(connection, name, refuse)
    with suppress(Exception):  # it is there to fail, and an application may translate errors as it likes
        connection.execute(DOOM)


def _refuse_doomed(
    lost: str, doomed: object, connection: Connection, xid: Any = None, is_prepared: object = None
) -> None:
    """Raise `LeaseLost` at the commit of a doomed transaction, unless a rollback to a savepoint has healed it."""
    if is_prepared or connection.get_transaction() is not doomed:
        return
    try:
        connection.execute(PROBE)
    except Exception as failure:
        # SQLAlchemy takes the transaction for ended when its commit raises, so end it before the connection is reused.
        if xid is None:
            connection.dialect.do_rollback(connection.connection)
        else:
            connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False)
        raise LeaseLost(lost) from failure


def require_postgresql(dialect: str) -> None:
    """Raise `UnsupportedDialect` for another dialect than PostgreSQL."""
    if dialect != "postgresql":
        raise UnsupportedDialect(
            f"the engine needs PostgreSQL, this bind is {dialect}: use an engine for postgresql+asyncpg or"
            " postgresql+psycopg, in a session with several binds one for the engine's models"
        )


def refuse_twophase(session: Session) -> None:
    """Raise `BindError` if `session` commits in two phases, which the server refuses to a transaction that notifies."""
    if session.twophase:
        raise BindError(
            "a transaction in two phases cannot notify: PostgreSQL refuses to prepare it; notify after its commit"
        )


def refuse_autocommit(connection: Connection) -> None:
    """Raise `BindError` if `connection` is in AUTOCOMMIT, however it came to be."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise BindError(AUTOCOMMIT)


def _unwrap(session: AnySession) -> Session | AsyncSession:
    actual: Any = session() if isinstance(session, (scoped_session, async_scoped_session)) else session
    if isinstance(actual, (Session, AsyncSession)):
        return actual
    raise TypeError(
        f"{session!r} is no session: pass a Session, AsyncSession, scoped_session or async_scoped_session"
        " (an instance, not its maker)"
    )


def _bind_arguments(models: Models) -> dict[str, Any]:
    """Return what makes `get_bind` answer with the bind for writes: replica routing looks at the kind of statement."""
    return {"mapper": inspect(models.Job), "clause": _a_write(models)}


@cache
def _a_write(models: Models) -> Delete:
    return delete(models.Job)


def _bind_of(session: Session, models: Models) -> Engine | Connection:
    """Return what the engine's models are bound to in `session`, binding them first if it knows only others."""
    try:
        return session.get_bind(**_bind_arguments(models))
    except UnboundExecutionError as error:
        candidates = {id(bind): bind for bind in _binds(session) if bind.dialect.name == "postgresql"}
        if len(candidates) != 1:
            raise BindError(
                f"the session has binds, but none for the engine's models, and {len(candidates)} PostgreSQL binds to"
                " choose from: name one, as in Session(binds={YourBase: engine, store.models.Base: engine})"
            ) from error
        (bind,) = candidates.values()
        session.bind_mapper(models.Base, bind)
        return bind


def _binds(session: Session) -> list[Engine | Connection]:
    """Return the values of the session's `binds`, which SQLAlchemy 2.0 keeps to itself."""
    binds: Any = getattr(session, "binds", None)
    if binds is None:
        binds = getattr(session, "_Session__binds", {})
    return list(binds.values())


def _connections(session: Session) -> set[Connection]:
    """Return the connections of the session's current transaction, which SQLAlchemy 2.0 keeps to itself."""
    transaction: Any = session.get_transaction()
    if transaction is None:
        return set()
    if hasattr(transaction, "connections"):
        return set(transaction.connections)
    return {entry[0] for entry in transaction._connections.values()}  # noqa: SLF001  (public from SQLAlchemy 2.1.7 on)


def _is_autocommit(session: Session, bind: Engine | Connection) -> bool:
    """Tell whether the session is known to be in AUTOCOMMIT before there is a connection; the flush looks again."""
    options: dict[str, Any] = {**bind.get_execution_options(), **(getattr(session, "execution_options", None) or {})}
    default = getattr(bind.dialect, "_on_connect_isolation_level", None)
    return options.get("isolation_level", default) == "AUTOCOMMIT"


def _watch(session: Session) -> _Watch:
    """Return what is known of the session's current transaction, and have its listeners called from now on."""
    watch = _watches.get(session)
    if watch is None:
        watch = _watches[session] = _Watch()
        _listen(session, "before_flush", _before_flush)
        _listen(session, "before_commit", _before_commit)
        _listen(session, "after_commit", _after_commit)
    transaction = session.get_transaction()
    if transaction is None or watch.transaction is None or watch.transaction() is not transaction:
        watch.transaction = None if transaction is None else ref(transaction)
        watch.carrier = None
        watch.announcements.clear()
    return watch


def _listen(session: Session, name: str, listener: Callable[..., None]) -> None:
    """Register a listener on one session, also while that session is calling its listeners of the same event.

    What `event.listen` does besides lets a listener be removed again, at a third of the cost of an enqueue.
    """
    collection: Any = getattr(session.dispatch, name).for_modify(session.dispatch)
    collection.listeners = type(collection.listeners)((*collection.listeners, listener))


def _carry(session: Session, connection: Connection) -> None:
    """Note that `connection` carries the engine's rows in this transaction; refuse it where it cannot."""
    require_postgresql(connection.dialect.name)
    refuse_autocommit(connection)
    watch = _watch(session)
    if watch.carrier is None:
        watch.carrier = connection


def _refuse_split(session: Session, carrier: Connection) -> None:
    """Raise `BindError` if this transaction has written through another connection than `carrier`.

    The server is asked, so it does not matter how the write was made, and a replica that was only read from is fine. A
    transaction in two phases may spread: it commits as one.
    """
    if session.twophase:
        return
    for other in _connections(session) - {carrier}:
        if other.dialect.name != "postgresql" or _has_written(other):
            raise _split(other.engine, carrier.engine)


def _has_written(connection: Connection) -> bool:
    """Tell whether the transaction on `connection` has anything to commit."""
    try:
        return bool(connection.scalar(HAS_WRITTEN))
    except DBAPIError as failure:
        if sqlstate(failure) != IN_FAILED_TRANSACTION:
            raise
        return False  # a read that failed, say: whatever it was, it can only be rolled back


def _refuse_split_flush(session: Session, carrier: Connection) -> None:
    """Raise `BindError` if the flush that begins will write through another connection than `carrier`."""
    if session.twophase:
        return
    changed = [row for row in session.dirty if session.is_modified(row)]
    for mapper in {object_mapper(row) for row in (*session.new, *changed, *session.deleted)}:
        other = session.get_bind(mapper=mapper).engine
        if other is not carrier.engine:
            raise _split(other, carrier.engine)


def _split(other: Engine, carrier: Engine) -> BindError:
    return BindError(
        f"this transaction writes to {other.url!r} and carries jobs on {carrier.url!r}, through two connections: one"
        " could commit without the other. Bind both to the same engine, or use Session(twophase=True). A database other"
        " than PostgreSQL needs a session of its own, even to read"
    )


def _before_flush(session: Session, *_: object) -> None:
    """Look at what the flush will write, before it has written any of it."""
    rows = [row for row in session.new if isinstance(row, (JobTable, StreamEventTable))]
    for cls in {type(row) for row in rows}:
        _carry(session, session.connection(bind_arguments={"mapper": inspect(cls)}))
    watch = _watch(session)
    watch.announcements.update(_announcements[row] for row in rows if row in _announcements)
    carrier = watch.carrier
    if carrier is not None:
        _refuse_split_flush(session, carrier)
        _refuse_split(session, carrier)


def _before_commit(session: Session) -> None:
    watch = _watch(session)
    if watch.doomed is not None:
        raise LeaseLost(watch.lost)
    if not session.in_nested_transaction():
        session.flush()
        if (carrier := watch.carrier) is not None:
            _refuse_split(session, carrier)


def _after_commit(session: Session) -> None:
    """Announce what has been committed; within an outer transaction, which counts, to this process alone."""
    watch = _watch(session)
    carrier = watch.carrier
    if session.in_nested_transaction() or carrier is None:
        return
    engine = None if carrier.in_transaction() else carrier.engine
    for announcement in watch.announcements:
        announcement.send(engine)


def _forget_doom(session: Session, transaction: SessionTransaction) -> None:
    watch = _watch(session)
    if watch.doomed is not None and watch.doomed() is transaction:
        watch.doomed = None
