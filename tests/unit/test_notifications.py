"""The buffer of one subscriber, fed by hand."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from alkstore_sa import BindError, InvalidName, Lagged, ReservedName
from alkstore_sa._channels import RECONNECTED, user_channel
from alkstore_sa._hub import Hub
from alkstore_sa._listener import Listener
from alkstore_sa.listen import Notification, Notifications

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORD = Notification(RECONNECTED, "")


class FedListener(Listener):
    """A listener without a connection: everything is listened to at once."""

    def __init__(self) -> None:
        super().__init__(Hub(), None, "no engine", 10, "token")

    async def listening_to(self, channels: set[str]) -> None:
        """Return at once."""

    def send(self, *payloads: str, channel: str = "a") -> None:
        """Do what the connection does when notifications arrive."""
        for payload in payloads:
            self._receive(channel, payload)

    def reconnect(self) -> None:
        """Do what the connection does when it is there again."""
        for sink in self.hub.everyone():
            sink.reconnected()


@asynccontextmanager
async def subscribed(
    *channels: str, buffer: int = 1000, listener: FedListener | None = None
) -> AsyncIterator[tuple[FedListener, Notifications]]:
    listener = listener or FedListener()
    async with Notifications(listener, channels or ("a",), buffer) as notifications:
        yield listener, notifications


async def take(notifications: Notifications, n: int = 1) -> list[Any]:
    """Take what is there already: payloads, the reconnect word, and how many were missed at each gap."""
    taken: list[Any] = []
    for _ in range(n):
        try:
            found = await asyncio.wait_for(anext(notifications), 5)
        except Lagged as gap:
            taken.append(gap.missed)
        else:
            taken.append("RECONNECTED" if found.is_reconnect else found.payload)
    return taken


def held(notifications: Notifications) -> int:
    """Return how many notifications a subscriber keeps in memory."""
    return len(notifications._buffer)


# -- order and gaps ----------------------------------------------------------------------------------------------------


async def test_notifications_come_in_the_order_of_their_arrival() -> None:
    async with subscribed("a", "b") as (listener, notifications):
        listener.send("1")
        listener.send("2", channel="b")
        listener.send("3")
        found = [await anext(notifications) for _ in range(3)]
    assert found == [Notification("a", "1"), Notification("b", "2"), Notification("a", "3")]


async def test_equal_notifications_are_not_merged() -> None:
    async with subscribed() as (listener, notifications):
        listener.send("1", "1", "1")
        assert await take(notifications, 3) == ["1", "1", "1"]


async def test_a_waiting_subscriber_is_woken() -> None:
    async with subscribed() as (listener, notifications):
        waiting = asyncio.ensure_future(take(notifications))
        await asyncio.sleep(0)
        listener.send("1")
        assert await waiting == ["1"]


async def test_a_notification_on_a_long_channel_bears_the_callers_name() -> None:
    async with subscribed("x" * 200) as (listener, notifications):
        listener.send("1", channel=user_channel("x" * 200))
        assert await anext(notifications) == Notification("x" * 200, "1")


async def test_a_channel_named_twice_is_subscribed_to_once() -> None:
    async with subscribed("a", "a") as (listener, notifications):
        listener.send("1", "2")
        assert await take(notifications, 2) == ["1", "2"]


async def test_a_full_buffer_keeps_the_oldest_and_tells_where_the_gap_is() -> None:
    async with subscribed(buffer=2) as (listener, notifications):
        listener.send("1", "2", "3", "4", "5")
        assert await take(notifications, 3) == ["1", "2", 3]


async def test_a_buffer_that_is_exactly_full_has_no_gap() -> None:
    async with subscribed(buffer=2) as (listener, notifications):
        listener.send("1", "2")
        assert await take(notifications, 2) == ["1", "2"]
        listener.send("3")
        assert await take(notifications) == ["3"]


async def test_the_iteration_goes_on_after_a_gap() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1", "2")
        assert await take(notifications, 2) == ["1", 1]
        listener.send("3")
        assert await take(notifications) == ["3"]


async def test_each_gap_is_told_once_with_its_own_number() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1", "2")
        assert await take(notifications, 2) == ["1", 1]
        listener.send("3", "4", "5")
        assert await take(notifications, 2) == ["3", 2]


async def test_what_arrives_before_the_gap_was_told_does_not_overtake_it() -> None:
    async with subscribed(buffer=2) as (listener, notifications):
        listener.send("1", "2", "3")
        assert await take(notifications) == ["1"]
        listener.send("4")  # there is room for it, but behind the gap
        assert await take(notifications, 2) == ["2", 2]


async def test_a_slow_subscriber_holds_nobody_else_up() -> None:
    async with subscribed(buffer=1) as (listener, slow), subscribed(listener=listener) as (_, quick):
        listener.send("1", "2", "3")
        assert await take(quick, 3) == ["1", "2", "3"]
        assert await take(slow, 2) == ["1", 2]


async def test_memory_is_bounded_for_a_subscriber_that_never_reads() -> None:
    async with subscribed(buffer=10) as (listener, notifications):
        listener.send(*["x" * 1000] * 10_000)
        for _ in range(1000):
            listener.reconnect()
        assert held(notifications) == 10
        assert (await take(notifications, 11))[-1] == 9_990


async def test_the_message_of_a_gap_says_how_much_was_missed() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1", "2", "3")
        await anext(notifications)
        with pytest.raises(Lagged, match="2 notifications"):
            await anext(notifications)


# -- the word after a reconnect ----------------------------------------------------------------------------------------


async def test_the_reconnect_word_comes_in_its_place() -> None:
    async with subscribed() as (listener, notifications):
        listener.send("1")
        listener.reconnect()
        listener.send("2")
        assert await take(notifications, 3) == ["1", "RECONNECTED", "2"]


async def test_the_reconnect_word_is_on_a_channel_of_the_engines() -> None:
    async with subscribed() as (listener, notifications):
        listener.reconnect()
        word = await anext(notifications)
    assert (word.channel, word.payload) == ("__alkstore_listener_reconnected__", "")
    assert word.is_reconnect
    assert not Notification("a", "").is_reconnect


async def test_the_reconnect_word_comes_once_to_a_subscriber_of_many_channels() -> None:
    async with subscribed("a", "b", "c") as (listener, notifications):
        listener.reconnect()
        listener.send("1")
        assert await take(notifications, 2) == ["RECONNECTED", "1"]


async def test_a_full_buffer_never_loses_the_reconnect_word() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1")
        listener.reconnect()
        assert await take(notifications, 2) == ["1", "RECONNECTED"]


async def test_the_reconnect_word_follows_the_gap_before_it() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1", "2")
        listener.reconnect()
        assert await take(notifications, 3) == ["1", 1, "RECONNECTED"]


async def test_what_was_missed_after_the_reconnect_word_is_told_too() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1")
        listener.reconnect()
        listener.send("2", "3")
        told = await take(notifications, 3)
        assert told[0] == "1"
        assert sorted(told[1:], key=str) == [2, "RECONNECTED"]


async def test_nothing_overtakes_a_reconnect_word_that_waits() -> None:
    async with subscribed(buffer=1) as (listener, notifications):
        listener.send("1")
        listener.reconnect()
        assert await take(notifications) == ["1"]
        listener.send("2")  # there is room for it, but behind the word
        told = await take(notifications, 2)
        assert sorted(told, key=str) == [1, "RECONNECTED"]
        listener.send("3")
        assert await take(notifications) == ["3"]


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_the_iteration_ends_when_the_listener_is_closed() -> None:
    async with subscribed() as (listener, notifications):
        waiting = asyncio.ensure_future(anext(notifications, None))
        await asyncio.sleep(0)
        await listener.close()
        assert await asyncio.wait_for(waiting, 5) is None


async def test_what_had_arrived_before_the_close_is_still_handed_out() -> None:
    async with subscribed(buffer=2) as (listener, notifications):
        listener.send("1", "2", "3")
        listener.reconnect()
        await listener.close()
        assert await take(notifications, 4) == ["1", "2", 1, "RECONNECTED"]
        assert await anext(notifications, None) is None


async def test_a_close_from_another_thread_ends_the_iteration() -> None:
    async with subscribed() as (listener, notifications):
        waiting = asyncio.ensure_future(anext(notifications, None))
        await asyncio.sleep(0)
        thread = threading.Thread(target=listener.closed.cancel)
        thread.start()
        assert await asyncio.wait_for(waiting, 5) is None
        thread.join()


async def test_a_failure_is_raised_after_what_had_arrived() -> None:
    async with subscribed() as (listener, notifications):
        listener.send("1")
        for sink in listener.hub.everyone():
            sink.failed(BindError("a pooler"))
        assert await take(notifications) == ["1"]
        with pytest.raises(BindError, match="a pooler"):
            await anext(notifications)


async def test_nothing_arrives_after_the_block() -> None:
    async with subscribed() as (listener, notifications):
        pass
    listener.send("1")
    assert held(notifications) == 0
    assert listener.hub.channels() == set()


async def test_a_cancelled_wait_loses_nothing() -> None:
    async with subscribed() as (listener, notifications):
        waiting = asyncio.ensure_future(anext(notifications))
        await asyncio.sleep(0)
        listener.send("1")
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert await take(notifications) == ["1"]


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_a_subscription_needs_a_channel() -> None:
    with pytest.raises(ValueError, match="at least one channel"):
        Notifications(FedListener(), (), 1000)


def test_the_names_are_looked_at_before_anything_is_opened() -> None:
    with pytest.raises(InvalidName):
        Notifications(FedListener(), ("a", ""), 1000)
    with pytest.raises(ReservedName):
        Notifications(FedListener(), (RECONNECTED,), 1000)


@pytest.mark.parametrize("buffer", [0, -1, True, 1.5, None])
def test_a_buffer_holds_at_least_one(buffer: Any) -> None:
    with pytest.raises(ValueError, match="buffer"):
        Notifications(FedListener(), ("a",), buffer)


async def test_a_subscription_that_fails_to_begin_leaves_nothing_behind() -> None:
    listener = Listener(Hub(), None, "nothing to listen on", 10, "token")
    with pytest.raises(BindError, match="nothing to listen on"):
        async with Notifications(listener, ("a",), 1000):
            pass
    assert listener.hub.channels() == set()
