"""The example application, run as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Database, Databases

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0

# What the shipped orders, the credit limit and the receiver's habits amount to.
FIGURES = {
    "placed": "557",
    "rolled back": "43",
    "delivered": "552",
    "retried": "73",
    "dead": "5",
    "received": "552",
    "repeated": "12",
}


@pytest.fixture
def empty(databases: Databases) -> Iterator[Database]:
    """A database that no migration has seen."""
    database = databases.create()
    yield database
    databases.drop(database)


def environment(**variables: str) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "ALKSTORE_DEMO_DSN"}
    return others | {"PYTHONDONTWRITEBYTECODE": "1"} | variables


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "examples.orders", *arguments]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def figures(output: str) -> dict[str, str]:
    """Read the table's names and figures; they stand in two aligned columns."""
    rows = re.findall(r"^  (\w[\w ]{11}) *(\d+)   \w", output, re.MULTILINE)
    return {name.strip(): figure for name, figure in rows}


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start the example, and see to it that it ends."""
    with subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def database_of(output: str, server: Database) -> str | None:
    """Return the database that a run said it used, if it is still there."""
    match = re.search(r"in the database (alkstore_demo_\w+)$", output, re.MULTILINE)
    assert match is not None, output
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        found = connection.execute("SELECT datname FROM pg_database WHERE datname = %s", [match[1]]).fetchone()
    return None if found is None else match[1]


def tables_in(database: Database) -> list[tuple[object, ...]]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        found = connection.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'"
        )
        return list(found)


@pytest.mark.parametrize("door", ["async", "sync"])
def test_it_places_and_delivers_every_order_once_and_a_second_run_does_the_same(empty: Database, door: str) -> None:
    for _ in range(2):
        ended = run(*([] if door == "async" else [door]), ALKSTORE_DEMO_DSN=empty.dsn)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stderr == ""
        assert {name: figures(ended.stdout).get(name) for name in FIGURES} == FIGURES, ended.stdout
        assert "SQL finds 0 of them and 0 messages" in ended.stdout
        assert "WRONG" not in ended.stdout


def test_it_says_which_server_it_took_and_leaves_nothing_on_it(empty: Database) -> None:
    ended = run("sync", ALKSTORE_DEMO_DSN=empty.dsn)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    url = make_url(empty.dsn)
    assert ended.stdout.startswith(f"PostgreSQL: the running server at {url.host}:{url.port}\n")
    assert str(url.password) not in ended.stdout
    assert database_of(ended.stdout, empty) is None
    assert tables_in(empty) == []


@pytest.mark.parametrize("door", ["async", "sync"])
def test_ctrl_c_ends_it_in_good_order(empty: Database, door: str) -> None:
    lines: list[str] = []
    with running(door, ALKSTORE_DEMO_DSN=empty.dsn) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "orders placed" in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert errors == "Stopped. The database of this run is dropped.\n"
    assert figures(output) == {}
    assert database_of("".join(lines), empty) is None


def test_a_server_that_does_not_answer_is_reported_in_a_sentence() -> None:
    ended = run(ALKSTORE_DEMO_DSN="postgresql://nobody:secret@127.0.0.1:1/nothing")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "127.0.0.1:1" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret" not in ended.stderr


def test_a_role_that_may_not_make_databases_is_told_so(empty: Database) -> None:
    role, password = f"alkstore_demo_guest_{os.getpid()}", "guest"
    url = make_url(empty.dsn)
    with psycopg.connect(empty.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), password))
        try:
            guest = url.set(username=role, password=password).render_as_string(hide_password=False)
            ended = run(ALKSTORE_DEMO_DSN=guest)
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
    assert ended.returncode == 1
    assert ended.stderr == "cannot make a database for this run: permission denied to create database\n"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_its_migrations_run_up_and_down_from_the_command_line(empty: Database, driver: str) -> None:
    alembic = [sys.executable, "-m", "alembic", "-c", "examples/orders/alembic.ini"]
    for arguments, expected in {
        ("upgrade", "head"): {("public", "orders"), ("alkstore", "job")},
        ("check",): {("public", "orders"), ("alkstore", "job")},
        ("downgrade", "base"): set(),
    }.items():
        subprocess.run(
            [*alembic, *arguments],
            cwd=ROOT,
            env=environment(ORDERS_URL=empty.url(driver)),
            check=True,
            timeout=DEADLINE,
        )
        tables = set(tables_in(empty))
        assert tables >= expected
        assert expected or tables <= {("public", "alembic_version"), ("public", "alembic_version_pkc")}
