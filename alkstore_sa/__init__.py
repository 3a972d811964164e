"""Durable background work for SQLAlchemy on PostgreSQL: queues and an outbox in the application's own database.

outbox = store.outbox("orders")
session.add(order)
outbox.enqueue_tx(session, {"order": order.number})  # commits with the order, or never existed
"""

from __future__ import annotations

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
from alkstore_sa.models import DeadJob, Job, Models, models_for
from alkstore_sa.outbox import Outbox, SyncOutbox
from alkstore_sa.queue import Queue, SyncQueue
from alkstore_sa.store import Store, SyncStore

__all__ = [
    "AlkstoreError",
    "BindError",
    "ClaimedJob",
    "Codec",
    "DeadJob",
    "EnqueueOptions",
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
    "SyncJobHandle",
    "SyncOutbox",
    "SyncQueue",
    "SyncStore",
    "ThreadJobHandle",
    "UnsupportedDialect",
    "models_for",
]
