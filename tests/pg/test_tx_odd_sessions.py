"""Sessions in unusual hands: connections that are committed around them, and what a caller keeps in `info`."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Delete, Update, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.sessions import Base, Order

from alkstore_sa import BindError, LeaseLost, SyncStore
from alkstore_sa.models import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncJobHandle


@pytest.fixture
def other_engine(database: Database, sync_engine: Engine) -> Iterator[Engine]:
    """A second engine on the same database, with one connection; the business table is there."""
    Base.metadata.create_all(sync_engine)
    engine = create_engine(database.url("psycopg"), pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    engine.dispose()


def lost_claim(store: SyncStore) -> SyncJobHandle[Any]:
    """Return a handle whose claim is over."""
    queue = store.queue("q")
    queue.enqueue(1)
    (job,) = queue.claim("w")
    job.ack()
    return job


def test_a_refused_commit_around_a_session_leaves_no_broken_connection_in_the_pool(
    sync_store: SyncStore, other_engine: Engine
) -> None:
    job = lost_claim(sync_store)
    with other_engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection) as session, pytest.raises(LeaseLost):
            job.ack_tx(session)
        with pytest.raises(LeaseLost):
            transaction.commit()
    with other_engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1


def test_an_outer_two_phase_transaction_is_doomed_too(sync_store: SyncStore, other_engine: Engine) -> None:
    job = lost_claim(sync_store)
    with other_engine.connect() as connection:
        transaction = connection.begin_twophase()
        with Session(connection, join_transaction_mode="rollback_only") as session:
            with pytest.raises(LeaseLost):
                job.ack_tx(session)
            with pytest.raises(LeaseLost):
                session.commit()
        with pytest.raises((LeaseLost, DBAPIError)):
            transaction.commit()


def test_a_two_phase_session_commits_once_its_doomed_savepoint_is_rolled_back(
    sync_store: SyncStore, sync_engine: Engine, sql: Sql
) -> None:
    job = lost_claim(sync_store)
    try:
        with Session(sync_engine, twophase=True) as session:
            savepoint = session.begin_nested()
            with pytest.raises(LeaseLost):
                job.ack_tx(session)
            savepoint.rollback()
            sync_store.queue("q").enqueue_tx(session, 1)
            session.commit()
        assert sql.execute("SELECT count(*) FROM alkstore.job").fetchone() == (1,)
    finally:
        prepared = sql.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
        for (gid,) in prepared:  # the database could not be dropped
            sql.execute(f"ROLLBACK PREPARED '{gid}'".encode())


def test_a_later_transaction_of_a_once_doomed_connection_is_not_taken_for_lost(
    sync_store: SyncStore, other_engine: Engine
) -> None:
    job = lost_claim(sync_store)
    with other_engine.connect() as connection:
        doomed = connection.begin()
        with Session(connection) as session, pytest.raises(LeaseLost):
            job.ack_tx(session)
        doomed.rollback()
        later = connection.begin()
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1 / 0"))
        later.commit()  # what PostgreSQL and SQLAlchemy make of it is no affair of the engine's


def test_a_session_that_takes_over_anothers_info_is_watched_like_any(
    sync_store: SyncStore, sync_engine: Engine, other_engine: Engine, sql: Sql
) -> None:
    with Session(sync_engine) as first:
        sync_store.queue("q").enqueue_tx(first, 1)
        first.commit()
        binds: dict[Any, Any] = {Order: other_engine, sync_store.models.Base: sync_engine}
        with Session(binds=binds, info=first.info) as second:
            second.add(Order(reference="A-1"))
            sync_store.queue("q").enqueue_tx(second, 2)
            with pytest.raises(BindError):
                second.commit()
    assert sql.execute("SELECT count(*) FROM alkstore.job").fetchone() == (1,)


def test_a_caller_who_clears_the_info_does_not_make_a_session_listen_twice(
    sync_store: SyncStore, sync_engine: Engine
) -> None:
    with Session(sync_engine) as session:
        counts: set[int] = set()
        for number in range(3):
            sync_store.queue("q").enqueue_tx(session, number)
            session.commit()
            dispatch: Any = session.dispatch
            counts.add(len(list(dispatch.before_flush)))
            session.info.clear()
    assert len(counts) == 1


def test_a_caller_who_clears_the_info_does_not_undo_a_doom(sync_store: SyncStore, sync_engine: Engine) -> None:
    job = lost_claim(sync_store)
    with Session(sync_engine) as session:
        with pytest.raises(LeaseLost):
            job.ack_tx(session)
        session.info.clear()
        with pytest.raises(LeaseLost):
            session.commit()


def test_a_failed_read_from_a_replica_does_not_keep_a_job_from_being_committed(
    sync_store: SyncStore, sync_engine: Engine, other_engine: Engine, sql: Sql
) -> None:
    class Routed(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
            return sync_engine if self._flushing or isinstance(clause, (Update, Delete)) else other_engine

    with Routed() as session:
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1 / 0"))
        sync_store.queue("q").enqueue_tx(session, 1)
        session.commit()
    assert sql.execute("SELECT count(*) FROM alkstore.job").fetchone() == (1,)


def test_an_engine_that_translates_its_errors_does_not_hide_a_lost_lease(
    sync_store: SyncStore, other_engine: Engine
) -> None:
    @event.listens_for(other_engine, "handle_error")
    def translate(_: Any) -> None:
        raise OSError("the application's own error")

    job = lost_claim(sync_store)
    with Session(other_engine) as session:
        with pytest.raises(LeaseLost):
            job.ack_tx(session)
        with pytest.raises(LeaseLost):
            session.commit()


def test_jobs_come_from_a_textual_statement_like_from_any(sync_store: SyncStore, sync_engine: Engine) -> None:
    sync_store.queue("q").enqueue({"a": 1})
    with Session(sync_engine) as session:
        job = session.scalars(select(Job).from_statement(text("SELECT * FROM alkstore.job"))).one()
        assert job.payload == {"a": 1}


def test_a_job_can_be_pickled() -> None:
    job = Job(queue="q", payload={"a": 1})
    copy = pickle.loads(pickle.dumps(job))
    assert (type(copy), copy.payload) == (type(job), {"a": 1})
