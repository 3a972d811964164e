"""The stream core, written once: functions of a sync `Connection`, or of the caller's sync `Session`.

Both doors (`Stream` and `SyncStream`) and the subscription stand on it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from alkstore_sa._insertion import Insertion
from alkstore_sa._rules import check_count, check_duration, check_name, check_offset, check_text
from alkstore_sa._session import add_rows, doom, write_connection
from alkstore_sa._stream_statements import stream_statements_for
from alkstore_sa.codec import encode_document
from alkstore_sa.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from alkstore_sa._core import StoreCore
    from alkstore_sa._rules import Duration
    from alkstore_sa._types import AnySession
    from alkstore_sa._waker import Announcement
    from alkstore_sa.codec import Codec
    from alkstore_sa.models import StreamEventTable

__all__ = ["Hold", "StreamCore"]

TRIM_PORTION: Final = 1000
END: Final = 2**63 - 1


class Hold(NamedTuple):
    """A consumer's lease, and how far the consumer had come when it was taken."""

    lease: int
    offset: int


class StreamCore:
    """One stream of one store."""

    def __init__(self, store: StoreCore, name: str, codec: Codec | None, payload_type: type[Any]) -> None:
        self.store: StoreCore = store
        self.name: str = check_name(name, "stream")
        self.codec: Codec = codec or store.codec
        self.payload_type: type[Any] = payload_type
        self.announcement: Announcement = store.announcement("stream", name)
        self._statements = stream_statements_for(store.schema)

    # -- publish -------------------------------------------------------------------------------------------------------

    def publish(self, payloads: Iterable[Any], key: str | None) -> Insertion:
        """Return the operation that inserts an event for each payload and returns their ids in the same order."""
        parameters = {"stream": self.name, "key": check_text(key, "key")}
        return Insertion.of(self._statements.publish, parameters, map(self._encode, payloads))

    def publish_tx(self, session: AnySession, payloads: Iterable[Any], key: str | None) -> list[StreamEventTable]:
        """Add an event for each payload to the session's unit of work."""
        check_text(key, "key")
        events = [self._new_row(self._encode(payload), key) for payload in payloads]
        add_rows(session, self.store.models, events, self.announcement)
        return events

    def _encode(self, payload: Any) -> str:
        return encode_document(self.codec, payload, self.store.max_payload_bytes)

    def _new_row(self, document: str, key: str | None) -> StreamEventTable:
        event = self.store.models.StreamEvent()
        event.stream = self.name
        event.key = key
        event.payload = self.store.header_codec.decode(document, object)
        return event

    # -- read ----------------------------------------------------------------------------------------------------------

    def read(self, after: int, limit: int) -> Callable[[Connection], list[Any]]:
        """Return the operation that reads up to `limit` events behind the offset `after`, in order."""
        check_offset(after, "after")
        check_count(limit, "limit")
        return lambda connection: self._read(connection, after, limit)[0]

    def head(self) -> Callable[[Connection], int]:
        """Return the operation that tells the offset of the last event committed by now, 0 where there is none."""
        return lambda connection: self._read(connection, END, 1)[1]

    def _read(self, connection: Connection, after: int, limit: int) -> tuple[list[Any], int]:
        """Give places to what has been committed; return the events behind `after`, and the head."""
        events: list[Any] = []
        while True:
            parameters = {"stream": self.name, "after": after, "limit": limit - len(events)}
            *rows, last = connection.execute(self._statements.read, parameters)
            if last.outcome == "new":
                connection.execute(self._statements.open, {"stream": self.name})
            events += sorted(rows, key=lambda row: row.offset)
            if last.outcome == "complete" or len(events) == limit:
                return events, last.offset
            if events:
                after = events[-1].offset

    # -- consumers -----------------------------------------------------------------------------------------------------

    def get_offset(self, consumer: str) -> Callable[[Connection], int]:
        """Return the operation that reads how far a consumer has come."""
        parameters = self._of(consumer)
        return lambda connection: connection.scalar(self._statements.get_offset, parameters) or 0

    def save_offset(self, consumer: str, offset: int) -> Callable[[Connection], bool]:
        """Return the operation that moves a consumer's offset forward, and tells whether it did."""
        parameters = self._of(consumer) | {"offset": check_offset(offset, "offset")}
        return lambda connection: connection.scalar(self._statements.save_offset, parameters) is not None

    def save_offset_in(self, session: Session, consumer: str, offset: int) -> bool:
        """Do what `save_offset` does in the session's transaction."""
        return self.save_offset(consumer, offset)(write_connection(session, self.store.models))

    def save_held_in(self, session: Session, consumer: str, lease: int, offset: int) -> None:
        """Save the offset of an event in the session's transaction, or doom that transaction."""
        connection = write_connection(session, self.store.models)
        parameters = self._of(consumer) | {"lease": lease, "offset": offset}
        if connection.scalar(self._statements.save_held, parameters) is None:
            error = LeaseLost(
                f"save_offset_tx of event {offset} of stream {self.name!r}: another process goes on as consumer"
                f" {consumer!r} by now and handles this event, so the transaction must not be committed"
            )
            doom(session, connection, error)
            raise error

    def forget(self, consumer: str) -> Callable[[Connection], bool]:
        """Return the operation that removes a consumer, and tells whether there was one."""
        parameters = self._of(consumer)
        return lambda connection: connection.scalar(self._statements.forget, parameters) is not None

    def take(self, consumer: str, ttl: timedelta) -> Callable[[Connection], Hold | timedelta]:
        """Return the operation that takes a consumer's lease, or tells for how long another holds it."""
        parameters = self._of(consumer)

        def operation(connection: Connection) -> Hold | timedelta:
            while True:
                row = connection.execute(self._statements.take, parameters | {"ttl": ttl}).one_or_none()
                if row is not None:
                    return Hold(row.lease, row.offset)
                row = connection.execute(self._statements.lease_left, parameters).one_or_none()
                if row is not None:
                    return timedelta(seconds=row.seconds)
                connection.execute(self._statements.register, parameters)

        return operation

    def keep(self, consumer: str, lease: int, offset: int, ttl: timedelta) -> Callable[[Connection], str]:
        """Return the operation that renews a consumer's lease, saves its offset, and tells what became of that."""
        parameters = self._of(consumer) | {"lease": lease, "offset": offset, "ttl": ttl}
        return lambda connection: str(connection.scalar(self._statements.keep, parameters))

    def leave(self, consumer: str, lease: int, offset: int) -> Callable[[Connection], None]:
        """Return the operation that saves a consumer's offset and gives its lease back."""
        parameters = self._of(consumer) | {"lease": lease, "offset": offset}
        return lambda connection: connection.scalar(self._statements.leave, parameters)

    def _of(self, consumer: str) -> dict[str, Any]:
        return {"stream": self.name, "consumer": check_name(consumer, "consumer")}

    # -- trim ----------------------------------------------------------------------------------------------------------

    def trim(self, older_than: Duration | None, keep: int | None) -> Callable[[Connection], int]:
        """Return the operation that deletes a portion of the oldest events, and tells how many."""
        if older_than is None and keep is None:
            raise ValueError("trim needs older_than, keep, or both: which events may go?")
        parameters = {
            "stream": self.name,
            "older_than": None if older_than is None else check_duration(older_than, "older_than", zero=True),
            "keep": None if keep is None else check_offset(keep, "keep"),
            "n": TRIM_PORTION,
        }
        return lambda connection: len(connection.scalars(self._statements.trim, parameters).all())
