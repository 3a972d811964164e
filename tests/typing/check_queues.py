"""What type checkers must know about queues, jobs and sessions. Never run: mypy and pyright read it."""

# ruff: noqa: TC002  (what is checked is read, not run)

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

from alkstore_sa import JobHandle, JobSnapshot, Queue, QueueStats, Store, SyncJobHandle, SyncQueue, SyncStore
from alkstore_sa.models import JobTable


@dataclass
class Email:
    to: str


async def a_queue_carries_the_type_of_its_payloads(store: Store) -> None:
    assert_type(store.queue("plain"), Queue[Any])
    emails = store.queue("emails", payload_type=Email)
    assert_type(emails, Queue[Email])
    jobs = await emails.claim("w", 5)
    assert_type(jobs, list[JobHandle[Email]])
    assert_type(jobs[0].payload, Email)
    assert_type(jobs[0].payload.to, str)
    assert_type(await store.queue("words", payload_type=str).claim("w"), list[JobHandle[str]])


def a_sync_queue_does_too(store: SyncStore) -> None:
    assert_type(store.queue("plain"), SyncQueue[Any])
    emails = store.queue("emails", payload_type=Email)
    assert_type(emails, SyncQueue[Email])
    jobs = emails.claim("w")
    assert_type(jobs, list[SyncJobHandle[Email]])
    assert_type(jobs[0].payload, Email)


async def enqueue_answers_with_ids(store: Store, sync_store: SyncStore) -> None:
    assert_type(await store.queue("q").enqueue({"a": 1}), int)
    assert_type(await store.queue("q").enqueue_many(range(3)), list[int])
    assert_type(sync_store.queue("q").enqueue({"a": 1}), int)
    assert_type(sync_store.queue("q").enqueue_many([1, 2]), list[int])


def enqueue_tx_is_the_same_call_for_every_kind_of_session(
    store: Store,
    sync_store: SyncStore,
    session: Session,
    scoped: scoped_session[Session],
    async_session: AsyncSession,
    async_scoped: async_scoped_session[AsyncSession],
) -> None:
    queue, sync_queue = store.queue("q"), sync_store.queue("q")
    assert_type(queue.enqueue_tx(session, 1), JobTable)
    assert_type(queue.enqueue_tx(scoped, 1), JobTable)
    assert_type(queue.enqueue_tx(async_session, 1), JobTable)
    assert_type(queue.enqueue_tx(async_scoped, 1), JobTable)
    assert_type(queue.enqueue_many_tx(async_session, [1]), list[JobTable])
    assert_type(sync_queue.enqueue_tx(async_session, 1), JobTable)
    assert_type(queue.enqueue_tx(session, 1).id, int)


async def ack_tx_is_awaited_for_async_sessions_only(
    job: JobHandle[Any],
    sync_job: SyncJobHandle[Any],
    session: Session,
    scoped: scoped_session[Session],
    async_session: AsyncSession,
    async_scoped: async_scoped_session[AsyncSession],
) -> None:
    assert_type(job.ack_tx(async_session), Awaitable[None])
    assert_type(job.ack_tx(async_scoped), Awaitable[None])
    assert_type(sync_job.ack_tx(async_session), Awaitable[None])
    job.ack_tx(session)
    sync_job.ack_tx(scoped)
    await job.ack_tx(session)  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


async def get_job_is_awaited_for_async_sessions_only(
    store: Store, sync_store: SyncStore, session: Session, async_session: AsyncSession
) -> None:
    queue, sync_queue = store.queue("q"), sync_store.queue("q")
    assert_type(queue.get_job(1), Awaitable[JobSnapshot | None])
    assert_type(queue.get_job(1, session=async_session), Awaitable[JobSnapshot | None])
    assert_type(queue.get_job(1, session=session), JobSnapshot | None)
    assert_type(sync_queue.get_job(1), JobSnapshot | None)
    assert_type(sync_queue.get_job(1, session=session), JobSnapshot | None)
    assert_type(sync_queue.get_job(1, session=async_session), Awaitable[JobSnapshot | None])
    assert_type(await queue.stats(), QueueStats)
    assert_type(await queue.next_due(), timedelta | None)
    assert_type(await store.stats(), dict[str, QueueStats])


async def the_right_options_are_accepted(store: Store, session: Session) -> None:
    now = datetime.now(timezone.utc)
    queue = store.queue("q", visibility_timeout=0.5, max_attempts=2, backoff_base=timedelta(seconds=1))
    await queue.enqueue(1, priority=1, delay=0.5, expires=timedelta(days=1), max_attempts=2, headers={"a": 1})
    await queue.enqueue(1, run_at=now, expires=now, visibility_timeout=30, backoff_base=1)
    queue.enqueue_tx(session, 1, priority=1, headers=None)


async def a_wrong_option_is_an_error(store: Store, sync_store: SyncStore, session: Session) -> None:
    queue, sync_queue = store.queue("q"), sync_store.queue("q")
    await queue.enqueue(1, dealy=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await queue.enqueue_many([1], prio=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    queue.enqueue_tx(session, 1, queue="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    sync_queue.enqueue(1, dealy=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await queue.enqueue(1, priority="high")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await queue.enqueue(1, run_at="now")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    store.queue("q", max_attempt=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    store.queue("q", 30)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
