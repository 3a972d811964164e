"""Who hears what in this process."""

from __future__ import annotations

import pytest

from alkstore_sa._hub import Hub


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.payloads: list[str] = []

    def receive(self, channel: str, payload: str) -> None:
        self.payloads.append(f"{channel}:{payload}")

    def established(self) -> None: ...
    def reconnected(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_a_wake_reaches_who_subscribes_and_nobody_afterwards(hub: Hub) -> None:
    here, there = Heard(), Heard()
    with hub.subscribed(["a", "b"], here), hub.subscribed(["b"], there):
        hub.wake("a")
        hub.wake("b")
    hub.wake("a")
    assert (here.payloads, there.payloads) == (["a:", "b:"], ["b:"])
    assert hub.channels() == set()


def test_a_block_that_the_garbage_collector_ends_within_a_change_does_not_wait_for_it(hub: Hub) -> None:
    sink = Heard()
    block = hub.subscribed(["a"], sink)
    block.__enter__()
    with hub._lock:
        block.__exit__(None, None, None)
    assert hub.channels() == set()


def test_sinks_of_several_channels_are_named_once(hub: Hub) -> None:
    sink = Heard()
    with hub.subscribed(["a", "b"], sink):
        assert hub.sinks({"a", "b"}) == [sink] == hub.everyone()
