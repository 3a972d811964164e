"""What is left when a process is killed: never half of a transaction, and never a job that nobody can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from support.processes import running
from support.rows import job_row, lapse

if TYPE_CHECKING:
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore

PRELUDE: Final = """
import sys, time
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from alkstore_sa import SyncStore
engine = create_engine(sys.argv[1])
store = SyncStore(engine)
queue = store.queue("emails")
def stay():
    while True:
        time.sleep(60)
"""

CLAIMS: Final = f"""{PRELUDE}
job, = queue.claim("doomed")
print(job.id, flush=True)
stay()
"""

FLUSHES: Final = f"""{PRELUDE}
session = Session(engine)
session.execute(text("INSERT INTO business VALUES (1)"))
queue.enqueue_tx(session, "never")
session.flush()
print("flushed", flush=True)
stay()
"""

COMMITS: Final = FLUSHES.replace('print("flushed"', 'session.commit(); print("committed"')

FINISHES: Final = f"""{PRELUDE}
job, = queue.claim("doomed")
session = Session(engine)
session.execute(text("INSERT INTO business VALUES (1)"))
job.ack_tx(session)
print(job.id, flush=True)
stay()
"""

DELIVERS: Final = f"""{PRELUDE}
def deliver(job):
    print(job.id, flush=True)
    stay()
store.outbox("mail").run_once("doomed", deliver)
"""


def test_a_job_whose_worker_was_killed_comes_back_when_its_lease_lapses(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    queue = sync_store.queue("emails")
    job_id = queue.enqueue("x")
    with running(CLAIMS, database.url("psycopg")) as worker:
        assert worker.line() == str(job_id)
        worker.kill()
    assert queue.claim("w") == []
    lapse(sql, job_id)
    (job,) = queue.claim("w")
    assert (job.id, job.attempts) == (job_id, 2)


def test_a_job_whose_worker_was_killed_at_its_last_attempt_is_dead_after_the_sweep(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    queue = sync_store.queue("emails")
    job_id = queue.enqueue("x", max_attempts=1)
    with running(CLAIMS, database.url("psycopg")) as worker:
        worker.line()
        worker.kill()
    lapse(sql, job_id)
    assert queue.claim("w") == []
    assert queue.sweep_expired() == 1
    dead = queue.get_job(job_id)
    assert dead is not None
    assert (dead.state, dead.reason, dead.attempts) == ("dead", "lapsed", 1)


def test_a_process_killed_between_flush_and_commit_leaves_neither_job_nor_business_row(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    sql.execute("CREATE TABLE business (id integer)")
    with running(FLUSHES, database.url("psycopg")) as producer:
        assert producer.line() == "flushed"
        producer.kill()
    assert sync_store.queue("emails").stats().pending == 0
    assert sql.execute("SELECT * FROM business").fetchall() == []


def test_a_process_killed_after_its_commit_leaves_both(sync_store: SyncStore, database: Database, sql: Sql) -> None:
    sql.execute("CREATE TABLE business (id integer)")
    with running(COMMITS, database.url("psycopg")) as producer:
        assert producer.line() == "committed"
        producer.kill()
    assert sync_store.queue("emails").stats().pending == 1
    assert sql.execute("SELECT * FROM business").fetchall() == [(1,)]


def test_a_process_killed_between_ack_tx_and_commit_leaves_the_job_under_its_lease_and_no_effects(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    sql.execute("CREATE TABLE business (id integer)")
    job_id = sync_store.queue("emails").enqueue("x")
    with running(FINISHES, database.url("psycopg")) as worker:
        worker.line()
        worker.kill()
    # A statement that waits for the dead process's locks returns once the server has rolled its transaction back.
    sql.execute("SELECT id FROM alkstore.job FOR UPDATE")
    row = job_row(sql, job_id)
    assert row is not None
    assert (row["state"], row["attempts"]) == ("processing", 1)
    assert sql.execute("SELECT * FROM business").fetchall() == []


def test_a_message_whose_deliverer_was_killed_is_delivered_again(
    sync_store: SyncStore, database: Database, sql: Sql
) -> None:
    outbox = sync_store.outbox("mail")
    message_id = outbox.enqueue("x")
    with running(DELIVERS, database.url("psycopg")) as deliverer:
        assert deliverer.line() == str(message_id)
        deliverer.kill()
    lapse(sql, message_id)
    delivered: list[int] = []
    assert outbox.run_once("w", lambda job: delivered.append(job.id))
    assert delivered == [message_id]
