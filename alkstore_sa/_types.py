"""Types that several layers share: sessions, options, and the values that queries return."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alkstore_sa._rules import Duration

__all__ = [
    "AnySession",
    "AnySyncSession",
    "AsyncAnySession",
    "EnqueueOptions",
    "JobSnapshot",
    "JobState",
    "OutboxOptions",
    "QueueStats",
    "Wait",
]

AnySyncSession: TypeAlias = "Session | scoped_session[Any]"
AsyncAnySession: TypeAlias = "AsyncSession | async_scoped_session[Any]"
AnySession: TypeAlias = "AnySyncSession | AsyncAnySession"
"""What a `_tx` operation joins: a session of either kind, or a scoped registry of one."""

JobState: TypeAlias = Literal["pending", "processing", "dead"]


class Wait(TypedDict, total=False):
    """When a job may first run; at most one of the two. None is the same as not given, here and below."""

    delay: Duration | None
    """How long after the enqueue, in seconds or as a `timedelta`; more than zero."""
    run_at: datetime | None
    """An aware point in time; in the past means at once."""


class OutboxOptions(Wait, total=False):
    """Options of one message of an outbox."""

    priority: int | None
    """Higher is claimed first; a `smallint`. Default 0."""
    expires: Duration | datetime | None
    """The job is not run after this: a span counted from the enqueue, or an aware point in time. Default: never."""
    max_attempts: int | None
    """How often the job may be claimed before it is dead; at least 1. Default: the queue's."""
    backoff_base: Duration | None
    """The curve's first delay: see `JobHandle.retry`. Default: the queue's."""
    headers: Mapping[str, Any] | None
    """JSON values that travel with the payload, such as a trace id. Default: none."""


class EnqueueOptions(OutboxOptions, total=False):
    """Options of one job, stamped onto its row: a later handle with other defaults changes no existing job."""

    visibility_timeout: Duration | None
    """How long a claim lasts before another may take the job. Default: the queue's."""


@dataclass(frozen=True)
class JobSnapshot:
    """A job's row as one statement saw it; it does not follow later changes."""

    id: int
    queue: str
    state: JobState
    payload: Any
    """As the queue decodes it; where that fails, as plain JSON, or as the JSON text."""
    headers: dict[str, Any]
    priority: int
    run_at: datetime
    created_at: datetime
    expires_at: datetime | None
    attempts: int
    max_attempts: int
    visibility_timeout: timedelta
    backoff_base: timedelta
    worker_id: str | None
    lease_expires_at: datetime | None
    last_error: str | None
    died_at: datetime | None = None
    reason: str | None = None
    """Why the job is dead, one of `alkstore_sa.models.DEAD_REASONS`; None while it is not."""


@dataclass(frozen=True)
class QueueStats:
    """What a queue held at one instant. Counting reads the queue's rows: ask every few seconds, not in a loop."""

    pending: int = 0
    processing: int = 0
    dead: int = 0
    due: int = 0
    """Jobs that a claim would take now: pending with their time come, or processing with a lapsed lease."""
    future: int = 0
    """Pending jobs whose time has not come."""
    oldest_due: timedelta | None = field(default=None)
    """How long the oldest due job has been waiting since its `run_at`; None when nothing is due."""
