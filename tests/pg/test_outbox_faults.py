from __future__ import annotations

import asyncio
import functools
from operator import contains
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine
from support.deliveries import Gate, fail, nothing
from support.roles import acting_as, make_role
from support.rows import count as jobs, lapse
from support.waiting import DEADLINE, finish, until

from alkstore_sa import SchemaMissing, StopToken, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import JobHandle, Outbox


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    yield from make_role(database)


def terminate_others(sql: Sql, database: Database) -> int:
    """Terminate every other connection to the test's database and return how many there were."""
    return len(
        sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    )


async def test_errors_of_deliveries_do_not_end_the_loop(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    seen: list[Any] = []

    def deliver(job: JobHandle[Any]) -> None:
        if job.payload % 2:
            fail(job)
        seen.append(job.payload)

    await outbox.enqueue_many(range(10), max_attempts=1)
    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=3))
    await until(lambda: len(seen) == 5 and jobs(sql, "dead") == 5)
    stop.cancel()
    await finish(running)
    errors = sql.execute("SELECT DISTINCT reason, last_error FROM alkstore.dead").fetchall()
    assert errors == [("exhausted", "RuntimeError: no route to host")]


async def test_a_lost_lease_does_not_end_the_loop(
    outbox: Outbox, stop: StopToken, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    async def deliver(job: JobHandle[Any]) -> None:
        if job.payload == "overtaken":
            lapse(sql, job.id)
            sql.execute("DELETE FROM alkstore.job WHERE id = %s", [job.id])
        seen.append(job.payload)

    await outbox.enqueue_many(["overtaken", "next"])
    running = asyncio.create_task(outbox.run("w", deliver, stop, concurrency=1))
    await until(lambda: seen == ["overtaken", "next"])
    stop.cancel()
    await finish(running)
    assert [record.levelname for record in caplog.records if record.name == "alkstore_sa.outbox"] == ["WARNING"]


async def test_a_payload_that_does_not_decode_does_not_end_the_loop(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    sql.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('__alkstore_outbox:orders', '1e5000')")
    seen: list[Any] = []
    await outbox.enqueue("good")
    running = asyncio.create_task(outbox.run("w", lambda job: seen.append(job.payload), stop))
    await until(lambda: seen == ["good"])
    stop.cancel()
    await finish(running)
    assert sql.execute("SELECT reason FROM alkstore.dead").fetchall() == [("undecodable",)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_it_survives_the_termination_of_its_connections_and_goes_on(
    outbox: Outbox, stop: StopToken, sql: Sql, database: Database
) -> None:
    seen: list[Any] = []
    await outbox.enqueue(0)
    running = asyncio.create_task(outbox.run("w", lambda job: seen.append(job.payload), stop, poll=0.05))
    await until(lambda: seen == [0])
    for number in range(1, 4):
        assert terminate_others(sql, database) > 0
        sql.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('__alkstore_outbox:orders', %s)", [str(number)])
        await until(functools.partial(contains, seen, number))
    assert not running.done()
    stop.cancel()
    await finish(running)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_it_survives_the_termination_of_its_connections_during_a_delivery(
    outbox: Outbox, stop: StopToken, sql: Sql, database: Database
) -> None:
    gate = Gate()
    await outbox.enqueue("first")
    running = asyncio.create_task(outbox.run("w", gate, stop, concurrency=2, poll=0.05))
    await until(lambda: gate.begun == ["first"])
    assert terminate_others(sql, database) > 0
    gate.open.set()
    await until(lambda: gate.done == ["first"])
    sql.execute("""INSERT INTO alkstore.job (queue, payload) VALUES ('__alkstore_outbox:orders', '"second"')""")
    await until(lambda: "second" in gate.done)
    assert not running.done()
    stop.cancel()
    await finish(running)


async def test_a_missing_right_ends_it_with_the_databases_error(
    database: Database, driver: str, role: str, sql: Sql, stop: StopToken
) -> None:
    for right in ("USAGE ON SCHEMA alkstore", "SELECT ON ALL TABLES IN SCHEMA alkstore"):
        sql.execute(f'GRANT {right} TO "{role}"'.encode())
    engine = create_async_engine(database.url(driver), connect_args=acting_as(role, driver))
    with pytest.raises(ProgrammingError, match="permission denied"):
        await asyncio.wait_for(Store(engine).outbox("orders").run("w", nothing, stop), DEADLINE)
    await engine.dispose()


def forbid_ack(sql: Sql) -> None:
    """Make the database refuse every deletion of a job with an error that does not pass by itself."""
    sql.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$")
    sql.execute("CREATE TRIGGER refuse BEFORE DELETE ON alkstore.job FOR EACH ROW EXECUTE FUNCTION refuse()")


async def test_an_error_of_an_acknowledgement_that_does_not_pass_ends_it(
    outbox: Outbox, stop: StopToken, sql: Sql
) -> None:
    forbid_ack(sql)
    await outbox.enqueue(1)
    with pytest.raises(Exception, match="no"):
        await asyncio.wait_for(outbox.run("w", nothing, stop), DEADLINE)


async def test_an_error_that_ends_the_loop_is_raised_after_a_stop_too(
    outbox: Outbox, stop: StopToken, sql: Sql
) -> None:
    gate = Gate()
    await outbox.enqueue(1)
    running = asyncio.create_task(outbox.run("w", gate, stop))
    await until(lambda: gate.begun)
    forbid_ack(sql)
    stop.cancel()
    gate.open.set()
    with pytest.raises(Exception, match="no"):
        await finish(running)


async def test_a_database_without_the_tables_ends_it(outbox: Outbox, stop: StopToken, sql: Sql) -> None:
    sql.execute("DROP SCHEMA alkstore CASCADE")
    with pytest.raises(SchemaMissing):
        await asyncio.wait_for(outbox.run("w", nothing, stop), DEADLINE)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_message_whose_acknowledgement_met_a_dropped_connection_is_not_delivered_again(
    outbox: Outbox, stop: StopToken, sql: Sql, database: Database
) -> None:
    delivered: list[Any] = []

    async def deliver(job: JobHandle[Any]) -> None:
        delivered.append(job.payload)
        assert terminate_others(sql, database) > 0

    await outbox.enqueue("once")
    running = asyncio.create_task(outbox.run("w", deliver, stop, poll=0.05))
    await until(lambda: jobs(sql) == 0)
    stop.cancel()
    await finish(running)
    assert delivered == ["once"]
    assert jobs(sql, "dead") == 0


async def test_an_outcome_that_cannot_be_stored_for_seconds_leaves_the_message_to_its_lease(
    outbox: Outbox, stop: StopToken, sql: Sql, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await outbox.enqueue("x")
    delivered: list[Any] = []

    async def deliver(job: JobHandle[Any]) -> None:
        delivered.append(job.payload)
        # As on a primary that has become a standby: reads go on, writes fail, and not for good.
        sql.execute(
            f'ALTER DATABASE "{make_url(database.dsn).database}" SET default_transaction_read_only = on'.encode()
        )
        terminate_others(sql, database)

    running = asyncio.create_task(outbox.run("w", deliver, stop, poll=0.05))
    await until(lambda: "its lease decides" in caplog.text)
    assert not running.done()
    stop.cancel()
    await finish(running)
    assert delivered == ["x"]
    assert sql.execute("SELECT state, attempts FROM alkstore.job").fetchall() == [("processing", 1)]
