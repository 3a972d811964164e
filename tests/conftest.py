"""Fixtures: a server, a database for each test, and engines and stores of both kinds on it."""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from support.databases import Database, Databases
from support.loops import Naps

from alkstore_sa import Store, SyncStore, embedded
from alkstore_sa._hub import Wakeup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from alkstore_sa.embedded import PostgresServer


SOURCE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[PostgresServer]:
    """A PostgreSQL server: ALKSTORE_TEST_DSN, a container, installed binaries or a wheel's; none is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker's client leaves a socket open when no daemon answers
        found = embedded.provide(dsn=os.environ.get("ALKSTORE_TEST_DSN"), durable=False, containers=True)
        gc.collect()
    pytestconfig.stash[SOURCE] = found.source
    output: dict[str, str] = getattr(pytestconfig, "workeroutput", {})  # on a worker, what the main process gets to see
    output["server"] = found.source
    with found:
        yield found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over from a worker which server its tests ran on."""
    if "server" in (output := getattr(node, "workeroutput", {})):
        node.config.stash[SOURCE] = output["server"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which server the tests ran on."""
    if SOURCE in config.stash:  # of one worker, where there are several: they all find the same
        terminalreporter.write_line(f"Server: {config.stash[SOURCE]}")


@pytest.fixture(scope="session")
def databases(server: PostgresServer) -> Iterator[Databases]:
    made = Databases(server)
    yield made
    made.close()


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    """A migrated database of the test's own."""
    yield from databases.clone()


@pytest.fixture
def sql(database: Database) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A plain connection in autocommit, to look at rows and to move stored times."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(params=["asyncpg", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    """The driver of the async engine."""
    return str(request.param)


@pytest.fixture
async def engine(database: Database, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url(driver), pool_size=10)
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> AsyncIterator[Store]:
    async with Store(engine) as store:
        yield store


@pytest.fixture
def sync_engine(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url("psycopg"))
    yield engine
    engine.dispose()


@pytest.fixture
def sync_store(sync_engine: Engine) -> Iterator[SyncStore]:
    with SyncStore(sync_engine) as store:
        yield store


@pytest.fixture
async def other_engine(database: Database, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url(driver))
    yield engine
    await engine.dispose()


@pytest.fixture
async def other(other_engine: AsyncEngine) -> AsyncIterator[Store]:
    """Another store, with an engine of its own: what it says must go through the server."""
    async with Store(other_engine) as store:
        yield store


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> Naps:
    """What is known of the sleeps of all loops."""
    naps = Naps()
    monkeypatch.setattr(Wakeup, "wait", naps.noting(Wakeup.wait))
    return naps
