"""Who in this process waits for what: the sinks of each channel."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from alkstore_sa._processes import forget_after_fork
from alkstore_sa._stop import wait_for_event

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

__all__ = ["Hub", "Sink", "Wakeup"]


class Sink(Protocol):
    """What a hub hands notifications to. Nothing here may block or raise."""

    def receive(self, channel: str, payload: str) -> None:
        """Take a notification."""

    def established(self) -> None:
        """Learn that notifications arrive from now on."""

    def reconnected(self) -> None:
        """Learn that some may have been missed, and that they arrive again from now on."""

    def failed(self, error: Exception) -> None:
        """Learn that they will not arrive any more."""


class Hub:
    """The sinks of each channel. Handing out is safe in any thread without a lock: each change makes a new tuple."""

    def __init__(self) -> None:
        self.forget_after_fork()
        forget_after_fork(self)

    def forget_after_fork(self) -> None:
        """Start anew: the sinks of the parent process are its own, and so are their event loops."""
        self._lock = threading.Lock()
        self._sinks: dict[str, tuple[Sink, ...]] = {}
        self._gone: deque[tuple[set[str], Sink]] = deque()

    @contextmanager
    def subscribed(self, channels: Iterable[str], sink: Sink) -> Generator[None]:
        """Hand what arrives on `channels` to `sink` for the time of the block."""
        channels = set(channels)
        with self._lock:
            self._drop_gone()
            for channel in channels:
                self._sinks[channel] = (*self._sinks.get(channel, ()), sink)
        try:
            yield
        finally:
            # This may be the garbage collector's work, in the midst of a change in the same thread: do not wait for it.
            self._gone.append((channels, sink))
            if self._lock.acquire(blocking=False):
                try:
                    self._drop_gone()
                finally:
                    self._lock.release()

    def _drop_gone(self) -> None:
        """Remove the sinks whose blocks have ended; with the lock held."""
        while self._gone:
            channels, sink = self._gone.popleft()
            for channel in channels & self._sinks.keys():
                left = tuple(other for other in self._sinks[channel] if other is not sink)
                if left:
                    self._sinks[channel] = left
                else:
                    del self._sinks[channel]

    def channels(self) -> set[str]:
        """Return the channels that have sinks."""
        with self._lock:
            self._drop_gone()
            return set(self._sinks)

    def on(self, channel: str) -> tuple[Sink, ...]:
        """Return the sinks of one channel."""
        return self._sinks.get(channel, ())

    def sinks(self, channels: Iterable[str]) -> list[Sink]:
        """Return the sinks of these channels, each once."""
        return list({id(sink): sink for channel in channels for sink in self.on(channel)}.values())

    def everyone(self) -> list[Sink]:
        """Return the sinks of all channels, each once."""
        return self.sinks(self.channels())

    def wake(self, channel: str) -> None:
        """Wake who waits in this process, for something that has been committed in this process."""
        for sink in self.on(channel):
            sink.receive(channel, "")


class Wakeup:
    """A sink for a loop that has work to look for: however many wakes arrive, they are one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.woken: bool = False
        """Whether there was a wake since the last `clear`."""

    def set(self) -> None:
        """Wake the loop, from any thread, also when its event loop is no more."""
        self.woken = True
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._event.set()
        else:
            self.set_from_anywhere()

    def set_from_anywhere(self) -> None:
        """Wake the loop, also from a signal handler, which interrupts the very thread that sleeps in the loop."""
        self.woken = True
        with suppress(RuntimeError):  # that loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Forget wakes; called before the look for work, so that a wake during the look counts."""
        self.woken = False
        self._event.clear()

    async def wait(self, seconds: float | None) -> None:
        """Sleep until there is a wake, at most `seconds`."""
        await wait_for_event(self._event, seconds)

    def receive(self, channel: str, payload: str) -> None:  # noqa: ARG002  (a wake says no more than that it came)
        """Wake the loop."""
        self.set()

    def established(self) -> None:
        """Wake the loop: what was committed before this was not announced to it."""
        self.set()

    def reconnected(self) -> None:
        """Wake the loop: it may have missed a wake."""
        self.set()

    def failed(self, error: Exception) -> None:
        """Go on: the loop looks from time to time anyway."""
