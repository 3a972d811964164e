"""Sessions and pools of unusual kinds, and what a wake may not do to them."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import StaticPool, create_engine, event, text
from sqlalchemy.orm import Session
from support.waiting import DEADLINE

from alkstore_sa import SyncStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import Engine
    from support.databases import Database
    from support.rows import Sql


@pytest.fixture
def heard(sql: Sql, sync_store: SyncStore) -> psycopg.Connection[tuple[object, ...]]:
    """A connection that listens to the wakes of queue q."""
    sql.execute(f'LISTEN "{sync_store._core.announcement("queue", "q").channel}"'.encode())
    return sql


@pytest.fixture
def small_engine(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url("psycopg"), pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    engine.dispose()


def test_a_session_that_is_dropped_with_a_job_in_it_gives_its_connection_back(small_engine: Engine) -> None:
    store = SyncStore(small_engine)
    for n in range(3):
        session = Session(small_engine)
        store.queue("q").enqueue_tx(session, n)
        session.flush()
        del session
        gc.collect()
    assert store.queue("q").stats().pending == 0


def test_a_session_that_is_dropped_after_a_lost_lease_gives_its_connection_back(small_engine: Engine) -> None:
    store = SyncStore(small_engine)
    queue = store.queue("q")
    queue.enqueue(1)
    (job,) = queue.claim("w")
    job.release()
    session = Session(small_engine)
    with pytest.raises(Exception, match="ack_tx"):
        job.ack_tx(session)
    del session
    gc.collect()
    assert queue.stats().pending == 1


def test_a_wake_does_not_commit_what_a_session_on_the_same_connection_has_open(database: Database, sql: Sql) -> None:
    sql.execute("CREATE TABLE business (id integer)")
    engine = create_engine(database.url("psycopg"), poolclass=StaticPool)
    store = SyncStore(engine)
    with Session(engine) as session:
        store.queue("q").enqueue_tx(session, 1)
        session.commit()
    with Session(engine) as session:
        session.execute(text("INSERT INTO business VALUES (1)"))
        store.close()  # the wake has been sent
        session.rollback()
    assert sql.execute("SELECT * FROM business").fetchall() == []
    engine.dispose()


def test_a_job_that_a_listener_adds_after_a_commit_is_announced_by_the_next(
    sync_store: SyncStore, sync_engine: Engine, heard: psycopg.Connection[tuple[object, ...]]
) -> None:
    queue = sync_store.queue("q")
    with Session(sync_engine) as session:
        event.listen(session, "after_commit", lambda s: queue.enqueue_tx(s, "follow-up"), once=True)
        session.execute(text("SELECT 1"))
        session.commit()
        session.commit()
    assert next(heard.notifies(timeout=DEADLINE, stop_after=1)).payload


def test_a_job_that_is_added_again_after_a_rollback_is_announced(
    sync_store: SyncStore, sync_engine: Engine, heard: psycopg.Connection[tuple[object, ...]]
) -> None:
    with Session(sync_engine) as session:
        job = sync_store.queue("q").enqueue_tx(session, 1)
        session.rollback()
        session.add(job)
        session.commit()
    assert next(heard.notifies(timeout=DEADLINE, stop_after=1)).payload


def test_what_was_rolled_back_is_not_announced_by_the_sessions_next_commit(
    sync_store: SyncStore, sync_engine: Engine, heard: psycopg.Connection[tuple[object, ...]]
) -> None:
    with Session(sync_engine) as session:
        sync_store.queue("q").enqueue_tx(session, 1)
        session.flush()
        session.rollback()
        sync_store.queue("other").enqueue_tx(session, 2)
        session.commit()
    sync_store.close()
    begun = time.monotonic()
    assert list(heard.notifies(timeout=0.2)) == []
    assert time.monotonic() - begun < DEADLINE
