"""What type checkers must know about consuming a queue. Never run: mypy and pyright read it."""

# ruff: noqa: TC002  (what is checked is read, not run)

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from typing_extensions import assert_type

from alkstore_sa import JobHandle, Outbox, StopToken, Store, SyncOutbox, SyncStore


@dataclass
class Email:
    to: str


async def a_consumer_carries_the_type_of_the_payloads(store: Store) -> None:
    assert_type(store.queue("plain").consume("w"), AsyncGenerator[JobHandle[Any], None])
    emails = store.queue("emails", payload_type=Email).consume("w")
    assert_type(emails, AsyncGenerator[JobHandle[Email], None])
    async for job in emails:
        assert_type(job, JobHandle[Email])
        assert_type(job.payload.to, str)


async def a_consumer_can_be_closed(store: Store, session: AsyncSession) -> None:
    async with aclosing(store.queue("words", payload_type=str).consume("w", batch=5)) as jobs:
        async for job in jobs:
            assert_type(job.payload, str)
            await job.ack_tx(session)
            break
    await jobs.aclose()


def the_right_options_are_accepted(store: Store, engine: AsyncEngine) -> None:
    store.queue("q").consume("w", batch=10, poll=5)
    store.queue("q").consume(worker_id="w", poll=0.5)
    store.queue("q").consume("w", poll=timedelta(minutes=1))
    Store(engine, wakes="poll")
    Store(engine, wakes="listen", listen_engine=engine, listen_timeout=timedelta(seconds=3))


async def a_wrong_use_is_an_error(store: Store, engine: AsyncEngine) -> None:
    queue = store.queue("q")
    queue.consume()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    queue.consume("w", 5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    queue.consume("w", pol=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    queue.consume("w", poll="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.consume("w", batch=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.consume(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await queue.consume("w")  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    for _ in queue.consume("w"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    Store(engine, wakes="pool")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def the_loops_are_asyncio_s_alone(store: SyncStore, outbox: Outbox, sync_outbox: SyncOutbox) -> None:
    store.queue("q").consume("w")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    await outbox.run("w", print, StopToken(), poll=timedelta(seconds=1))
    sync_outbox.run("w", print, StopToken())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
