"""Telling a long-running loop to stop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StopToken", "wait_for_event"]


async def wait_for_event(event: asyncio.Event, timeout: float | None) -> None:
    """Wait until `event` is set, or set it after `timeout` seconds.

    `asyncio.wait_for` would do, but before Python 3.12 it swallows a cancellation that comes together with the event.
    """
    timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


class StopToken:
    """Asks the loops that were given it to stop: from asyncio, from another thread, or from a signal handler.

    It is cancelled once and for good, and may be given to any number of loops on any event loop.
    """

    def __init__(self) -> None:
        self._cancelled = False
        # A signal handler may interrupt the very thread that holds the lock, so the lock is re-entrant.
        self._lock = threading.RLock()
        self._callbacks: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has been called."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask the loops to stop, and return at once; they finish what they are at."""
        with self._lock:
            self._cancelled = True
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            callback()

    async def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the token is cancelled, at most `timeout` seconds; return whether it is."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stopped.set)

        with self.notifying(wake):
            await wait_for_event(stopped, timeout)
        return self._cancelled

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Do what `wait` does in a thread without an event loop, blocking it."""
        # A SimpleQueue, since its put may interrupt its get in the same thread, as a signal handler does.
        stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self.notifying(lambda: stopped.put(None)), contextlib.suppress(queue.Empty):
            stopped.get(timeout=timeout)
        return self._cancelled

    def notifying(self, callback: Callable[[], None]) -> _Registration:
        """Have `callback` called once, by whoever cancels, or at once if that has happened; a context manager."""
        return _Registration(self, callback)

    def _add(self, key: object, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._cancelled:
                self._callbacks[key] = callback
                return
        callback()

    def _remove(self, key: object) -> None:
        with self._lock:
            self._callbacks.pop(key, None)


class _Registration:
    def __init__(self, token: StopToken, callback: Callable[[], None]) -> None:
        self._token = token
        self._callback = callback

    def __enter__(self) -> None:
        self._token._add(self, self._callback)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def __exit__(self, *_: object) -> None:
        self._token._remove(self)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
