"""What type checkers must know about outboxes, deliveries and stores. Never run: mypy and pyright read it."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import assert_type

from alkstore_sa import (
    Job,
    JobHandle,
    JobSnapshot,
    JobState,
    Lagged,
    Outbox,
    StopToken,
    Store,
    SyncJobHandle,
    SyncOutbox,
    SyncStore,
)
from alkstore_sa.models import JobTable


class Mailer:
    async def __call__(self, job: JobHandle[Any]) -> None: ...


async def deliver(job: JobHandle[Any]) -> None: ...


def deliver_in_a_thread(job: JobHandle[Any]) -> None: ...


def deliver_sync(job: SyncJobHandle[Any]) -> None: ...


async def an_outbox_takes_every_kind_of_delivery(store: Store, stop: StopToken) -> None:
    outbox = store.outbox("o")
    assert_type(outbox, Outbox)
    assert_type(await outbox.run_once("w", deliver), bool)
    await outbox.run_once("w", deliver_in_a_thread)
    await outbox.run_once("w", Mailer())
    await outbox.run_once("w", lambda job: deliver(job))  # noqa: PLW0108  (the lambda is meant)
    await outbox.run("w", deliver, stop, concurrency=3)
    assert_type(await outbox.enqueue(1, max_attempts=2), int)
    assert_type(await outbox.enqueue_many([1]), list[int])


def a_sync_outbox_hands_out_sync_jobs(store: SyncStore, session: Session, async_session: AsyncSession) -> None:
    outbox = store.outbox("o")
    assert_type(outbox, SyncOutbox)
    assert_type(outbox.run_once("w", deliver_sync), bool)
    assert_type(outbox.enqueue(1), int)
    assert_type(outbox.enqueue_tx(session, 1), JobTable)
    assert_type(outbox.enqueue_tx(async_session, 1), JobTable)
    assert_type(outbox.enqueue_many_tx(session, [1]), list[JobTable])


async def what_an_outbox_does_not_take_is_an_error(store: Store, sync_store: SyncStore, session: Session) -> None:
    outbox = store.outbox("o")
    await outbox.enqueue(1, visibility_timeout=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    outbox.enqueue_tx(session, 1, visibility_timeout=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await outbox.run_once("w", deliver_sync)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await outbox.run_once("w", 7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sync_store.outbox("o").run_once("w", deliver_in_a_thread)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_store_takes_its_own_kind_of_engine(engine: Engine, async_engine: AsyncEngine) -> None:
    Store(async_engine, schema="x", max_payload_bytes=10)
    SyncStore(engine)
    Store(engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    SyncStore(async_engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Store(async_engine, "x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def begin_hands_out_the_session_of_its_door(store: Store, sync_store: SyncStore) -> None:
    async with store.begin() as async_session:
        assert_type(async_session, AsyncSession)
    with sync_store.begin() as session:
        assert_type(session, Session)
    async with store as same:
        assert_type(same, Store)


def models_are_ordinary_mapped_classes(store: Store, session: Session) -> None:
    assert_type(store.models.Job, type[JobTable])
    for job in session.scalars(select(Job).where(Job.queue == "emails")):
        assert_type(job.id, int)
        assert_type(job.headers, dict[str, Any])
        assert_type(job.state, Literal["pending", "processing"])


def values_have_their_types(snapshot: JobSnapshot, job: JobHandle[Any], lagged: Lagged) -> None:
    assert_type(snapshot.state, JobState)
    assert_type(job.last_error, str | None)
    assert_type(lagged.missed, int)
    snapshot.state = "dead"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
