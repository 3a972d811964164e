from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.rows import job_row, lapse
from support.sessions import DOORS, JOIN_MODES, NOTHING, Door, Order, done, open_door, stored

from alkstore_sa import LeaseLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


async def claimed(door: Door, reference: str = "job") -> Any:
    """Enqueue a job and claim it."""
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": reference}))
    (job,) = await done(queue.claim("w"))
    return job


async def lost(door: Door, sql: Sql) -> Any:
    """Return the handle of a claim that is over: its lease lapsed, and another has claimed the job since."""
    job = await claimed(door)
    lapse(sql, job.id)
    (successor,) = await done(door.store.queue("orders").claim("another"))
    assert successor.id == job.id
    return job


# -- in the caller's transaction ---------------------------------------------------------------------------------------


async def test_the_jobs_effects_and_its_completion_commit_together(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    session.add(Order(reference="A"))
    await done(job.ack_tx(session))
    await done(session.flush())
    assert stored(sql) == ([], ["job"])
    await done(session.commit())
    assert stored(sql) == (["A"], [])


async def test_a_rollback_brings_the_claim_back(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    before = job_row(sql, job.id)
    session = door.session()
    session.add(Order(reference="A"))
    await done(job.ack_tx(session))
    await done(session.rollback())
    assert stored(sql) == ([], ["job"])
    assert job_row(sql, job.id) == before
    await done(job.ack())
    assert stored(sql) == NOTHING


async def test_a_rolled_back_savepoint_brings_the_claim_back(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    session.add(Order(reference="A"))
    savepoint = await done(session.begin_nested())
    await done(job.ack_tx(session))
    await done(savepoint.rollback())
    await done(session.commit())
    assert stored(sql) == (["A"], ["job"])
    await done(job.ack())


async def test_closing_the_session_without_a_commit_brings_the_claim_back(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    await done(job.ack_tx(session))
    await done(session.close())
    assert stored(sql) == ([], ["job"])
    await done(job.ack())


async def test_a_refused_commit_brings_the_claim_back(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    session.add_all([Order(reference="A"), Order(reference="A")])
    await done(job.ack_tx(session))
    with pytest.raises(DBAPIError):
        await done(session.commit())
    await done(session.rollback())
    assert stored(sql) == ([], ["job"])


async def test_a_scoped_session_acknowledges(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    registry = door.scoped_session()
    await done(job.ack_tx(registry))
    assert stored(sql) == ([], ["job"])
    await done(registry.commit())
    await done(registry.remove())
    assert stored(sql) == NOTHING


async def test_a_two_phase_session_acknowledges(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session(twophase=True)
    session.add(Order(reference="A"))
    await done(job.ack_tx(session))
    await done(session.commit())
    assert stored(sql) == (["A"], [])


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_in_a_joined_session_the_outer_rollback_brings_the_claim_back(door: Door, sql: Sql, mode: str) -> None:
    job = await claimed(door)
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode=mode)
    await done(job.ack_tx(session))
    if mode != "control_fully":
        await done(session.commit())
    await done(outer.rollback())
    assert stored(sql) == ([], ["job"])


async def test_an_ack_and_a_new_job_commit_together(door: Door, sql: Sql) -> None:
    job = await claimed(door, "first")
    session = door.session()
    door.store.queue("orders").enqueue_tx(session, {"order": "second"})
    await done(job.ack_tx(session))
    assert stored(sql) == ([], ["first"])
    await done(session.commit())
    assert stored(sql) == ([], ["second"])


async def test_ack_tx_returns_its_value_to_a_sync_session_and_an_awaitable_to_an_async_one(
    door: Door, sql: Sql
) -> None:
    job = await claimed(door)
    session = door.session()
    result = job.ack_tx(session)
    if door.is_async:
        result = await result
    assert result is None
    await done(session.commit())
    assert stored(sql) == NOTHING


# -- a lost lease dooms the transaction --------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_caller_who_catches_lease_lost_cannot_commit(door: Door, sql: Sql, flushed: bool) -> None:
    job = await lost(door, sql)
    session = door.session()
    session.add(Order(reference="A"))
    if flushed:
        await done(session.flush())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    for _ in range(2):
        with pytest.raises(LeaseLost, match=str(job.id)):
            await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


async def test_the_successors_claim_is_untouched(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    before = job_row(sql, job.id)
    session = door.session()
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(session.rollback())
    assert job_row(sql, job.id) == before


async def test_a_second_ack_in_the_same_transaction_is_a_lost_lease(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


async def test_a_later_transaction_of_the_same_session_works(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(session.rollback())
    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["job"])


async def test_leaving_a_begin_block_after_a_caught_lease_lost_raises_it_again(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    begun = await done(session.begin())
    session.add(Order(reference="A"))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(begun.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


async def test_a_two_phase_session_is_doomed_too(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session(twophase=True)
    session.add(Order(reference="A"))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])
    assert sql.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)


async def test_the_doomed_transaction_answers_a_further_statement_with_an_error(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    session.add(Order(reference="A"))
    with pytest.raises(DBAPIError):
        await done(session.flush())
    await done(session.rollback())
    assert stored(sql) == ([], ["job"])


@pytest.mark.parametrize("mode", JOIN_MODES)
async def test_the_commit_around_a_joined_session_raises_again_and_stores_nothing(
    door: Door, sql: Sql, mode: str
) -> None:
    job = await lost(door, sql)
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode=mode)
    session.add(Order(reference="A"))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(session.commit())
    with pytest.raises(LeaseLost):
        await done(outer.commit())
    await done(session.close())
    await done(connection.rollback())
    assert stored(sql) == ([], ["job"])


async def test_rolling_back_the_savepoint_of_a_joined_session_makes_the_outer_one_committable(
    door: Door, sql: Sql
) -> None:
    job = await lost(door, sql)
    connection = await door.connect()
    outer = await done(connection.begin())
    session = door.session(connection, join_transaction_mode="create_savepoint")
    session.add(Order(reference="before"))
    await done(session.commit())
    session.add(Order(reference="lost"))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(session.rollback())
    await done(outer.commit())
    assert stored(sql) == (["before"], ["job"])


# -- savepoints --------------------------------------------------------------------------------------------------------


async def test_rolling_the_savepoint_back_makes_the_transaction_committable_again(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    session.add(Order(reference="outside"))
    savepoint = await done(session.begin_nested())
    session.add(Order(reference="inside"))
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(savepoint.rollback())
    await done(session.commit())
    assert stored(sql) == (["outside"], ["job"])


async def test_rolling_the_inner_of_two_savepoints_back_leaves_the_outer_one_usable(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    outer = await done(session.begin_nested())
    session.add(Order(reference="outer"))
    inner = await done(session.begin_nested())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(inner.rollback())
    await done(outer.commit())
    await done(session.commit())
    assert stored(sql) == (["outer"], ["job"])


async def test_releasing_the_savepoint_raises_lease_lost_again(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    session.add(Order(reference="outside"))
    savepoint = await done(session.begin_nested())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(savepoint.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


async def test_committing_the_whole_with_the_savepoint_still_open_raises_lease_lost_again(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    session.add(Order(reference="outside"))
    await done(session.begin_nested())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    with pytest.raises(LeaseLost):
        await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


async def test_rolling_the_whole_back_from_inside_a_doomed_savepoint_frees_the_session(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    await done(session.begin_nested())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    await done(session.rollback())
    await done(session.rollback())
    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], ["job"])


async def test_a_lease_lost_outside_is_not_healed_by_a_later_savepoint(door: Door, sql: Sql) -> None:
    job = await lost(door, sql)
    session = door.session()
    session.add(Order(reference="A"))
    await done(session.flush())
    with pytest.raises(LeaseLost):
        await done(job.ack_tx(session))
    savepoint = await done(session.begin_nested())
    with pytest.raises(DBAPIError):
        await done(session.execute(text("SELECT 1")))
    await done(savepoint.rollback())
    with pytest.raises(LeaseLost):
        await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])


# -- in listeners of the session ---------------------------------------------------------------------------------------


async def test_a_listener_may_acknowledge_before_the_commit(door: Door, sql: Sql) -> None:
    job = await claimed(door)
    session = door.session()
    event.listen(door.sync_session(session), "before_commit", job.ack_tx)
    session.add(Order(reference="A"))
    await done(session.commit())
    assert stored(sql) == (["A"], [])


async def test_a_listener_that_swallows_lease_lost_does_not_turn_the_commit_into_a_silent_rollback(
    door: Door, sql: Sql
) -> None:
    job = await lost(door, sql)

    class AckingSession(Session):
        pass

    @event.listens_for(AckingSession, "before_commit")
    def acknowledge(session: Session) -> None:
        with contextlib.suppress(LeaseLost):
            job.ack_tx(session)

    session = door.session(cls=AckingSession)
    with pytest.raises(LeaseLost):
        await done(session.commit())
    await done(session.close())
    assert stored(sql) == ([], ["job"])
