"""The stores: where everything begins. `Store` stands on an async engine, `SyncStore` on a plain one."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from alkstore_sa._channels import check_notification, user_channel
from alkstore_sa._core import StoreCore
from alkstore_sa._jobs import JobDefaults, QueueCore, read_stats, sweep, sweep_dead
from alkstore_sa._listener import DEFAULT_LISTEN_TIMEOUT, Listener
from alkstore_sa._rules import check_duration, check_name, outbox_queue_name
from alkstore_sa._runner import AsyncRunner, Runner
from alkstore_sa._session import in_session, refuse_twophase, write_connection
from alkstore_sa._streams import StreamCore
from alkstore_sa.codec import DEFAULT_MAX_PAYLOAD_BYTES
from alkstore_sa.listen import Notifications
from alkstore_sa.models import DEFAULT_SCHEMA
from alkstore_sa.outbox import OUTBOX_DEFAULTS, Outbox, SyncOutbox
from alkstore_sa.queue import Queue, SyncQueue, sweep_all, sweep_all_sync
from alkstore_sa.statements import NOTIFY
from alkstore_sa.stream import Stream, SyncStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from types import TracebackType

    from typing_extensions import Self

    from alkstore_sa._rules import Duration
    from alkstore_sa._types import AnySession, AnySyncSession, AsyncAnySession, QueueStats
    from alkstore_sa.codec import Codec
    from alkstore_sa.models import Models

__all__ = ["Store", "SyncStore"]

T = TypeVar("T")

POLLING: Final = "this store was made with wakes='poll', so it does not listen"
ON_CONNECTION: Final = "a store on a connection does not listen, or its transaction would: make one on the engine"


class _StoreDoor:
    """What both stores have in common."""

    def __init__(self, schema: str, codec: Codec | None, max_payload_bytes: int) -> None:
        self._core = StoreCore(schema, codec, max_payload_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in schema {self.schema!r}>"

    @property
    def schema(self) -> str:
        """The name of the schema that holds the engine's tables."""
        return self._core.schema

    @property
    def models(self) -> Models:
        """The mapped classes of this store's schema, to be queried like any model: `select(store.models.Job)`."""
        return self._core.models

    def _queue_core(
        self,
        name: str,
        visibility_timeout: Duration,
        max_attempts: int,
        backoff_base: Duration,
        codec: Codec | None,
        payload_type: type[Any],
    ) -> QueueCore:
        defaults = JobDefaults.checked(visibility_timeout, max_attempts, backoff_base)
        return QueueCore(self._core, check_name(name, "queue"), defaults, codec, payload_type)

    def _outbox_core(self, name: str) -> QueueCore:
        return QueueCore(self._core, outbox_queue_name(name), OUTBOX_DEFAULTS, None, object)

    @overload
    def notify_tx(self, session: AnySyncSession, channel: str, payload: str = "") -> None: ...
    @overload
    def notify_tx(self, session: AsyncAnySession, channel: str, payload: str = "") -> Awaitable[None]: ...
    def notify_tx(self, session: AnySession, channel: str, payload: str = "") -> Awaitable[None] | None:
        """Notify a channel from the session's transaction: delivered when it commits, dropped when it is rolled back.

        Transactions that notify commit one after another, database-wide, so keep them off the busiest paths; jobs and
        events need no notification of yours. For an async session it returns an awaitable.

        Args:
            session: a `Session`, `AsyncSession`, or a scoped registry of either; not one in two phases, which the
                server refuses.
            channel: see `Store.notify`.
            payload: see `Store.notify`.

        Raises:
            InvalidName, ReservedName, PayloadError, PayloadTooLarge: an argument is bad.
            BindError: the session cannot carry the notification.
        """
        operation = _notification(channel, payload)

        def notify(session: Session) -> None:
            refuse_twophase(session)
            operation(write_connection(session, self._core.models))

        return in_session(session, notify)


class Store(_StoreDoor):
    """The engine on an async SQLAlchemy engine for PostgreSQL (asyncpg or psycopg).

    A store needs no opening, opens no connection by itself, and never disposes of the engine. Its own operations are
    short transactions on the engine's pool; what ends in `_tx` joins the session it is given. When something waits for
    work or for notifications, it opens one connection outside the pool, to listen on.

    On an `AsyncConnection` inside a transaction every operation runs within that transaction and is rolled back with
    it, which suits tests; the connection must not be used by two tasks at a time.

    Args:
        bind: the engine, or a connection.
        schema: the schema that the migration put the tables into.
        codec: payloads to JSON text and back; a queue may have another.
        max_payload_bytes: the size limit of a payload's JSON text, in bytes of UTF-8.
        wakes: `"listen"`, or `"poll"` to do without the listening connection: what waits then looks from time to time.
        listen_engine: where to listen, if not where `bind` leads: a direct address beside a transaction pooler's.
        listen_timeout: within how long a listening connection that went silent is noticed, in seconds or as a
            `timedelta`.

    Raises:
        UnsupportedDialect: `bind` is no PostgreSQL.
        InvalidName, ReservedName: `schema` cannot be the engine's.
    """

    def __init__(
        self,
        bind: AsyncEngine | AsyncConnection,
        *,
        schema: str = DEFAULT_SCHEMA,
        codec: Codec | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        wakes: Literal["listen", "poll"] = "listen",
        listen_engine: AsyncEngine | None = None,
        listen_timeout: Duration = DEFAULT_LISTEN_TIMEOUT,
    ) -> None:
        if not isinstance(bind, (AsyncEngine, AsyncConnection)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Store needs an AsyncEngine or AsyncConnection, not {type(bind).__name__}; use SyncStore for an Engine"
            )
        super().__init__(schema, codec, max_payload_bytes)
        self._runner = AsyncRunner(bind)
        if wakes not in {"listen", "poll"}:
            raise ValueError(f"wakes={wakes!r}: needs 'listen' or 'poll'")
        refusal = POLLING if wakes == "poll" else ON_CONNECTION
        on_engine = listen_engine or (bind if isinstance(bind, AsyncEngine) else None)
        self._listener = Listener(
            self._core.hub,
            on_engine if wakes == "listen" else None,
            refusal,
            check_duration(listen_timeout, "listen_timeout").total_seconds(),
            self._core.waker.token,
        )

    @overload
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = ...,
        max_attempts: int = ...,
        backoff_base: Duration = ...,
        codec: Codec | None = ...,
    ) -> Queue[Any]: ...
    @overload
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = ...,
        max_attempts: int = ...,
        backoff_base: Duration = ...,
        codec: Codec | None = ...,
        payload_type: type[T],
    ) -> Queue[T]: ...
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = 300,
        max_attempts: int = 3,
        backoff_base: Duration = 5,
        codec: Codec | None = None,
        payload_type: type[Any] = object,
    ) -> Queue[Any]:
        """Return a handle on the queue `name`, without I/O; the queue need not be made.

        Args:
            name: 1 to 200 characters of any kind except NUL, not beginning with `__alkstore_`.
            visibility_timeout: how long a claim lasts before another may take the job, in seconds or as a `timedelta`.
            max_attempts: how often a job may be claimed before it is dead.
            backoff_base: the first delay of the retry curve, in seconds or as a `timedelta`.
            codec: another codec than the store's.
            payload_type: what claims decode payloads into; by default plain JSON values. A payload that does not fit is
                moved to dead with the reason.

        Raises:
            InvalidName, ReservedName, ValueError: an argument is bad.
        """
        return Queue(
            self._queue_core(name, visibility_timeout, max_attempts, backoff_base, codec, payload_type),
            self._runner,
            self._listener,
        )

    def outbox(self, name: str) -> Outbox:
        """Return a handle on the outbox `name`, without I/O."""
        return Outbox(self._outbox_core(name), self._runner, self._listener)

    @overload
    def stream(self, name: str, *, codec: Codec | None = ...) -> Stream[Any]: ...
    @overload
    def stream(self, name: str, *, codec: Codec | None = ..., payload_type: type[T]) -> Stream[T]: ...
    def stream(self, name: str, *, codec: Codec | None = None, payload_type: type[Any] = object) -> Stream[Any]:
        """Return a handle on the stream `name`, without I/O; the stream need not be made.

        Args:
            name: like a queue's.
            codec: another codec than the store's.
            payload_type: what readers decode payloads into; by default plain JSON values.

        Raises:
            InvalidName, ReservedName: the name is bad.
        """
        return Stream(StreamCore(self._core, name, codec, payload_type), self._runner, self._listener)

    async def notify(self, channel: str, payload: str = "") -> None:
        """Notify a channel, in a transaction of its own.

        Args:
            channel: 1 to 200 characters, not beginning with `__alkstore_`. Up to 63 bytes it is the channel that any
                other client may LISTEN on; a longer name is known to this library alone.
            payload: text of less than 8000 bytes.

        Raises:
            InvalidName, ReservedName, PayloadError, PayloadTooLarge: an argument is bad; nothing was sent.
        """
        await self._runner.run(_notification(channel, payload))

    def listen(self, *channels: str, buffer: int = 1000) -> Notifications:
        """Subscribe to channels: `async with store.listen("prices") as notifications: async for ... in notifications`.

        Inside the block, whatever is committed on these channels arrives, in the order of the commits. A notification
        is lost while the connection is, so a subscriber is told (`Notification.is_reconnect`) when it is there again.
        A subscriber that reads too slowly is told by `Lagged`. The iteration ends when the store is closed.

        Args:
            channels: see `notify`. A channel that is listened to already costs no round trip.
            buffer: how many notifications to keep for this subscriber.

        Raises:
            InvalidName, ReservedName, ValueError: an argument is bad.
            BindError: on entering: this store cannot listen, by its own settings or because of a pooler in between.
            DBAPIError, OSError: on entering: there is no connection to be had now. (SQLAlchemy 2.0 passes on what
                asyncpg raises while it connects.)
        """
        return Notifications(self._listener, channels, buffer)

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[AsyncSession]:
        """Hand out a session in a READ COMMITTED transaction, for callers who have none.

        Leaving the block commits, an exception rolls back; either gives the connection back to the pool. Objects stay
        readable after the commit (`expire_on_commit=False`).
        """
        async with (
            self._runner.connect() as connection,
            AsyncSession(connection, expire_on_commit=False, join_transaction_mode="create_savepoint") as session,
            session.begin(),
        ):
            yield session

    async def check(self) -> None:
        """See whether the database holds the engine's tables in a version that this package works on.

        The first operation of a store does the same by itself, except those that join a session.

        Raises:
            SchemaMissing, SchemaMismatch: it does not; the message names the migration that mends it.
        """
        await self._runner.run(self._core.check)

    async def stats(self) -> dict[str, QueueStats]:
        """Count the jobs of every queue that has any, those behind outboxes included."""
        return await self._runner.run(self._core.checked(read_stats(self._core)))

    async def sweep_expired(self) -> int:
        """Move the jobs of all queues that must not run any more to dead and return how many.

        These are the jobs whose `expires_at` has passed and those without an attempt left, as far as no live lease
        holds them. It goes in portions of 1000, each atomic, and skips rows that another transaction has locked, so any
        number of processes may sweep at once (docs/guide.md, Dead jobs).
        """
        return await sweep_all(self._runner, self._core, sweep(self._core))

    async def sweep_dead(self, older_than: Duration) -> int:
        """Delete the jobs of all queues that died longer ago than `older_than` and return how many."""
        return await sweep_all(self._runner, self._core, sweep_dead(self._core, older_than))

    async def close(self) -> None:
        """End what runs on this store (`Outbox.run`, `consume`, `subscribe`, `listen`), and its listening connection.

        Wakes not yet sent are sent, and consumers' offsets saved. Each step is bounded to 2 seconds, whatever the
        server does. The engine stays open; the store may be closed again.
        """
        await self._listener.close()
        await self._core.waker.flush_async()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SyncStore(_StoreDoor):
    """The engine on a plain SQLAlchemy engine: a `Store` whose operations block. `Store` says what each does.

    It may be used by many threads at once, like the engine; on a `Connection` by one at a time.
    """

    def __init__(
        self,
        bind: Engine | Connection,
        *,
        schema: str = DEFAULT_SCHEMA,
        codec: Codec | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        if not isinstance(bind, (Engine, Connection)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"SyncStore needs an Engine or Connection, not {type(bind).__name__}; for an AsyncEngine use Store"
            )
        super().__init__(schema, codec, max_payload_bytes)
        self._runner = Runner(bind)

    @overload
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = ...,
        max_attempts: int = ...,
        backoff_base: Duration = ...,
        codec: Codec | None = ...,
    ) -> SyncQueue[Any]: ...
    @overload
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = ...,
        max_attempts: int = ...,
        backoff_base: Duration = ...,
        codec: Codec | None = ...,
        payload_type: type[T],
    ) -> SyncQueue[T]: ...
    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration = 300,
        max_attempts: int = 3,
        backoff_base: Duration = 5,
        codec: Codec | None = None,
        payload_type: type[Any] = object,
    ) -> SyncQueue[Any]:
        """Return a handle on the queue `name`, without I/O: see `Store.queue`."""
        return SyncQueue(
            self._queue_core(name, visibility_timeout, max_attempts, backoff_base, codec, payload_type), self._runner
        )

    def outbox(self, name: str) -> SyncOutbox:
        """Return a handle on the outbox `name`, without I/O."""
        return SyncOutbox(self._outbox_core(name), self._runner)

    @overload
    def stream(self, name: str, *, codec: Codec | None = ...) -> SyncStream[Any]: ...
    @overload
    def stream(self, name: str, *, codec: Codec | None = ..., payload_type: type[T]) -> SyncStream[T]: ...
    def stream(self, name: str, *, codec: Codec | None = None, payload_type: type[Any] = object) -> SyncStream[Any]:
        """Return a handle on the stream `name`, without I/O: see `Store.stream`."""
        return SyncStream(StreamCore(self._core, name, codec, payload_type), self._runner)

    def notify(self, channel: str, payload: str = "") -> None:
        """Notify a channel, in a transaction of its own: see `Store.notify`."""
        self._runner.run(_notification(channel, payload))

    @contextmanager
    def begin(self) -> Generator[Session]:
        """Hand out a session in a READ COMMITTED transaction: see `Store.begin`."""
        with (
            self._runner.connect() as connection,
            Session(connection, expire_on_commit=False, join_transaction_mode="create_savepoint") as session,
            session.begin(),
        ):
            yield session

    def check(self) -> None:
        """See whether the database holds the engine's tables in a version that works: see `Store.check`."""
        self._runner.run(self._core.check)

    def stats(self) -> dict[str, QueueStats]:
        """Count the jobs of every queue that has any, those behind outboxes included."""
        return self._runner.run(self._core.checked(read_stats(self._core)))

    def sweep_expired(self) -> int:
        """Move the jobs of all queues that must not run any more to dead: see `Store.sweep_expired`."""
        return sweep_all_sync(self._runner, self._core, sweep(self._core))

    def sweep_dead(self, older_than: Duration) -> int:
        """Delete the jobs of all queues that died longer ago than `older_than` and return how many."""
        return sweep_all_sync(self._runner, self._core, sweep_dead(self._core, older_than))

    def close(self) -> None:
        """Wait until wakes not yet sent are sent, at most 2 seconds; the engine stays open. May be called again."""
        self._core.waker.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _notification(channel: str, payload: str) -> Callable[[Connection], None]:
    """Return the operation that notifies, once it is committed."""
    parameters = {"channel": user_channel(channel), "payload": check_notification(payload)}

    def operation(connection: Connection) -> None:
        connection.execute(NOTIFY, parameters)

    return operation
