"""What the tests of faults share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.databases import Database, migrate

from alkstore_sa import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alkstore_sa.embedded import LocalServer


@pytest.fixture
def own_server() -> Iterator[LocalServer]:
    """A server of the test's own, migrated, and with fsync on: it is going to be killed."""
    with embedded.start(durable=True) as server:
        migrate(Database(server.dsn))
        yield server
