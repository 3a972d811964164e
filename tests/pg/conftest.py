"""What the tests of outbox loops share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from alkstore_sa import StopToken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alkstore_sa import Outbox, Store


@pytest.fixture
def outbox(store: Store) -> Outbox:
    return store.outbox("orders")


@pytest.fixture
def stop() -> Iterator[StopToken]:
    """A token that is cancelled at the end, whatever becomes of the test."""
    token = StopToken()
    yield token
    token.cancel()
