from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Delete, Update, event, insert, text
from sqlalchemy.orm import Session
from support.sessions import DOORS, NOTHING, Base, Customer, Door, Order, done, open_door, order_count, stored

from alkstore_sa import BindError
from alkstore_sa.models import Base as EngineBase, Job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sqlalchemy import Engine
    from support.databases import Database
    from support.rows import Sql


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


def enqueue(door: Door, session: Any, reference: str = "A") -> Any:
    return door.store.queue("orders").enqueue_tx(session, {"order": reference})


async def end(session: Any) -> None:
    """Do what a caller does whose commit has failed and who does not care: go on, then close."""
    await done(session.rollback())
    await done(session.commit())
    await done(session.close())


# -- binds -------------------------------------------------------------------------------------------------------------


async def test_a_session_that_binds_the_engines_base_carries_the_job(door: Door, sql: Sql) -> None:
    session = door.session(None, binds={Base: door.engine, EngineBase: door.engine})
    session.add(Order(reference="A"))
    enqueue(door, session)
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_session_that_knows_only_its_own_models_gets_the_engines_bound_to_its_one_engine(
    door: Door, sql: Sql
) -> None:
    session = door.session(None, binds={Order: door.engine})
    session.add(Order(reference="A"))
    enqueue(door, session)
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_two_binds_to_one_engine_are_one_candidate(door: Door, sql: Sql) -> None:
    session = door.session(None, binds={Order: door.engine, Customer: door.engine})
    enqueue(door, session)
    await done(session.commit())
    assert stored(sql) == ([], ["A"])


async def test_a_session_with_binds_reads_the_job_it_has_enqueued(door: Door) -> None:
    session = door.session(None, binds={Order: door.engine})
    job = enqueue(door, session)
    await done(session.flush())
    found = await done(door.store.queue("orders").get_job(job.id, session=session))
    assert found.payload == {"order": "A"}


async def test_ack_tx_works_in_a_session_that_knows_only_its_own_models(door: Door, sql: Sql) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": "A"}))
    (job,) = await done(queue.claim("w"))
    session = door.session(None, binds={Order: door.engine})
    await done(job.ack_tx(session))
    await done(session.commit())
    assert stored(sql) == NOTHING


async def test_two_candidates_are_refused_with_a_message_that_says_how(door: Door) -> None:
    session = door.session(None, binds={Order: door.engine, Customer: door.new_engine()})
    with pytest.raises(BindError, match=r"store\.models\.Base: engine"):
        enqueue(door, session)


async def test_the_remedy_for_two_candidates_works(door: Door, sql: Sql) -> None:
    binds = {Order: door.engine, Customer: door.new_engine(), EngineBase: door.engine}
    session = door.session(None, binds=binds)
    session.add(Order(reference="A"))
    enqueue(door, session)
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])


async def test_a_session_without_any_bind_is_refused(door: Door) -> None:
    session = door.session(None)
    with pytest.raises(BindError):
        enqueue(door, session)


# -- replica routing ---------------------------------------------------------------------------------------------------


def routing(door: Door) -> tuple[Any, list[str]]:
    """Return a session by SQLAlchemy's recipe, and what its replica is sent."""
    primary, replica = door.sync_engine(), door.new_engine(execution_options={"postgresql_readonly": True})
    sent = door.statements(replica)

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:
            if self._flushing or isinstance(clause, (Update, Delete)):
                return primary  # type: ignore[no-any-return]
            return door.sync_engine(replica)  # type: ignore[no-any-return]

    return door.session(None, cls=RoutingSession), sent


async def test_with_replica_routing_the_job_goes_to_the_primary(door: Door, sql: Sql) -> None:
    session, replica = routing(door)
    assert await order_count(session) == 0
    session.add(Order(reference="A"))
    enqueue(door, session)
    assert await order_count(session) == 0
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])
    assert len([statement for statement in replica if "orders" in statement]) == 2


async def test_with_replica_routing_the_transaction_reads_its_own_job_on_the_primary(door: Door) -> None:
    session, _ = routing(door)
    job = enqueue(door, session)
    await done(session.flush())
    assert await done(door.store.queue("orders").get_job(job.id, session=session)) is not None


async def test_with_replica_routing_ack_tx_goes_to_the_primary(door: Door, sql: Sql) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": "A"}))
    (job,) = await done(queue.claim("w"))
    session, replica = routing(door)
    assert await order_count(session) == 0
    await done(job.ack_tx(session))
    await done(session.commit())
    assert stored(sql) == NOTHING
    assert not [statement for statement in replica if "DELETE" in statement]


# -- AUTOCOMMIT --------------------------------------------------------------------------------------------------------


def on_an_engine_option(door: Door) -> Any:
    return door.session(door.engine.execution_options(isolation_level="AUTOCOMMIT"))


def on_the_engine_itself(door: Door) -> Any:
    return door.session(door.new_engine(isolation_level="AUTOCOMMIT"))


@pytest.mark.parametrize("make", [on_an_engine_option, on_the_engine_itself])
async def test_a_session_in_autocommit_is_refused_before_anything_is_stored(
    door: Door, sql: Sql, make: Callable[[Door], Any]
) -> None:
    session = make(door)
    session.add(Order(reference="A"))
    with pytest.raises(BindError, match="AUTOCOMMIT"):  # noqa: PT012  (at the call or at the flush)
        enqueue(door, session)
        await done(session.flush())
    await end(session)
    assert stored(sql) == NOTHING


async def test_a_session_whose_connection_is_in_autocommit_is_refused_at_the_flush(door: Door, sql: Sql) -> None:
    session = door.session()
    await done(session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}))
    session.add(Order(reference="A"))
    enqueue(door, session)
    with pytest.raises(BindError, match="AUTOCOMMIT"):
        await done(session.flush())
    await end(session)
    assert stored(sql) == NOTHING


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_autocommit_is_refused_before_rows_that_a_flush_writes_ahead_of_the_job(
    door: Door, sql: Sql, elsewhere: bool
) -> None:
    if elsewhere:
        binds = {Customer: door.engine.execution_options(isolation_level="AUTOCOMMIT"), Job: door.engine}
        session = door.session(None, binds=binds)
    else:
        session = door.session()
        await done(session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}))
    session.add(Customer())
    with pytest.raises(BindError):  # noqa: PT012  (at the call or at the flush)
        enqueue(door, session)
        await done(session.flush())
    await end(session)
    assert sql.execute("SELECT count(*) FROM customers").fetchone() == (0,)
    assert stored(sql) == NOTHING


async def test_ack_tx_in_autocommit_is_refused_and_deletes_nothing(door: Door, sql: Sql) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": "A"}))
    (job,) = await done(queue.claim("w"))
    session = on_the_engine_itself(door)
    with pytest.raises(BindError, match="AUTOCOMMIT"):
        await done(job.ack_tx(session))
    assert stored(sql) == ([], ["A"])


async def test_a_job_enqueued_by_a_listener_of_the_class_is_refused_in_autocommit(door: Door, sql: Sql) -> None:
    session = door.session(door.new_engine(isolation_level="AUTOCOMMIT"), cls=enqueueing(door))
    session.add(Order(reference="A"))
    with pytest.raises(BindError, match="AUTOCOMMIT"):
        await done(session.flush())
    await end(session)
    assert stored(sql) == NOTHING


def enqueueing(door: Door) -> type[Session]:
    """Return a class of sessions that enqueue a job for each new order by themselves."""

    class EnqueueingSession(Session):
        pass

    @event.listens_for(EnqueueingSession, "before_flush")
    def enqueue_for_each(session: Session, _context: Any, _instances: Any) -> None:
        for order in [row for row in session.new if isinstance(row, Order)]:
            enqueue(door, session, order.reference)

    return EnqueueingSession


# -- writes over two connections ---------------------------------------------------------------------------------------


def split(door: Door, other: Any = None, **options: Any) -> Any:
    """Return a session that writes orders through another engine than jobs."""
    other = door.new_engine() if other is None else other
    return door.session(None, binds={Order: other, Job: door.engine}, **options)


async def test_an_order_in_the_jobs_flush_but_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    session = split(door)
    session.add(Order(reference="A"))
    enqueue(door, session)
    with pytest.raises(BindError, match="two connections"):
        await done(session.flush())
    await end(session)
    assert stored(sql) == NOTHING


async def test_an_order_flushed_before_the_job_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    session = split(door)
    session.add(Order(reference="A"))
    await done(session.flush())
    enqueue(door, session)
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_an_order_flushed_after_the_job_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    session = split(door)
    enqueue(door, session)
    await done(session.flush())
    session.add(Order(reference="A"))
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


@pytest.mark.parametrize("first", ["order", "job"])
async def test_a_core_insert_on_another_connection_is_refused(door: Door, sql: Sql, first: str) -> None:
    session = split(door)
    if first == "job":
        enqueue(door, session)
        await done(session.flush())
    await done(session.execute(insert(Order).values(reference="A")))
    if first == "order":
        enqueue(door, session)
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_textual_sql_that_writes_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    session = split(door)
    enqueue(door, session)
    statement = text("INSERT INTO orders (reference) VALUES ('A')")
    await done(session.execute(statement, bind_arguments={"mapper": Order}))
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_a_write_inside_a_savepoint_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    session = split(door)
    enqueue(door, session)
    savepoint = await done(session.begin_nested())
    await done(session.execute(insert(Order).values(reference="A")))
    await done(savepoint.commit())
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_an_ack_beside_a_write_on_another_connection_is_refused(door: Door, sql: Sql) -> None:
    queue = door.store.queue("orders")
    await done(queue.enqueue({"order": "A"}))
    (job,) = await done(queue.claim("w"))
    session = split(door)
    session.add(Order(reference="A"))
    with pytest.raises(BindError, match="two connections"):  # noqa: PT012  (at the ack or at the commit)
        await done(job.ack_tx(session))
        await done(session.commit())
    await end(session)
    assert stored(sql) == ([], ["A"])


async def test_an_order_on_a_connection_in_autocommit_is_refused(door: Door, sql: Sql) -> None:
    session = split(door, door.engine.execution_options(isolation_level="AUTOCOMMIT"))
    session.add(Order(reference="A"))
    enqueue(door, session)
    with pytest.raises(BindError):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_a_job_enqueued_by_a_listener_of_the_class_is_refused_beside_another_connection(
    door: Door, sql: Sql
) -> None:
    session = split(door, cls=enqueueing(door))
    session.add(Order(reference="A"))
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_a_session_joined_to_two_connections_is_refused(door: Door, sql: Sql) -> None:
    for_orders, for_jobs = await door.connect(door.new_engine()), await door.connect()
    await done(for_orders.begin())
    await done(for_jobs.begin())
    session = door.session(None, binds={Order: for_orders, Job: for_jobs})
    session.add(Order(reference="A"))
    enqueue(door, session)
    with pytest.raises(BindError, match="two connections"):
        await done(session.commit())
    await end(session)
    assert stored(sql) == NOTHING


async def test_a_second_connection_that_only_reads_is_fine(door: Door, sql: Sql) -> None:
    session = split(door)
    assert await order_count(session) == 0
    enqueue(door, session)
    assert await order_count(session) == 0
    await done(session.commit())
    assert stored(sql) == ([], ["A"])


async def test_a_transaction_without_jobs_may_write_where_it_likes(door: Door, sql: Sql) -> None:
    session = split(door)
    enqueue(door, session)
    await done(session.flush())
    await done(session.rollback())
    session.add(Order(reference="A"))
    await done(session.execute(text("CREATE TABLE elsewhere ()"), bind_arguments={"mapper": Job}))
    await done(session.commit())
    assert stored(sql) == (["A"], [])


async def test_a_two_phase_transaction_may_spread(door: Door, sql: Sql) -> None:
    session = split(door, twophase=True)
    session.add(Order(reference="A"))
    enqueue(door, session)
    await done(session.commit())
    assert stored(sql) == (["A"], ["A"])
