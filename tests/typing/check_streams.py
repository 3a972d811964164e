"""What type checkers must know about streams, events and subscriptions. Never run: mypy and pyright read it."""

# ruff: noqa: TC002  (what is checked is read, not run)

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

from alkstore_sa import (
    ConsumedEvent,
    Event,
    JsonCodec,
    Store,
    Stream,
    StreamEvent,
    StreamOffset,
    SyncStore,
    SyncStream,
)
from alkstore_sa.models import StreamEventTable, StreamOffsetTable


@dataclass
class Placed:
    order: int


async def a_stream_carries_the_type_of_its_payloads(store: Store) -> None:
    assert_type(store.stream("plain"), Stream[Any])
    assert_type(store.stream("plain", codec=JsonCodec()), Stream[Any])
    orders = store.stream("orders", payload_type=Placed)
    assert_type(orders, Stream[Placed])
    events = await orders.read(after=5, limit=10)
    assert_type(events, list[Event[Placed]])
    assert_type(events[0].payload, Placed)
    assert_type(events[0].payload.order, int)
    assert_type(await store.stream("words", payload_type=str).read(), list[Event[str]])


def a_sync_stream_does_too(store: SyncStore) -> None:
    assert_type(store.stream("plain"), SyncStream[Any])
    orders = store.stream("orders", payload_type=Placed)
    assert_type(orders, SyncStream[Placed])
    assert_type(orders.read(), list[Event[Placed]])
    assert_type(orders.read(1, 2)[0].payload, Placed)


async def a_subscription_hands_out_events_of_that_type(store: Store) -> None:
    orders = store.stream("orders", payload_type=Placed)
    assert_type(orders.subscribe("c"), AsyncGenerator[ConsumedEvent[Placed]])
    async with aclosing(orders.subscribe("c", page=10, poll=0.5, lease=timedelta(seconds=5))) as events:
        async for event in events:
            assert_type(event, ConsumedEvent[Placed])
            assert_type(event.payload, Placed)


def values_have_their_types(event: Event[Placed]) -> None:
    assert_type(event.id, int)
    assert_type(event.stream, str)
    assert_type(event.offset, int)
    assert_type(event.key, str | None)
    assert_type(event.created_at, datetime)


async def operations_answer_with_values(store: Store, sync_store: SyncStore) -> None:
    stream, sync_stream = store.stream("s"), sync_store.stream("s")
    assert_type(await stream.publish({"a": 1}, key="k"), int)
    assert_type(await stream.publish_many(range(3)), list[int])
    assert_type(await stream.head(), int)
    assert_type(await stream.get_offset("c"), int)
    assert_type(await stream.save_offset("c", 1), bool)
    assert_type(await stream.forget("c"), bool)
    assert_type(await stream.trim(older_than=timedelta(days=1), keep=10), int)
    assert_type(sync_stream.publish({"a": 1}, key=None), int)
    assert_type(sync_stream.publish_many([1], key="k"), list[int])
    assert_type(sync_stream.head(), int)
    assert_type(sync_stream.get_offset("c"), int)
    assert_type(sync_stream.save_offset("c", 1), bool)
    assert_type(sync_stream.forget("c"), bool)
    assert_type(sync_stream.trim(keep=10), int)


def publish_tx_is_the_same_call_for_every_kind_of_session(
    store: Store,
    sync_store: SyncStore,
    session: Session,
    scoped: scoped_session[Session],
    async_session: AsyncSession,
    async_scoped: async_scoped_session[AsyncSession],
) -> None:
    stream, sync_stream = store.stream("s"), sync_store.stream("s")
    assert_type(stream.publish_tx(session, 1, key="k"), StreamEventTable)
    assert_type(stream.publish_tx(scoped, 1), StreamEventTable)
    assert_type(stream.publish_tx(async_session, 1), StreamEventTable)
    assert_type(stream.publish_tx(async_scoped, 1), StreamEventTable)
    assert_type(stream.publish_many_tx(async_session, [1]), list[StreamEventTable])
    assert_type(sync_stream.publish_tx(async_session, 1), StreamEventTable)
    assert_type(sync_stream.publish_many_tx(session, [1]), list[StreamEventTable])
    assert_type(stream.publish_tx(session, 1).id, int)
    assert_type(stream.publish_tx(session, 1).offset, int | None)


async def save_offset_tx_is_awaited_for_async_sessions_only(
    store: Store,
    sync_store: SyncStore,
    event: ConsumedEvent[Any],
    session: Session,
    scoped: scoped_session[Session],
    async_session: AsyncSession,
    async_scoped: async_scoped_session[AsyncSession],
) -> None:
    stream, sync_stream = store.stream("s"), sync_store.stream("s")
    assert_type(stream.save_offset_tx(async_session, "c", 1), Awaitable[bool])
    assert_type(stream.save_offset_tx(async_scoped, "c", 1), Awaitable[bool])
    assert_type(stream.save_offset_tx(session, "c", 1), bool)
    assert_type(sync_stream.save_offset_tx(scoped, "c", 1), bool)
    assert_type(sync_stream.save_offset_tx(async_session, "c", 1), Awaitable[bool])
    assert_type(event.save_offset_tx(async_session), Awaitable[None])
    assert_type(event.save_offset_tx(async_scoped), Awaitable[None])
    event.save_offset_tx(session)
    event.save_offset_tx(scoped)
    await event.save_offset_tx(session)  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


async def what_a_stream_does_not_take_is_an_error(store: Store, sync_store: SyncStore, session: Session) -> None:
    stream, sync_stream = store.stream("s"), sync_store.stream("s")
    await stream.publish(1, "k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await stream.publish(1, key=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await stream.read(after="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await stream.trim(10)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    stream.publish_tx(session, 1, priority=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    stream.subscribe("c", 10)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    stream.subscribe("c", poll="1s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sync_stream.subscribe("c")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    for event in sync_stream.read():
        event.save_offset_tx(session)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def models_are_ordinary_mapped_classes(store: Store, session: Session) -> None:
    assert_type(store.models.StreamEvent, type[StreamEventTable])
    assert_type(store.models.StreamOffset, type[StreamOffsetTable])
    for event in session.scalars(select(StreamEvent).where(StreamEvent.stream == "orders")):
        assert_type(event.offset, int | None)
        assert_type(event.key, str | None)
    for consumer in session.scalars(select(StreamOffset)):
        assert_type(consumer.offset, int)
        assert_type(consumer.consumer, str)
