"""The statements on streams.

Events are inserted without a place. Whoever reads gives places to what has been committed by then, in the order of the
ids that it sees, and from then on an event's offset never changes. So a transaction that published early and committed
late gets its place when it commits, behind what readers may have seen before.

To hand out places needs a lock and a snapshot that is not older than the lock: what a statement read before it got the
lock may have changed under it. Here one statement does both, and looks whether it may: it locks the stream's row, whose
`head` every hand-out moves, and compares the head that it locked with the one that its snapshot shows. If they are the
same, the snapshot shows every hand-out before the lock; otherwise it changes nothing, says `stale`, and is sent again.
One statement, so no client that stops half-way holds the lock.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from sqlalchemy import TextClause, text

from alkstore_sa.statements import lease_sequence, quoted_schema, unbound

__all__ = ["StreamStatements", "stream_statements_for"]

PLACED_AT_ONCE: Final = 1000
"""How many events one statement gives places to."""

# -- Publish -----------------------------------------------------------------------------------------------------------

# One row for each payload, in their order. All or none.
PUBLISH: Final = """
INSERT INTO {stream_event} (stream, key, payload)
SELECT CAST(:stream AS text), CAST(:key AS text), CAST(item.payload AS jsonb)
FROM unnest(CAST(:payloads AS text[])) WITH ORDINALITY AS item (payload, place)
ORDER BY item.place
RETURNING id"""

# -- Read --------------------------------------------------------------------------------------------------------------

COLUMNS: Final = """event.id, event."offset", event.key, CAST(event.payload AS text) AS payload, event.created_at"""

# The events behind :after, in order. Places are given to new ones where those that have places do not fill :limit.
# The last row is no event: it says whether that went well.
READ: Final = """
WITH old AS MATERIALIZED (
    SELECT {columns} FROM {stream_event} AS event
    WHERE event.stream = :stream AND event."offset" > :after
    ORDER BY event."offset" LIMIT :limit
), found AS MATERIALIZED (
    SELECT event.id FROM {stream_event} AS event
    WHERE event.stream = :stream AND event."offset" IS NULL AND (SELECT count(*) FROM old) < :limit
    ORDER BY event.id LIMIT {placed_at_once}
), seen AS MATERIALIZED (
    SELECT stream.head FROM {stream} AS stream WHERE stream.name = :stream
), locked AS MATERIALIZED (
    SELECT stream.head FROM {stream} AS stream
    WHERE stream.name = :stream AND EXISTS (SELECT FROM found) FOR UPDATE
), head AS MATERIALIZED (
    SELECT locked.head FROM locked JOIN seen ON seen.head = locked.head
), numbered AS MATERIALIZED (
    SELECT found.id, row_number() OVER (ORDER BY found.id) AS place FROM found
), placed AS (
    UPDATE {stream_event} AS event
    SET "offset" = head.head + numbered.place
    FROM head, numbered
    WHERE event.id = ANY (ARRAY(SELECT found.id FROM found)) AND numbered.id = event.id
    RETURNING {columns}
), advanced AS (
    UPDATE {stream} AS stream SET head = stream.head + (SELECT count(*) FROM found)
    WHERE stream.name = :stream AND EXISTS (SELECT FROM head)
    RETURNING stream.head
)
(SELECT event.*, 'event' AS outcome
FROM (SELECT * FROM old UNION ALL SELECT * FROM placed) AS event
WHERE event."offset" > :after
ORDER BY event."offset" LIMIT :limit)
UNION ALL
SELECT NULL, coalesce((SELECT head FROM advanced), (SELECT head FROM seen), 0), NULL, NULL, NULL,
    CASE
        WHEN NOT EXISTS (SELECT FROM found) THEN 'complete'
        WHEN EXISTS (SELECT FROM advanced) THEN
            CASE WHEN (SELECT count(*) FROM found) < {placed_at_once} THEN 'complete' ELSE 'more' END
        WHEN EXISTS (SELECT FROM seen) THEN 'stale'
        ELSE 'new'
    END"""

# The row that READ locks; made by the first reader, so that no publisher waits for another.
OPEN: Final = "INSERT INTO {stream} (name) VALUES (:stream) ON CONFLICT DO NOTHING"

# -- Consumers' offsets ------------------------------------------------------------------------------------------------

GET_OFFSET: Final = 'SELECT "offset" FROM {stream_offset} WHERE stream = :stream AND consumer = :consumer'

# Never backwards. Answers only where it moved.
SAVE_OFFSET: Final = """
INSERT INTO {stream_offset} AS stored (stream, consumer, "offset") VALUES (:stream, :consumer, :offset)
ON CONFLICT (stream, consumer) DO UPDATE SET "offset" = excluded."offset", updated_at = statement_timestamp()
WHERE stored."offset" < excluded."offset"
RETURNING stored."offset\""""

# The same for the process that holds the consumer's lease; answers unless the lease is another's by now.
SAVE_HELD: Final = """
UPDATE {stream_offset} AS stored
SET "offset" = greatest(stored."offset", :offset), updated_at = statement_timestamp()
WHERE stored.stream = :stream AND stored.consumer = :consumer AND stored.lease = :lease
RETURNING stored."offset\""""

# Only for a consumer without a row: with one, it would wait for an open transaction that has changed it.
REGISTER: Final = """
INSERT INTO {stream_offset} (stream, consumer, "offset") VALUES (:stream, :consumer, 0) ON CONFLICT DO NOTHING"""

# The consumer's lease, if it is free: never held, given back, or lapsed. A row that an open transaction holds is not.
TAKE: Final = """
WITH free AS MATERIALIZED (
    SELECT FROM {stream_offset} AS stored
    WHERE stored.stream = :stream AND stored.consumer = :consumer
        AND (stored.lease_expires_at <= statement_timestamp()) IS NOT FALSE
    FOR UPDATE SKIP LOCKED
)
UPDATE {stream_offset} AS stored
SET lease = nextval({lease_sequence}), lease_expires_at = statement_timestamp() + CAST(:ttl AS interval)
WHERE stored.stream = :stream AND stored.consumer = :consumer AND EXISTS (SELECT FROM free)
RETURNING stored."offset", stored.lease"""

# For how many seconds another holds it; none or less where a transaction holds the row of a lease that is free.
LEASE_LEFT: Final = """
SELECT CAST(coalesce(extract(epoch FROM stored.lease_expires_at - statement_timestamp()), 0) AS float8) AS seconds
FROM {stream_offset} AS stored WHERE stored.stream = :stream AND stored.consumer = :consumer"""

# Renews the lease from now and saves how far the consumer has come. It does not wait for an open transaction that holds
# the row (a SAVE_HELD in it): that answers 'held', and keeps the lease from being taken. A lapsed lease stays lapsed.
KEEP: Final = """
WITH mine AS (
    SELECT FROM {stream_offset} AS stored
    WHERE stored.stream = :stream AND stored.consumer = :consumer AND stored.lease = :lease
), free AS MATERIALIZED (
    SELECT stored.lease_expires_at > statement_timestamp() AS live FROM {stream_offset} AS stored
    WHERE stored.stream = :stream AND stored.consumer = :consumer AND stored.lease = :lease
    FOR UPDATE SKIP LOCKED
), kept AS (
    UPDATE {stream_offset} AS stored
    SET
        "offset" = greatest(stored."offset", :offset),
        updated_at = statement_timestamp(),
        lease_expires_at = statement_timestamp() + CAST(:ttl AS interval)
    WHERE stored.stream = :stream AND stored.consumer = :consumer AND EXISTS (SELECT FROM free WHERE free.live)
    RETURNING stored."offset"
)
SELECT CASE
    WHEN EXISTS (SELECT FROM kept) THEN 'kept'
    WHEN EXISTS (SELECT FROM free) THEN 'lapsed'
    WHEN EXISTS (SELECT FROM mine) THEN 'held'
    ELSE 'lost'
END"""

# Saves how far the consumer has come, and gives the lease back.
LEAVE: Final = """
UPDATE {stream_offset} AS stored
SET
    "offset" = greatest(stored."offset", :offset), updated_at = statement_timestamp(),
    lease = NULL, lease_expires_at = NULL
WHERE stored.stream = :stream AND stored.consumer = :consumer AND stored.lease = :lease
RETURNING stored."offset\""""

FORGET: Final = """
DELETE FROM {stream_offset} WHERE stream = :stream AND consumer = :consumer RETURNING "offset\""""

# -- Trimming ----------------------------------------------------------------------------------------------------------

# A portion, from the oldest event on: what every consumer has passed, beyond the newest :keep events, and before the
# first one that is younger than :older_than. Only as many events are looked at as may go; how many is kept from the
# planner, which would otherwise read and sort a whole stream that it believes to be not much longer.
TRIM: Final = """
WITH oldest AS MATERIALIZED (
    SELECT event."offset", event.created_at FROM {stream_event} AS event
    WHERE event.stream = :stream AND event."offset" IS NOT NULL
    ORDER BY event."offset" LIMIT (SELECT CAST(:n AS bigint))
), bound AS MATERIALIZED (
    SELECT least(
        (SELECT stream.head FROM {stream} AS stream WHERE stream.name = :stream)
            - coalesce(CAST(:keep AS bigint), 0),
        (SELECT min(stored."offset") FROM {stream_offset} AS stored WHERE stored.stream = :stream),
        (SELECT min(oldest."offset") - 1 FROM oldest
        WHERE oldest.created_at > statement_timestamp() - CAST(:older_than AS interval)),
        (SELECT max(oldest."offset") FROM oldest)) AS last
), picked AS MATERIALIZED (
    SELECT event.id FROM {stream_event} AS event
    WHERE event.stream = :stream AND event."offset" <= (SELECT bound.last FROM bound)
    ORDER BY event."offset" LIMIT (SELECT CAST(:n AS bigint)) FOR UPDATE SKIP LOCKED
)
DELETE FROM {stream_event} AS event WHERE event.id = ANY (ARRAY(SELECT picked.id FROM picked)) RETURNING event.id"""


class StreamStatements:
    """The statements on the stream tables of one schema."""

    def __init__(self, schema: str) -> None:
        schema = quoted_schema(schema)
        self._parts: dict[str, str] = {
            "stream": unbound(f"{schema}.stream"),
            "stream_event": unbound(f"{schema}.stream_event"),
            "stream_offset": unbound(f"{schema}.stream_offset"),
            "lease_sequence": lease_sequence(schema),
        }
        self.publish: TextClause = self._build(PUBLISH)
        self.read: TextClause = self._build(READ)
        self.open: TextClause = self._build(OPEN)
        self.get_offset: TextClause = self._build(GET_OFFSET)
        self.save_offset: TextClause = self._build(SAVE_OFFSET)
        self.save_held: TextClause = self._build(SAVE_HELD)
        self.register: TextClause = self._build(REGISTER)
        self.take: TextClause = self._build(TAKE)
        self.lease_left: TextClause = self._build(LEASE_LEFT)
        self.keep: TextClause = self._build(KEEP)
        self.leave: TextClause = self._build(LEAVE)
        self.forget: TextClause = self._build(FORGET)
        self.trim: TextClause = self._build(TRIM)

    def _build(self, template: str) -> TextClause:
        return text(template.format(**self._parts, columns=COLUMNS, placed_at_once=PLACED_AT_ONCE))


@cache
def stream_statements_for(schema: str) -> StreamStatements:
    """Return the statements on the stream tables in `schema`, the same object at each call."""
    return StreamStatements(schema)
