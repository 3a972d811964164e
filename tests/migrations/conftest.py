"""What the tests of migrations share: a database of their own without the engine's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Database, Databases
    from support.rows import Sql


@pytest.fixture
def empty(databases: Databases) -> Iterator[Database]:
    """A database without the engine's tables."""
    database = databases.create()
    yield database
    databases.drop(database)


@pytest.fixture
def look(empty: Database) -> Iterator[Sql]:
    """A plain connection to it, in autocommit."""
    with psycopg.connect(empty.dsn, autocommit=True) as connection:
        yield connection
