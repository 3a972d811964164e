"""Durable background work for SQLAlchemy on PostgreSQL: queues, outbox and streams in the application's database.

outbox = store.outbox("orders")
session.add(order)
outbox.enqueue_tx(session, {"order": order.number})  # commits with the order, or never existed
"""

from __future__ import annotations

from alkstore_sa._channels import RECONNECTED
from alkstore_sa._stop import StopToken
from alkstore_sa._types import EnqueueOptions, JobSnapshot, JobState, OutboxOptions, QueueStats
from alkstore_sa.codec import Codec, JsonCodec
from alkstore_sa.errors import (
    AlkstoreError,
    BindError,
    InvalidName,
    InvalidSpec,
    Lagged,
    LeadershipLost,
    LeaseLost,
    LockHeld,
    LockLost,
    PayloadError,
    PayloadTooLarge,
    ReservedName,
    SchemaMismatch,
    SchemaMissing,
    UnsupportedDialect,
)
from alkstore_sa.job import ClaimedJob, JobHandle, SyncJobHandle, ThreadJobHandle
from alkstore_sa.listen import Notification, Notifications
from alkstore_sa.models import DeadJob, Job, Models, StreamEvent, StreamOffset, models_for
from alkstore_sa.outbox import Outbox, SyncOutbox
from alkstore_sa.queue import Queue, SyncQueue
from alkstore_sa.store import Store, SyncStore
from alkstore_sa.stream import ConsumedEvent, Event, Stream, SyncStream

__all__ = [
    "RECONNECTED",
    "AlkstoreError",
    "BindError",
    "ClaimedJob",
    "Codec",
    "ConsumedEvent",
    "DeadJob",
    "EnqueueOptions",
    "Event",
    "InvalidName",
    "InvalidSpec",
    "Job",
    "JobHandle",
    "JobSnapshot",
    "JobState",
    "JsonCodec",
    "Lagged",
    "LeadershipLost",
    "LeaseLost",
    "LockHeld",
    "LockLost",
    "Models",
    "Notification",
    "Notifications",
    "Outbox",
    "OutboxOptions",
    "PayloadError",
    "PayloadTooLarge",
    "Queue",
    "QueueStats",
    "ReservedName",
    "SchemaMismatch",
    "SchemaMissing",
    "StopToken",
    "Store",
    "Stream",
    "StreamEvent",
    "StreamOffset",
    "SyncJobHandle",
    "SyncOutbox",
    "SyncQueue",
    "SyncStore",
    "SyncStream",
    "ThreadJobHandle",
    "UnsupportedDialect",
    "models_for",
]
