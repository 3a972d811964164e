"""The incoming side of notifications: one listening connection for a store, outside its pool, and who hears from it.

The connection is opened for the first subscriber and kept until the store is closed. While it is lost, a new one is
tried for, first after 50 ms, then after twice as long each time, up to 2 s. It listens to everything again before
anybody is told to read again. Loops that look for work need none of this to be right: to them a wake is a hint, and
they look from time to time whatever arrives.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from alkstore_sa._failures import NO_SUCH_STATEMENT, sqlstate
from alkstore_sa._hub import Wakeup
from alkstore_sa._processes import forget_after_fork
from alkstore_sa._rules import ENGINE_PREFIX, error_text
from alkstore_sa._stop import StopToken, wait_for_event
from alkstore_sa._wire import Wire, WireLost, open_wire
from alkstore_sa.errors import BindError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from sqlalchemy.ext.asyncio import AsyncEngine

    from alkstore_sa._hub import Hub

__all__ = ["DEFAULT_LISTEN_TIMEOUT", "Listener"]

DEFAULT_LISTEN_TIMEOUT: Final = 10.0
FIRST_RECONNECT: Final = 0.05
LAST_RECONNECT: Final = 2.0
PROBE_TIME: Final = 2.0
KEPT_TIME: Final = 2.0

POOLED: Final = (
    "notifications do not get through to this store: between it and the server stands a pooler that gives each"
    " transaction another connection, such as PgBouncer in transaction mode. Give the store a direct address to listen"
    " on, as in Store(engine, listen_engine=create_async_engine(...)), or say Store(engine, wakes='poll')"
)
CLOSED: Final = "this store is closed, so it does not listen any more"

logger: Final = logging.getLogger("alkstore_sa.listener")

_inherited: list[object] = []
"""What a child process has been born with and must not touch."""


class _Waiter(NamedTuple):
    """A subscriber who waits until its channels are listened to."""

    channels: set[str]
    done: asyncio.Future[None]


class Listener:
    """What a store's subscribers hear from.

    Args:
        hub: who hears what.
        engine: what to open the connection with; None means that there is nothing to listen on.
        refusal: why there is nothing.
        timeout: within how many seconds a connection that went silent is noticed.
        token: what marks this store's own wakes, which its loops have heard of already.
    """

    def __init__(self, hub: Hub, engine: AsyncEngine | None, refusal: str, timeout: float, token: str) -> None:
        self.hub: Hub = hub
        self.closed: StopToken = StopToken()
        self._engine = engine
        self._refusal = refusal
        self._timeout = timeout
        self._token = token
        self._forget()
        forget_after_fork(self)

    def _forget(self) -> None:
        """Start anew, with no connection and no loop."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._listening: set[str] = set()
        self._waiters: list[_Waiter] = []
        self._goodbyes: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._kept: set[asyncio.Task[Any]] = set()

    def forget_after_fork(self) -> None:
        """Leave everything to the parent process: its connection, its loop, its subscribers."""
        _inherited.append(self._task)  # to collect it would close what is the parent's
        if not self.closed.cancelled:
            self.closed = StopToken()
        self._forget()

    @contextmanager
    def wakes(self, *channels: str) -> Generator[Wakeup]:
        """Yield what is woken by notifications on `channels`, by the store's closing, and when they begin to arrive.

        It does not wait for a connection, and needs none.
        """
        wakeup = Wakeup()
        with self.hub.subscribed(channels, wakeup), self.closed.notifying(wakeup.set_from_anywhere):
            if self._engine is not None:
                self._start()
            yield wakeup

    async def listening_to(self, channels: set[str]) -> None:
        """Wait until notifications on `channels`, which have sinks by now, arrive.

        Raises:
            BindError: this store cannot listen.
            DBAPIError, OSError: there is no connection to be had now.
        """
        if self.closed.cancelled:
            raise BindError(CLOSED)
        if self._engine is None:
            raise BindError(self._refusal)
        self._start()
        if channels <= self._listening:
            return
        waiter = _Waiter(channels, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.done
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)

    @contextmanager
    def closing(self, goodbye: Callable[[], Coroutine[Any, Any, None]]) -> Generator[None]:
        """Have `close` call and await `goodbye`, which is bounded in time, if it comes during the block."""
        self._goodbyes.append(goodbye)
        try:
            yield
        finally:
            with suppress(ValueError):
                self._goodbyes.remove(goodbye)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Have `close` wait for a task that may outlive who has started it, so that it uses no engine after that."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def close(self) -> None:
        """End every loop of the store and the connection, within a few seconds."""
        self.closed.cancel()
        self._answer(BindError(CLOSED))
        await asyncio.gather(*(goodbye() for goodbye in self._goodbyes))
        kept = {task for task in self._kept if task.get_loop() is asyncio.get_running_loop()}
        if kept:
            await asyncio.wait(kept, timeout=KEPT_TIME)
        task, self._task = self._task, None
        if task is None or task.done() or task.get_loop().is_closed():
            return
        if task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait({task})
        else:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _start(self) -> None:
        """See to it that the connection is being looked after, and that it learns of new channels."""
        loop = asyncio.get_running_loop()
        if self._task is not None and not self._task.done() and not self._task.get_loop().is_closed():
            if self._task.get_loop() is not loop:
                raise RuntimeError(
                    "this store is in use on another event loop: make a store, and an engine, for each of them"
                )
            if not self.hub.channels() <= self._listening:
                self._changed.set()
        elif not self.closed.cancelled:
            self._forget()
            self._task = loop.create_task(self._run(), name="alkstore-listener")

    async def _run(self) -> None:
        """Keep a connection for as long as the store is open."""
        wait, served = FIRST_RECONNECT, False
        while self._engine is not None:
            try:
                wire = await open_wire(self._engine, self._receive, self._changed.set, self._timeout / 2)
                try:
                    await self._refuse_pooler(wire, self._engine)
                    wait, first, served = FIRST_RECONNECT, not served, True
                    await self._serve(wire, first=first)
                finally:
                    self._listening.clear()
                    await wire.close()
            except BindError as error:
                self._give_up(error)
            except Exception as error:  # noqa: BLE001  (whatever it is: who waits is told, loops look without it)
                self._answer(error)
                logger.warning("cannot listen, next try in %.2f s: %s", wait, error_text(error))
                await asyncio.sleep(wait)
                wait = min(wait * 2, LAST_RECONNECT)

    async def _serve(self, wire: Wire, *, first: bool) -> None:
        """Listen to what has sinks, until the connection is lost."""
        next_check = time.monotonic() + self._timeout / 2
        while True:
            self._changed.clear()
            wanted = self.hub.channels()
            fresh = wanted - self._listening
            for channel in fresh:
                await wire.listen(channel)
                self._listening.add(channel)
            for sink in self.hub.sinks(fresh):
                sink.established() if first else sink.reconnected()
            for channel in self._listening - wanted:
                self._listening.discard(channel)  # first: who comes just now must not believe that it is listened to
                await wire.unlisten(channel)
            first = True
            self._answer(None)
            await wait_for_event(self._changed, max(0.0, next_check - time.monotonic()))
            if wire.lost:
                raise WireLost("the server has closed the listening connection")
            if time.monotonic() >= next_check:
                await wire.check()
                next_check = time.monotonic() + self._timeout / 2

    async def _refuse_pooler(self, wire: Wire, engine: AsyncEngine) -> None:
        """Raise `BindError` if notifications do not get through to `wire`.

        A pooler answers with another backend than the one that the connection was opened to. One that keeps sessions
        together does so too, and lets notifications through, so try: what a second connection sends must arrive. What
        the first one sends to itself would arrive in either case.
        """
        try:
            if await wire.check():
                return
            probe = f"{ENGINE_PREFIX}probe_{secrets.token_hex(8)}"
            arrived = Wakeup()
            with self.hub.subscribed([probe], arrived):
                await wire.listen(probe)
                sender = await open_wire(engine, _ignore, _ignore, self._timeout / 2)
                try:
                    await sender.notify(probe)
                    await arrived.wait(PROBE_TIME)
                finally:
                    await sender.close()
                if arrived.woken:
                    await wire.unlisten(probe)
                    return
        except WireLost as error:
            if sqlstate(error.__cause__) not in NO_SUCH_STATEMENT:
                raise
            raise BindError(POOLED) from error
        raise BindError(POOLED)

    def _receive(self, channel: str, payload: str) -> None:
        if payload != self._token:  # those were heard of in this process when they were sent
            for sink in self.hub.on(channel):
                sink.receive(channel, payload)

    def _answer(self, error: Exception | None) -> None:
        """Tell who waits for its channels that they are listened to, or that they are not."""
        for waiter in self._waiters:
            if waiter.done.done():
                continue
            if error is not None:
                waiter.done.set_exception(error)
            elif waiter.channels <= self._listening:
                waiter.done.set_result(None)

    def _give_up(self, error: BindError) -> None:
        logger.warning("this store polls: %s", error)
        self._engine, self._refusal = None, str(error)
        self._answer(error)
        for sink in self.hub.everyone():
            sink.failed(error)


def _ignore(*_: str) -> None:
    """Take no notice of what a connection that does not listen has to say."""
