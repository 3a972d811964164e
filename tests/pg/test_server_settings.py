"""Servers and roles whose settings differ from the usual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from alkstore_sa import BindError, Store

if TYPE_CHECKING:
    from support.databases import Database
    from support.rows import Sql


@pytest.mark.parametrize(
    "setting",
    [
        "IntervalStyle = iso_8601",
        "IntervalStyle = sql_standard",
        "IntervalStyle = postgres_verbose",
        "DateStyle = 'ISO, DMY'",
        "TimeZone = 'Asia/Kathmandu'",
        "standard_conforming_strings = off",
        "client_encoding = LATIN1",
    ],
)
async def test_a_job_goes_its_way_whatever_the_databases_settings(
    setting: str, database: Database, sql: Sql, driver: str
) -> None:
    sql.execute(f'ALTER DATABASE "{make_url(database.dsn).database}" SET {setting}'.encode())
    engine = create_async_engine(database.url(driver))
    try:
        queue = Store(engine).queue("q")
        job_id = await queue.enqueue({"a": 1}, delay=0.000001, expires=1000)
        jobs: list[Any] = await queue.claim("w")
        assert [job.id for job in jobs] == [job_id]
        assert await jobs[0].retry(ValueError("x"), delay=60) == "pending"
        snapshot = await queue.get_job(job_id)
        assert snapshot is not None
        assert snapshot.visibility_timeout.total_seconds() == 300
        wait = await queue.next_due()
        assert wait is not None
        assert 50 < wait.total_seconds() <= 60
        assert (await queue.stats()).future == 1
    finally:
        await engine.dispose()


@pytest.mark.parametrize("style", ["German", "SQL, DMY"])
async def test_a_style_of_dates_that_psycopg_cannot_read_is_refused_before_anything_is_claimed(
    style: str, database: Database, sql: Sql
) -> None:
    sql.execute(f"ALTER DATABASE \"{make_url(database.dsn).database}\" SET DateStyle = '{style}'".encode())
    sql.execute("INSERT INTO alkstore.job (queue, payload) VALUES ('q', '1')")
    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(database.url(driver))
        queue = Store(engine).queue("q")
        if driver == "psycopg":
            with pytest.raises(BindError, match="datestyle=ISO"):
                await queue.claim("w")
        else:
            assert [job.attempts for job in await queue.claim("w")] == [1]
        await engine.dispose()
