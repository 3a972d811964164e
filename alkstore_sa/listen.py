"""Notifications for the application: what `Store.listen` hands out."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alkstore_sa._channels import RECONNECTED, user_channel
from alkstore_sa._rules import check_count
from alkstore_sa.errors import Lagged

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from alkstore_sa._listener import Listener

__all__ = ["Notification", "Notifications"]


@dataclass(frozen=True)
class Notification:
    """What was sent with `notify`, or with NOTIFY by any other client."""

    channel: str
    payload: str

    @property
    def is_reconnect(self) -> bool:
        """Whether this is the store's own word that the connection was lost for a time.

        What was notified meanwhile is lost: read again whatever the notifications are about.
        """
        return self.channel == RECONNECTED


class Notifications:
    """A subscription to channels: `async with store.listen("prices") as notifications: async for ... in notifications`.

    It has a buffer of its own. When that is full, further notifications are dropped and counted, and nobody else is
    held up; the iteration then raises `Lagged(missed)` where the gap is, once, and may be gone on with.
    """

    def __init__(self, listener: Listener, channels: tuple[str, ...], buffer: int) -> None:
        if not channels:
            raise ValueError("listen needs at least one channel")
        self._listener = listener
        self._names = {user_channel(name): name for name in channels}
        self._size = check_count(buffer, "buffer")
        self._buffer: deque[Notification] = deque()
        self._missed = 0
        self._was_reconnected = False
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()
        self._subscription = ExitStack()

    async def __aenter__(self) -> Self:
        with ExitStack() as subscription:
            subscription.enter_context(self._listener.hub.subscribed(self._names, self))
            subscription.enter_context(self._listener.closed.notifying(self._wake_from_anywhere()))
            await self._listener.listening_to(set(self._names))
            self._subscription = subscription.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscription.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notification:
        while True:
            self._arrived.clear()
            if self._buffer:
                return self._buffer.popleft()
            if self._missed:
                missed, self._missed = self._missed, 0
                raise Lagged(missed)
            if self._was_reconnected:
                self._was_reconnected = False
                return Notification(RECONNECTED, "")
            if self._failure is not None:
                raise self._failure
            if self._listener.closed.cancelled:
                raise StopAsyncIteration
            await self._arrived.wait()

    # -- what the hub calls --------------------------------------------------------------------------------------------

    def receive(self, channel: str, payload: str) -> None:
        """Take a notification into the buffer, or count it as missed."""
        if self._has_room():
            self._buffer.append(Notification(self._names[channel], payload))
        else:
            self._missed += 1
        self._arrived.set()

    def established(self) -> None:
        """Learn that notifications arrive from now on."""

    def reconnected(self) -> None:
        """Take the word that some may have been missed, in its place, for which there is always room."""
        if self._has_room():
            self._buffer.append(Notification(RECONNECTED, ""))
        else:
            self._was_reconnected = True
        self._arrived.set()

    def failed(self, error: Exception) -> None:
        """Learn that there will be no more."""
        self._failure = error
        self._arrived.set()

    def _has_room(self) -> bool:
        """Tell whether the buffer takes one more, which must not overtake what is waiting behind it."""
        return len(self._buffer) < self._size and not self._missed and not self._was_reconnected

    def _wake_from_anywhere(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrived.set)

        return wake
