"""Streams: events that any number of consumers read, each from its own offset, all in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from alkstore_sa._rules import check_count, check_duration, check_name
from alkstore_sa._session import in_session
from alkstore_sa._subscription import Consumer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from datetime import datetime

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from alkstore_sa._listener import Listener
    from alkstore_sa._rules import Duration
    from alkstore_sa._runner import AsyncRunner, Runner
    from alkstore_sa._streams import StreamCore
    from alkstore_sa._types import AnySession, AnySyncSession, AsyncAnySession
    from alkstore_sa._waker import Announcement
    from alkstore_sa.models import StreamEventTable

__all__ = ["ConsumedEvent", "Event", "Stream", "SyncStream"]

T = TypeVar("T")
R = TypeVar("R")


class Event(Generic[T]):
    """An event as it was read."""

    def __init__(self, core: StreamCore, row: Any) -> None:
        self._core = core
        self._document: str = row.payload
        self.id: int = row.id
        """Stable from the publishing on; not the order of events."""
        self.stream: str = core.name
        self.offset: int = row.offset
        """The event's place in the stream, the same for every reader. Places count up from 1; there may be gaps."""
        self.key: str | None = row.key
        self.created_at: datetime = row.created_at

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.offset} of {self.stream!r}>"

    @property
    def payload(self) -> T:
        """The payload, decoded when it is looked at, so that one that does not decode stops nobody else.

        Raises:
            PayloadError: it does not decode, or does not fit the stream's `payload_type`.
        """
        decoded: T = self.decode(self._core.payload_type)
        return decoded

    def decode(self, into: type[Any]) -> Any:
        """Return the payload as an `into`, by the stream's codec; raises `PayloadError` where it does not fit."""
        return self._core.codec.decode(self._document, into)


class ConsumedEvent(Event[T]):
    """An event as a subscription hands it out."""

    def __init__(self, core: StreamCore, row: Any, consumer: str, lease: int) -> None:
        super().__init__(core, row)
        self._consumer = consumer
        self._lease = lease

    @overload
    def save_offset_tx(self, session: AnySyncSession) -> None: ...
    @overload
    def save_offset_tx(self, session: AsyncAnySession) -> Awaitable[None]: ...
    def save_offset_tx(self, session: AnySession) -> Awaitable[None] | None:
        """Save, in the session's transaction, that this event is done: its effects and its offset commit together.

        So an event, and all before it, take effect exactly once, whichever process dies at whatever time. For an async
        session it returns an awaitable.

        Raises:
            LeaseLost: another process goes on as this consumer by now. The transaction, or the innermost savepoint, is
                then good for a rollback only.
            BindError: as with `JobHandle.ack_tx`.
        """
        return in_session(session, self._save_in)

    def _save_in(self, session: Session) -> None:
        self._core.save_held_in(session, self._consumer, self._lease, self.offset)


class _StreamDoor:
    """What both doors have in common: everything that joins the caller's session."""

    def __init__(self, core: StreamCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} in schema {self._core.store.schema!r}>"

    @property
    def name(self) -> str:
        """The stream's name."""
        return self._core.name

    def publish_tx(self, session: AnySession, payload: Any, *, key: str | None = None) -> StreamEventTable:
        """Add an event to the session's transaction: it commits with it, or never existed.

        There is no I/O and nothing to await, as with `Queue.enqueue_tx`: the pending `StreamEvent` joins the session's
        unit of work. `event.id` is there after the flush; its offset it gets when it is read, after the commit.

        Raises:
            PayloadError, PayloadTooLarge, ValueError: the payload or the key is bad; nothing was added.
            BindError: the session cannot carry the event; at its flush or commit also where it has written elsewhere.
        """
        return self._core.publish_tx(session, [payload], key)[0]

    def publish_many_tx(
        self, session: AnySession, payloads: Iterable[Any], *, key: str | None = None
    ) -> list[StreamEventTable]:
        """Add an event for each payload to the session's transaction: see `publish_tx`."""
        return self._core.publish_tx(session, payloads, key)

    @overload
    def save_offset_tx(self, session: AnySyncSession, consumer: str, offset: int) -> bool: ...
    @overload
    def save_offset_tx(self, session: AsyncAnySession, consumer: str, offset: int) -> Awaitable[bool]: ...
    def save_offset_tx(self, session: AnySession, consumer: str, offset: int) -> Awaitable[bool] | bool:
        """Move a consumer's offset forward in the session's transaction; return whether it moved.

        False means that the consumer had come that far before, so somebody has handled these events: roll back what
        this transaction did for them. Within `subscribe` use `ConsumedEvent.save_offset_tx`, which sees to that itself.
        For an async session it returns an awaitable.
        """
        return in_session(session, self._core.save_offset_in, consumer, offset)


class Stream(_StreamDoor, Generic[T]):
    """A stream of a `Store`. A cheap handle: making one does no I/O, and the stream need not be made.

    An event gets its offset after the commit of the transaction that published it, so no consumer ever skips one that
    was published early and committed late, and all see the same order. A transaction that stays open holds nobody up.
    """

    def __init__(self, core: StreamCore, runner: AsyncRunner, listener: Listener) -> None:
        super().__init__(core)
        self._runner = runner
        self._listener = listener

    async def publish(self, payload: Any, *, key: str | None = None) -> int:
        """Publish an event in a transaction of its own and return its id.

        Args:
            payload: as with `Queue.enqueue`.
            key: any text, for consumers to go by; None for none.

        Raises:
            PayloadError, PayloadTooLarge, ValueError: the payload or the key is bad; nothing was stored.
        """
        return (await self.publish_many([payload], key=key))[0]

    async def publish_many(self, payloads: Iterable[Any], *, key: str | None = None) -> list[int]:
        """Publish an event for each payload, all or none, and return their ids in the payloads' order."""
        insertion = self._core.publish(payloads, key)
        return await self._run(insertion, atomic=insertion.atomic, announce=self._core.announcement)

    async def read(self, after: int = 0, limit: int = 100) -> list[Event[T]]:
        """Return up to `limit` events behind the offset `after`, in order; 0 is the beginning.

        Everything that was committed before the call is seen. Fewer than `limit` means that there are no more.
        """
        return [Event(self._core, row) for row in await self._run(self._core.read(after, limit))]

    async def head(self) -> int:
        """Return the offset of the last event that has been committed, 0 where there was none."""
        return await self._run(self._core.head())

    def subscribe(
        self, consumer: str, *, page: int = 100, poll: Duration = 1.0, lease: Duration = 30
    ) -> AsyncGenerator[ConsumedEvent[T]]:
        """Iterate over the stream's events, as they come, from where `consumer` left off, a new one from the first.

        Asking for the next event means that the last one is done. How far the consumer has come is saved with each
        page, when there is nothing to read, and at the end; after a crash the events since then are handed out again.
        To have effects exactly once, save events in the transaction of their effects: `event.save_offset_tx(session)`.

        Of all the processes that subscribe under one name, one at a time is handed events, under a lease which it
        renews by itself; the others stand by and go on when it ends, or `lease` after it was killed. A process that
        loses its lease (it was suspended, or its event loop blocked) takes its place among the others again.

        It sleeps until a wake, at most `poll`. A dropped connection or a restarting server is logged and does not end
        it. It ends when the store is closed, or when the iterator is (`contextlib.aclosing`).

        Args:
            consumer: the consumer's name, like a queue's.
            page: how many events to read at once.
            poll: how long to sleep at most, in seconds or as a `timedelta`.
            lease: how long the name stays taken when the process dies.

        Raises:
            InvalidName, ReservedName, ValueError: an argument is bad.
            SchemaMissing, SchemaMismatch, and database errors that do not pass by themselves, such as a missing right.
        """
        reader = Consumer(
            self._core,
            self._runner,
            self._listener,
            check_name(consumer, "consumer"),
            check_count(page, "page"),
            check_duration(poll, "poll").total_seconds(),
            check_duration(lease, "lease"),
        )
        return reader.events(lambda row, held: ConsumedEvent(self._core, row, consumer, held))

    async def get_offset(self, consumer: str) -> int:
        """Return how far a consumer has come: the offset that was saved last, 0 for one that is not known."""
        return await self._run(self._core.get_offset(consumer))

    async def save_offset(self, consumer: str, offset: int) -> bool:
        """Move a consumer's offset forward; False, and nothing done, where it had come that far before.

        `await stream.save_offset(name, await stream.head())` has a new consumer begin with the events to come.
        """
        return await self._run(self._core.save_offset(consumer, offset))

    async def forget(self, consumer: str) -> bool:
        """Remove a consumer that will not come back, so that `trim` waits for it no more; False if it is not known."""
        return await self._run(self._core.forget(consumer))

    async def trim(self, *, older_than: Duration | None = None, keep: int | None = None) -> int:
        """Delete old events and return how many: those older than `older_than`, except the newest `keep`.

        With both given, both must allow it. What a consumer has not come to yet is never deleted: see `forget`. It
        goes from the oldest event on, in portions of 1000, each atomic.
        """
        total = 0
        portion = self._core.trim(older_than, keep)
        while deleted := await self._run(portion):
            total += deleted
        return total

    async def _run(
        self, operation: Callable[[Connection], R], *, atomic: bool = False, announce: Announcement | None = None
    ) -> R:
        return await self._runner.run(self._core.store.checked(operation), atomic=atomic, announce=announce)


class SyncStream(_StreamDoor, Generic[T]):
    """A stream of a `SyncStore`: a `Stream` whose operations block. `subscribe` is asyncio's alone."""

    def __init__(self, core: StreamCore, runner: Runner) -> None:
        super().__init__(core)
        self._runner = runner

    def publish(self, payload: Any, *, key: str | None = None) -> int:
        """Publish an event in a transaction of its own and return its id: see `Stream.publish`."""
        return self.publish_many([payload], key=key)[0]

    def publish_many(self, payloads: Iterable[Any], *, key: str | None = None) -> list[int]:
        """Publish an event for each payload, all or none, and return their ids in order."""
        insertion = self._core.publish(payloads, key)
        return self._run(insertion, atomic=insertion.atomic, announce=self._core.announcement)

    def read(self, after: int = 0, limit: int = 100) -> list[Event[T]]:
        """Return up to `limit` events behind the offset `after`, in order: see `Stream.read`."""
        return [Event(self._core, row) for row in self._run(self._core.read(after, limit))]

    def head(self) -> int:
        """Return the offset of the last event that has been committed: see `Stream.head`."""
        return self._run(self._core.head())

    def get_offset(self, consumer: str) -> int:
        """Return how far a consumer has come: see `Stream.get_offset`."""
        return self._run(self._core.get_offset(consumer))

    def save_offset(self, consumer: str, offset: int) -> bool:
        """Move a consumer's offset forward: see `Stream.save_offset`."""
        return self._run(self._core.save_offset(consumer, offset))

    def forget(self, consumer: str) -> bool:
        """Remove a consumer that will not come back: see `Stream.forget`."""
        return self._run(self._core.forget(consumer))

    def trim(self, *, older_than: Duration | None = None, keep: int | None = None) -> int:
        """Delete old events and return how many: see `Stream.trim`."""
        total = 0
        portion = self._core.trim(older_than, keep)
        while deleted := self._run(portion):
            total += deleted
        return total

    def _run(
        self, operation: Callable[[Connection], R], *, atomic: bool = False, announce: Announcement | None = None
    ) -> R:
        return self._runner.run(self._core.store.checked(operation), atomic=atomic, announce=announce)
