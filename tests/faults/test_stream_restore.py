"""A stream that was dumped in the middle of everything and goes on in a fresh cluster."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from support.waiting import DEADLINE

from alkstore_sa import Store, SyncStore, embedded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa.embedded import Binaries, LocalServer


@pytest.fixture
def programs() -> Binaries:
    return embedded.find_binaries()


@pytest.fixture
def fresh(programs: Binaries) -> Iterator[LocalServer]:
    """Another cluster, with transaction ids and everything else of its own."""
    with embedded.start(durable=False, binaries=programs) as server:
        yield server


def run(programs: Binaries, name: str, dsn: str, *arguments: str) -> None:
    url = make_url(dsn)
    subprocess.run(
        [
            str(programs.bin_dir / name),
            *arguments,
            "--dbname",
            url.set(drivername="postgresql").render_as_string(False),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


@pytest.fixture(params=["custom", "plain"])
def dump_and_restore(request: pytest.FixtureRequest, programs: Binaries, tmp_path: Path) -> Any:
    """What copies a database by one of the two usual ways."""
    file = str(tmp_path / "dump")

    def copy(source: str, target: str) -> None:
        run(programs, "pg_dump", source, f"--format={request.param}", f"--file={file}")
        if request.param == "custom":
            run(programs, "pg_restore", target, "--exit-on-error", file)
        else:
            run(programs, "psql", target, "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={file}")

    return copy


async def test_a_restored_stream_loses_nothing_repeats_nothing_and_keeps_its_order(
    sync_store: SyncStore, database: Database, driver: str, sql: Sql, fresh: LocalServer, dump_and_restore: Any
) -> None:
    stream = sync_store.stream("s")
    with psycopg.connect(database.dsn) as early:
        early.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '\"committed late\"')")
        stream.publish_many([f"placed {number}" for number in range(10)])
        before = stream.read()
        assert len(before) == 10
        early.commit()
    stream.save_offset("middle", 4)
    stream.save_offset("end", 10)
    stream.publish_many([f"not placed {number}" for number in range(5)])
    sql.execute(  # a consumer that was running
        'INSERT INTO alkstore.stream_offset (stream, consumer, "offset", lease, lease_expires_at) VALUES'
        " ('s', 'running', 7, nextval('alkstore.job_lease'), statement_timestamp() + interval '1 second')"
    )
    with psycopg.connect(database.dsn) as uncommitted:
        uncommitted.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '\"never\"')")
        dump_and_restore(database.dsn, fresh.dsn)
        uncommitted.rollback()

    expected = [
        *((event.offset, event.payload) for event in before),
        (11, "committed late"),
        *((12 + number, f"not placed {number}") for number in range(5)),
        (17, "after"),
    ]
    plain = create_engine(fresh.url("psycopg"))
    with SyncStore(plain) as restored:
        new_id = restored.stream("s").publish("after")
        events = restored.stream("s").read()
        assert [(event.offset, event.payload) for event in events] == expected
        assert events[-1].id == new_id == max(event.id for event in events)
        assert restored.stream("s").head() == 17
        assert restored.stream("s").trim(keep=0) == 4  # as far as the slowest consumer has come
    plain.dispose()

    engine = create_async_engine(fresh.url(driver))
    async with Store(engine) as store:
        for consumer, begin in {"middle": 4, "end": 10, "running": 7}.items():
            async with contextlib.aclosing(store.stream("s").subscribe(consumer, poll=0.05)) as subscription:
                got = [await asyncio.wait_for(anext(subscription), DEADLINE) for _ in range(17 - begin)]
            assert [(event.offset, event.payload) for event in got] == expected[begin:]
    await engine.dispose()
