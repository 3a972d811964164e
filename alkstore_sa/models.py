"""The engine's tables as declarative models.

`Job`, `DeadJob`, ... map the tables in the default schema `alkstore`; `models_for(schema)` gives the mapped classes of
another one, which a store offers as `store.models`. They may be queried like any model, and written to as the docs
show; what a store does to them it does with the statements of `statements`.

Why the job table looks as it does (measured figures: docs/design.md):

- A claim changes only columns that no index names, so PostgreSQL keeps the new row version on the same page and
  touches no index (a HOT update). Fillfactor 50 leaves it the room, and there are no partial indexes on `state`.
- The last key of `ix_job_claim` is `(id + 0)`: with `id` itself, a planner whose statistics say "empty table" reads
  that whole index to find rows by their id.
- `spent_at` is set while the job has no attempt left, so the sweep finds these jobs through a small index of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Computed,
    DateTime,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Text,
    event,
    inspect,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column
from sqlalchemy.orm.attributes import set_committed_value

from alkstore_sa._jsonb import JsonDocument
from alkstore_sa._rules import check_schema_name

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DEAD_REASONS",
    "DEFAULT_SCHEMA",
    "SCHEMA_VERSION",
    "Base",
    "DeadJob",
    "DeadJobTable",
    "Job",
    "JobTable",
    "Lock",
    "LockTable",
    "Models",
    "Schedule",
    "ScheduleTable",
    "SchemaVersion",
    "SchemaVersionTable",
    "Stream",
    "StreamEvent",
    "StreamEventTable",
    "StreamOffset",
    "StreamOffsetTable",
    "StreamTable",
    "metadata",
    "models_for",
]

DEFAULT_SCHEMA: Final = "alkstore"

SCHEMA_VERSION: Final = 1
"""The version of the tables that these models map; `alkstore_sa.migrations` builds it."""

# As PostgreSQL gives it back, which is what Alembic compares it with.
SPENT_AT: Final = (
    "CASE WHEN attempts >= max_attempts THEN COALESCE(lease_expires_at, created_at)"
    " ELSE NULL::timestamp with time zone END"
)

STORAGE: Final = {
    "job": {
        "fillfactor": "50",
        # An emptied table keeps its pages: a plan made for one without any reads the table from end to end.
        "vacuum_truncate": "false",
        # Every job leaves two dead row versions: clean up by the thousand, not by the fifth of the table.
        "autovacuum_vacuum_scale_factor": "0.01",
        "autovacuum_vacuum_threshold": "1000",
        "autovacuum_analyze_scale_factor": "0.05",
        "autovacuum_analyze_threshold": "1000",
        "autovacuum_vacuum_cost_delay": "0",
    },
    # An event is inserted without a place and updated once. Pages are kept for the same reason as the job table's.
    "stream_event": {"vacuum_truncate": "false"},
    "lock": {"fillfactor": "50"},
    "stream": {"fillfactor": "50"},
    "stream_offset": {"fillfactor": "50"},
}
"""The storage settings of tables that churn."""

DEAD_REASONS: Final = ("failed", "exhausted", "lapsed", "expired", "undecodable")
"""Why a job is dead: its handler failed it; its last attempt was retried; the lease of its last attempt lapsed (the
worker died or hung); its validity passed before it ran; its payload did not decode."""

NOW: Final = text("statement_timestamp()")
DEFAULT_VISIBILITY: Final = text("'00:05:00'::interval")
DEFAULT_BACKOFF: Final = text("'00:00:05'::interval")
LONGEST: Final = "'3650 days'::interval"
# What both drivers can read as a datetime in any time zone.
EARLIEST: Final = "'0001-01-03 00:00:00+00'::timestamptz"
LATEST: Final = "'9999-12-29 00:00:00+00'::timestamptz"


class JobContent:
    """The columns that a job keeps when it dies: its identity, its content, and how far it came."""

    queue: Mapped[str] = mapped_column(Text)
    payload: Mapped[Any] = mapped_column(JsonDocument)
    headers: Mapped[dict[str, Any]] = mapped_column(JsonDocument, server_default=text("'{}'::jsonb"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    run_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    attempts: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(Integer, server_default=text("3"))
    visibility_timeout: Mapped[timedelta] = mapped_column(Interval, server_default=DEFAULT_VISIBILITY)
    backoff_base: Mapped[timedelta] = mapped_column(Interval, server_default=DEFAULT_BACKOFF)
    worker_id: Mapped[str | None] = mapped_column(Text)
    last_error: Mapped[str | None] = mapped_column(Text)


class JobTable(JobContent):
    """A job that is pending or processing; an acknowledged one has no row.

    `id` stays readable after the commit of the session that added the job, without I/O, also with
    `expire_on_commit` and after a worker has deleted the row.
    """

    __tablename__ = "job"
    # An insert reads back the id and no more, so a producer's role need not be allowed to read anything else.
    __mapper_args__: ClassVar[dict[str, Any]] = {"eager_defaults": False}

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=False))
    state: Mapped[Literal["pending", "processing"]] = mapped_column(Text, server_default=text("'pending'::text"))
    lease: Mapped[int | None] = mapped_column(BigInteger)
    """The number of the claim that holds the job: unique in the schema and growing; NULL when no claim does."""
    lease_expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    spent_at: Mapped[datetime | None] = mapped_column(
        DateTime(timezone=True),
        Computed(SPENT_AT, persisted=True),
    )
    """From when on the sweep takes a job without an attempt left; NULL while it has one."""

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            PrimaryKeyConstraint("id", name="pk_job"),
            CheckConstraint("char_length(queue) BETWEEN 1 AND 240", name="ck_job_queue"),
            CheckConstraint("state IN ('pending', 'processing')", name="ck_job_state"),
            CheckConstraint("attempts >= 0", name="ck_job_attempts"),
            CheckConstraint("max_attempts >= 1", name="ck_job_max_attempts"),
            CheckConstraint(
                f"visibility_timeout > '00:00:00'::interval AND visibility_timeout <= {LONGEST}",
                name="ck_job_visibility_timeout",
            ),
            CheckConstraint(
                f"backoff_base > '00:00:00'::interval AND backoff_base <= {LONGEST}", name="ck_job_backoff_base"
            ),
            CheckConstraint("jsonb_typeof(headers) = 'object'", name="ck_job_headers"),
            CheckConstraint(
                f"run_at BETWEEN {EARLIEST} AND {LATEST} AND created_at BETWEEN {EARLIEST} AND {LATEST}"
                f" AND expires_at BETWEEN {EARLIEST} AND {LATEST}",
                name="ck_job_times",
            ),
            CheckConstraint(
                "(state = 'processing') = (lease IS NOT NULL)"
                " AND (state = 'processing') = (lease_expires_at IS NOT NULL)",
                name="ck_job_lease",
            ),
            Index("ix_job_claim", "queue", text("priority DESC"), "run_at", text("(id + 0)")),
            Index("ix_job_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
            Index("ix_job_spent_at", "spent_at", postgresql_where=text("spent_at IS NOT NULL")),
        )


class DeadJobTable(JobContent):
    """A job that will not run again, kept for people to look at until `sweep_dead` removes it."""

    __tablename__ = "dead"

    id: Mapped[int] = mapped_column(BigInteger, autoincrement=False)
    died_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    reason: Mapped[str] = mapped_column(Text)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            PrimaryKeyConstraint("id", name="pk_dead"),
            Index("ix_dead_queue_died_at", "queue", "died_at"),
            Index("ix_dead_died_at", "died_at"),
        )


class ScheduleTable:
    """A named schedule and its next boundary."""

    __tablename__ = "schedule"

    name: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Text)
    queue: Mapped[str] = mapped_column(Text)
    payload: Mapped[Any] = mapped_column(JsonDocument)
    headers: Mapped[dict[str, Any]] = mapped_column(JsonDocument, server_default=text("'{}'::jsonb"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    max_attempts: Mapped[int | None] = mapped_column(Integer)
    visibility_timeout: Mapped[timedelta | None] = mapped_column(Interval)
    backoff_base: Mapped[timedelta | None] = mapped_column(Interval)
    expires: Mapped[timedelta | None] = mapped_column(Interval)
    next_fire_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    last_fire_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            PrimaryKeyConstraint("name", name="pk_schedule"),
            Index("ix_schedule_next_fire_at", "next_fire_at"),
        )


class LockTable:
    """A named lock; free when it has no row or its time has passed."""

    __tablename__ = "lock"

    name: Mapped[str] = mapped_column(Text)
    owner: Mapped[str] = mapped_column(Text)
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    fence: Mapped[int] = mapped_column(BigInteger)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (PrimaryKeyConstraint("name", name="pk_lock"),)


class StreamTable:
    """The head of a stream: the last offset that was assigned in it."""

    __tablename__ = "stream"

    name: Mapped[str] = mapped_column(Text)
    head: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (PrimaryKeyConstraint("name", name="pk_stream"),)


class StreamEventTable:
    """An event of a stream; `offset` is its place, assigned after its commit by a reader.

    `id` stays readable after the commit of the session that published the event, as a job's does.
    """

    __tablename__ = "stream_event"
    __mapper_args__: ClassVar[dict[str, Any]] = {"eager_defaults": False}  # as with JobTable

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=False))
    stream: Mapped[str] = mapped_column(Text)
    offset: Mapped[int | None] = mapped_column(BigInteger)
    key: Mapped[str | None] = mapped_column(Text)
    payload: Mapped[Any] = mapped_column(JsonDocument)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            PrimaryKeyConstraint("id", name="pk_stream_event"),
            Index(
                "ix_stream_event_offset", "stream", "offset", unique=True, postgresql_where=text('"offset" IS NOT NULL')
            ),
            Index("ix_stream_event_unplaced", "stream", "id", postgresql_where=text('"offset" IS NULL')),
        )


class StreamOffsetTable:
    """How far a consumer has come in a stream."""

    __tablename__ = "stream_offset"

    stream: Mapped[str] = mapped_column(Text)
    consumer: Mapped[str] = mapped_column(Text)
    offset: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    lease: Mapped[int | None] = mapped_column(BigInteger)
    """The number of the hold that a running consumer has on this name; NULL when none runs."""
    lease_expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (PrimaryKeyConstraint("stream", "consumer", name="pk_stream_offset"),)


class SchemaVersionTable:
    """The numbered migration steps that built this schema; the highest one is its version."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(Integer, autoincrement=False)
    applied_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (PrimaryKeyConstraint("version", name="pk_schema_version"),)


class Base(DeclarativeBase):
    """Base of the models in the default schema, on a `MetaData` of the library's own."""

    metadata: ClassVar[MetaData] = MetaData(schema=DEFAULT_SCHEMA)


metadata: Final[MetaData] = Base.metadata


class Job(JobTable, Base):
    """A job that is pending or processing; an acknowledged one has no row. See `JobTable`."""


class DeadJob(DeadJobTable, Base):
    """A job that will not run again, kept for people to look at until `sweep_dead` removes it. See `DeadJobTable`."""


class Schedule(ScheduleTable, Base):
    """A named schedule and its next boundary. See `ScheduleTable`."""


class Lock(LockTable, Base):
    """A named lock; free when it has no row or its time has passed. See `LockTable`."""


class Stream(StreamTable, Base):
    """The head of a stream: the last offset that was assigned in it. See `StreamTable`."""


class StreamEvent(StreamEventTable, Base):
    """An event of a stream; `offset` is its place, assigned after its commit by a reader. See `StreamEventTable`."""


class StreamOffset(StreamOffsetTable, Base):
    """How far a consumer has come in a stream. See `StreamOffsetTable`."""


class SchemaVersion(SchemaVersionTable, Base):
    """The numbered migration steps that built this schema; the highest one is its version. See `SchemaVersionTable`."""


@dataclass(frozen=True)
class Models:
    """The mapped classes of one schema."""

    schema: str
    metadata: MetaData
    Base: type[DeclarativeBase]
    Job: type[JobTable]
    DeadJob: type[DeadJobTable]
    Schedule: type[ScheduleTable]
    Lock: type[LockTable]
    Stream: type[StreamTable]
    StreamEvent: type[StreamEventTable]
    StreamOffset: type[StreamOffsetTable]
    SchemaVersion: type[SchemaVersionTable]


@cache
def models_for(schema: str = DEFAULT_SCHEMA) -> Models:
    """Return the mapped classes of the engine's tables in `schema`; the same ones at each call.

    Raises:
        InvalidName, ReservedName: `schema` cannot be a schema of the engine's own.
    """
    check_schema_name(schema)
    default = (Job, DeadJob, Schedule, Lock, Stream, StreamEvent, StreamOffset, SchemaVersion)
    if schema == DEFAULT_SCHEMA:
        return Models(schema, metadata, Base, *default)
    base = cast(
        "type[DeclarativeBase]",
        type("Base", (DeclarativeBase,), {"metadata": MetaData(schema=schema), "__module__": __name__}),
    )

    def mapped(cls: type[Any]) -> Any:
        """Return the class that maps in this schema what `cls` maps in the default one."""
        return type(
            cls.__name__, (cls.__bases__[0], base), {"__doc__": cls.__doc__, "__module__": f"{__name__}[{schema}]"}
        )

    return _complete(Models(schema, base.metadata, base, *map(mapped, default)))


def _keep_id_readable(row: JobTable | StreamEventTable, expired: Iterable[str] | None) -> None:
    """Put the id back when a commit or rollback expires the row's attributes: it is known, and it never changes."""
    key = inspect(row).identity
    if key is not None and (expired is None or "id" in expired):
        set_committed_value(row, "id", key[0])


def _complete(models: Models) -> Models:
    """Add what the classes alone do not say: sequences, storage settings, and what keeps ids readable."""
    Sequence("job_lease", metadata=models.metadata, schema=models.schema)
    Sequence("lock_fence", metadata=models.metadata, schema=models.schema)
    for table, settings in STORAGE.items():
        options = ", ".join(f"{name} = {value}" for name, value in settings.items())
        # SQLAlchemy 2.0 has no option for them in Table.
        alter = DDL(f"ALTER TABLE %(fullname)s SET ({options})")  # type: ignore[no-untyped-call]
        event.listen(models.metadata.tables[f"{models.schema}.{table}"], "after_create", alter)
    for model in (models.Job, models.StreamEvent):
        event.listen(model, "expire", _keep_id_readable)
    return models


_complete(models_for(DEFAULT_SCHEMA))
