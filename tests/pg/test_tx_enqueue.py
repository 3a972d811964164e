from __future__ import annotations

import inspect as python_inspect
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from support.rows import job_row
from support.sessions import DOORS, JOIN_MODES, NOTHING, Door, Order, done, open_door, stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


def order_with_job(door: Door, session: Any, reference: str = "A", **options: Any) -> Any:
    """Add an order and the job for it, and return the job."""
    session.add(Order(reference=reference))
    return door.store.queue("orders").enqueue_tx(session, {"order": reference}, **options)


# -- all or nothing ----------------------------------------------------------------------------------------------------


async def test_a_commit_makes_the_job_and_the_business_row_visible_together(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session)
    await done(session.flush())
    assert stored(sql) == NOTHING
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_rollback_leaves_neither(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session)
    await done(session.flush())
    await done(session.rollback())
    await done(session.commit())
    assert stored(sql) == NOTHING


async def test_a_rollback_before_the_flush_leaves_neither(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session)
    await done(session.rollback())
    await done(session.commit())
    assert stored(sql) == NOTHING


async def test_a_rolled_back_savepoint_takes_its_own_job_along_and_no_other(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session, "outside")
    savepoint = await done(session.begin_nested())
    order_with_job(door, session, "inside")
    await done(session.flush())
    await done(savepoint.rollback())
    await done(session.commit())
    assert stored(sql) == (["outside"], ["outside"])


async def test_a_released_savepoint_is_committed_with_the_transaction(door: Door, sql: Sql) -> None:
    session = door.session()
    savepoint = await done(session.begin_nested())
    order_with_job(door, session)
    await done(savepoint.commit())
    assert stored(sql) == NOTHING
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_closing_the_session_without_a_commit_leaves_neither(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session)
    await done(session.flush())
    await done(session.close())
    assert stored(sql) == NOTHING


async def test_a_commit_that_the_server_refuses_leaves_neither(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session)
    order_with_job(door, session)
    await done(session.flush())
    with pytest.raises(IntegrityError):
        await done(session.commit())
    await done(session.rollback())
    assert stored(sql) == NOTHING


async def test_a_session_goes_on_after_a_rolled_back_job(door: Door, sql: Sql) -> None:
    session = door.session()
    order_with_job(door, session, "lost")
    await done(session.flush())
    await done(session.rollback())
    order_with_job(door, session, "kept")
    await done(session.commit())
    assert stored(sql) == (["kept"], ["kept"])


async def test_the_jobs_of_enqueue_many_tx_commit_together_in_order(door: Door, sql: Sql) -> None:
    session = door.session()
    jobs = door.store.queue("orders").enqueue_many_tx(session, [{"order": "A"}, {"order": "B"}, {"order": "C"}])
    await done(session.flush())
    assert stored(sql) == NOTHING
    await done(session.commit())
    assert stored(sql) == ([], ["A", "B", "C"])
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)


async def test_an_outbox_message_commits_with_the_business_row(door: Door, sql: Sql) -> None:
    session = door.session()
    session.add(Order(reference="A"))
    door.store.outbox("mails").enqueue_tx(session, {"order": "A"})
    await done(session.flush())
    assert stored(sql) == NOTHING
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


# -- no I/O ------------------------------------------------------------------------------------------------------------


async def test_enqueue_tx_sends_nothing_and_opens_no_connection(door: Door) -> None:
    sent = door.statements()
    order_with_job(door, door.session())
    assert sent == []
    assert door.sync_engine().pool.checkedout() == 0


async def test_enqueue_tx_returns_the_pending_job_and_nothing_to_await(door: Door) -> None:
    session = door.session()
    job = order_with_job(door, session)
    assert not python_inspect.isawaitable(job)
    assert isinstance(job, door.store.models.Job)
    assert inspect(job).pending
    assert job in session


async def test_the_id_is_there_after_the_flush(door: Door, sql: Sql) -> None:
    session = door.session()
    job = order_with_job(door, session)
    assert job.id is None
    await done(session.flush())
    flushed: Any = job.id
    await done(session.commit())
    assert job_row(sql, flushed) is not None


# -- sessions of many kinds --------------------------------------------------------------------------------------------


async def test_a_session_without_autoflush_carries_the_job(door: Door, sql: Sql) -> None:
    session = door.session(autoflush=False)
    order_with_job(door, session)
    assert (await done(session.scalars(select(Order)))).all() == []
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_scoped_session_carries_the_job(door: Door, sql: Sql) -> None:
    registry = door.scoped_session()
    order_with_job(door, registry)
    assert stored(sql) == NOTHING
    await done(registry.commit())
    assert stored(sql) == (["A"], ["A"])
    await done(registry.remove())


async def test_a_scoped_session_that_is_removed_takes_the_job_along(door: Door, sql: Sql) -> None:
    registry = door.scoped_session()
    order_with_job(door, registry)
    await done(registry.flush())
    await done(registry.remove())
    await done(registry.commit())
    await done(registry.remove())
    assert stored(sql) == NOTHING


async def test_a_listener_of_this_session_may_enqueue_before_a_flush(door: Door, sql: Sql) -> None:
    session = door.session()

    @event.listens_for(door.sync_session(session), "before_flush")
    def enqueue(flushing: Session, _context: Any, _instances: Any) -> None:
        for order in [row for row in flushing.new if isinstance(row, Order)]:
            door.store.queue("orders").enqueue_tx(flushing, {"order": order.reference})

    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_listener_of_a_session_class_may_enqueue_before_a_flush(door: Door, sql: Sql) -> None:
    class EventSession(Session):
        pass

    @event.listens_for(EventSession, "before_flush")
    def enqueue(flushing: Session, _context: Any, _instances: Any) -> None:
        for order in [row for row in flushing.new if isinstance(row, Order)]:
            door.store.queue("orders").enqueue_tx(flushing, {"order": order.reference})

    session = door.session(cls=EventSession)
    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_listener_may_enqueue_and_flush_before_the_commit(door: Door, sql: Sql) -> None:
    session = door.session()

    @event.listens_for(door.sync_session(session), "before_commit")
    def enqueue(committing: Session) -> None:
        door.store.queue("orders").enqueue_tx(committing, {"order": "A"})
        committing.flush()

    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


@pytest.mark.parametrize("moment", ["after_flush", "before_commit"])
async def test_a_listener_may_enqueue_at_other_moments(door: Door, sql: Sql, moment: str) -> None:
    session = door.session()
    pending = ["A"]

    @event.listens_for(door.sync_session(session), moment)
    def enqueue(flushing: Session, *_context: Any) -> None:
        while pending:
            door.store.queue("orders").enqueue_tx(flushing, {"order": pending.pop()})

    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_two_phase_session_commits_the_job(door: Door, sql: Sql) -> None:
    session = door.session(twophase=True)
    order_with_job(door, session)
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_two_phase_session_rolls_the_job_back(door: Door, sql: Sql) -> None:
    session = door.session(twophase=True)
    order_with_job(door, session)
    await done(session.flush())
    await done(session.rollback())
    assert stored(sql) == NOTHING


# -- joined to a connection's transaction ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_the_outer_commit_brings_the_job_of_a_joined_session(door: Door, sql: Sql, mode: str) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode=mode)
    order_with_job(door, session)
    await done(session.commit())
    if mode != "control_fully":  # which makes the session's commit the outer one
        assert stored(sql) == NOTHING
        await done(outer.commit())
    assert stored(sql) == (["A"], ["A"])


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_the_outer_rollback_takes_the_job_of_a_joined_session_along(door: Door, sql: Sql, mode: str) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode=mode)
    order_with_job(door, session)
    await done(session.flush() if mode == "control_fully" else session.commit())
    await done(outer.rollback())
    assert stored(sql) == NOTHING


async def test_a_session_joined_inside_a_savepoint_of_the_connection_falls_with_it(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    savepoint = await done(connection.begin_nested())
    session = door.session(connection)
    order_with_job(door, session)
    await done(session.commit())
    await done(savepoint.rollback())
    await done(outer.commit())
    assert stored(sql) == NOTHING


async def test_what_was_never_flushed_is_not_in_the_outer_commit(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection)
    order_with_job(door, session)
    await done(outer.commit())
    await done(session.close())
    assert stored(sql) == NOTHING


# -- the id after the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expire_on_commit", [True, False])
async def test_the_id_is_readable_after_the_commit_without_io(door: Door, sql: Sql, expire_on_commit: bool) -> None:
    session = door.session(expire_on_commit=expire_on_commit)
    job = order_with_job(door, session)
    await done(session.commit())
    sent = door.statements()
    found = job_row(sql, job.id)
    assert sent == []
    assert found is not None
    assert found["payload"] == {"order": "A"}


async def test_the_id_is_readable_after_the_session_was_closed(door: Door, sql: Sql) -> None:
    session = door.session()
    job = order_with_job(door, session)
    await done(session.commit())
    await done(session.close())
    sent = door.statements()
    assert job_row(sql, job.id) is not None
    assert sent == []


async def test_the_id_is_readable_after_a_worker_has_deleted_the_row(door: Door) -> None:
    session = door.session()
    job = order_with_job(door, session)
    await done(session.commit())
    (claimed,) = await done(door.store.queue("orders").claim("w"))
    await done(claimed.ack())
    sent = door.statements()
    assert job.id == claimed.id
    assert sent == []


async def test_the_ids_of_enqueue_many_tx_are_readable_after_the_commit(door: Door) -> None:
    session = door.session()
    jobs = door.store.queue("orders").enqueue_many_tx(session, [{"order": "A"}, {"order": "B"}])
    await done(session.commit())
    sent = door.statements()
    ids = [job.id for job in jobs]
    assert sent == []
    assert [job.id for job in await done(door.store.queue("orders").claim("w", 2))] == ids


async def test_the_id_of_a_released_savepoint_is_readable_after_the_commit(door: Door, sql: Sql) -> None:
    session = door.session()
    savepoint = await done(session.begin_nested())
    job = order_with_job(door, session)
    await done(savepoint.commit())
    await done(session.commit())
    sent = door.statements()
    assert job_row(sql, job.id) is not None
    assert sent == []


async def test_reading_the_id_after_a_rollback_needs_no_io(door: Door, sql: Sql) -> None:
    session = door.session()
    job = order_with_job(door, session)
    await done(session.flush())
    flushed = job.id
    await done(session.rollback())
    sent = door.statements()
    assert job.id in {None, flushed}
    assert sent == []
    assert job_row(sql, flushed) is None


async def test_the_id_of_a_committed_job_stays_readable_when_a_later_transaction_is_rolled_back(door: Door) -> None:
    session = door.session()
    job = order_with_job(door, session)
    await done(session.commit())
    session.add(Order(reference="B"))
    await done(session.flush())
    await done(session.rollback())
    sent = door.statements()
    assert job.id > 0
    assert sent == []
