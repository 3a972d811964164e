"""The outgoing side of wakes: sent after the commit, by somebody else than the caller, and no more than needed.

A NOTIFY within a transaction makes all such transactions of a database commit one after another. So the transaction
that carries a job does not carry the wake. When it has been committed, the wake is handed out in this process at once,
and to the others by a notification from a connection of the engine's own pool: sent by a task of the event loop where
the engine is an async one, else by a thread. The first commit of a burst is announced at once, those that follow
together, a little later, so that the last one is never left out. A wake is a hint: nothing that goes wrong here reaches
the caller, and a process that dies in between costs one re-poll.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Engine
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.util import greenlet_spawn

from alkstore_sa._connect import Executor, is_autocommit
from alkstore_sa._failures import is_transient
from alkstore_sa._processes import flush_at_exit, forget_after_fork
from alkstore_sa._rules import error_text
from alkstore_sa._tasks import KeptTask
from alkstore_sa.statements import WAKE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Dialect, Pool

__all__ = ["Announcement", "Waker"]

SHORTEST_GAP: Final = 0.003
LONGEST_GAP: Final = 0.02
COST_FACTOR: Final = 10.0
"""The time between two announcements, in seconds: ten times what the last one took, between these bounds."""
RETRIES: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, None)
"""How long to wait after each failure, in seconds; then the wake is given up."""
FLUSH_TIME: Final = 2.0
"""How long closing a store, or the end of the interpreter, waits for wakes to be sent, in seconds."""
IDLE_TIME: Final = 10.0
LINGER_TIME: Final = 1.0
LAST_WORD_TIME: Final = 5.0
"""How old a wake may be, in seconds, that a closed event loop has left to be sent at the end of the interpreter."""
IDLE_WAITS: Final = (0.003, 0.006, 0.012, 0.024)

logger: Final = logging.getLogger("alkstore_sa.waker")


class Waker:
    """What announces the commits of one store.

    Args:
        local: wakes who waits in this process.
    """

    def __init__(self, local: Callable[[str], None]) -> None:
        self.token: str = secrets.token_hex(8)
        """The payload of this store's wakes, by which it knows them again."""
        self._local = local
        self._senders: WeakKeyDictionary[Dialect, _Sender] = WeakKeyDictionary()

    def wake(self, channel: str, engine: Engine | None) -> None:
        """Announce that what waits on `channel` has something to look for; never raises, never blocks.

        `engine` is what the announced rows were committed through; None where other processes cannot see them yet.
        """
        try:
            self._local(channel)
            if engine is not None:
                self._sender(engine).send(channel)
        except Exception:  # what it announces is committed, so nothing may reach the caller, who would take it for lost
            logger.warning("a wake was not sent", exc_info=True)

    def _sender(self, engine: Engine) -> _Sender:
        """Return what sends through this engine's pool, which engines with other options share, like the dialect."""
        sender = self._senders.get(engine.dialect)
        if sender is None:
            kind = _TaskSender if engine.dialect.is_async else _ThreadSender
            sender = self._senders.setdefault(engine.dialect, kind(engine, self.token))
        return sender

    def flush(self) -> None:
        """Wait until the threads have sent everything, at most 2 seconds each."""
        for sender in list(self._senders.values()):
            sender.flush()

    async def flush_async(self) -> None:
        """Wait until the tasks of this event loop have too."""
        for sender in list(self._senders.values()):
            await sender.flush_async()


class Announcement(NamedTuple):
    """What to say when something has been committed: to whom, and by which store."""

    waker: Waker
    channel: str

    def send(self, engine: Engine | None) -> None:
        """Say it: see `Waker.wake`."""
        self.waker.wake(self.channel, engine)


class _Sender(ABC):
    """Sends the wakes that go through one engine's pool."""

    def __init__(self, engine: Engine, token: str) -> None:
        self._engine = engine
        self._executor = Executor(engine)
        self._token = token
        self.forget_after_fork()
        forget_after_fork(self)
        flush_at_exit(self)

    def forget_after_fork(self) -> None:
        """Start anew: what the parent process has to announce, the parent announces."""
        self._changed = threading.Condition()
        self._pending: set[str] = set()
        self._pool: Pool = self._engine.pool
        self._noted_at = 0.0
        self._thread: threading.Thread | None = None

    @abstractmethod
    def send(self, channel: str) -> None:
        """Send it soon."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until the thread has sent what it has to, at most 2 seconds."""

    async def flush_async(self) -> None:
        """Do what `flush` does, without blocking the event loop."""
        await asyncio.to_thread(self.flush)

    def flush_at_exit(self) -> None:
        """Send what is pending, within a bounded time. The thread is a daemon: it still runs at this time."""
        self.flush()

    def _note(self, channel: str) -> None:
        """Note what is to be sent, and the pool that its commit went through; with the lock held."""
        self._pending.add(channel)
        self._pool = self._engine.pool
        self._noted_at = time.monotonic()

    def _take(self) -> set[str]:
        """Return what is to be sent; with the lock held."""
        channels, self._pending = self._pending, set()
        return channels

    def _start_thread(self, target: Callable[[], None]) -> None:
        """Start the thread; with the lock held. A daemon: it is waited for at exit, but not longer than is bearable."""
        thread = threading.Thread(target=target, name="alkstore-waker", daemon=True)
        thread.start()
        self._thread = thread

    def _notify(self, executor: Executor, channels: set[str]) -> None:
        def operation(connection: Connection) -> None:
            connection.execute(WAKE, {"channels": sorted(channels), "token": self._token})
            if self._engine.pool is not self._pool and is_autocommit(connection):
                connection.invalidate()  # the application has disposed of its pool meanwhile: leave none in a new one

        pool = executor.engine.pool
        executor.run(operation)
        if executor.engine.pool is not pool:
            pool.dispose()  # likewise: the connection was given back to a pool that nobody looks after any more

    def _private_engine(self) -> Engine:
        """Return an engine of the same kind, with no connection in common."""
        return Engine(self._engine.pool.recreate(), self._engine.dialect, self._engine.url)

    def _pause(self, error: Exception, wait: float | None) -> float | None:
        """Return how long to wait before the next try; None when there is to be none, as a late wake is of no use."""
        if wait is not None and is_transient(error):
            return wait
        logger.warning("a wake was not sent, so its job waits for the next look: %s", error_text(error))
        return None


class _ThreadSender(_Sender):
    """Sends from a thread, through a plain engine. The thread ends when it has had nothing to do for 10 seconds."""

    def forget_after_fork(self) -> None:
        super().forget_after_fork()
        self._sending = False

    def send(self, channel: str) -> None:
        with self._changed:
            self._note(channel)
            if self._thread is None:
                self._start_thread(self._run)
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._pending or self._sending), FLUSH_TIME)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._pending, IDLE_TIME):
                    self._thread = None
                    return
                channels, self._sending = self._take(), True
            begun = time.monotonic()
            self._deliver(channels)
            time.sleep(_gap(begun))

    def _deliver(self, channels: set[str]) -> None:
        for wait in RETRIES:
            try:
                if isinstance(self._engine.pool, (QueuePool, NullPool)):
                    self._notify(self._executor, channels)
                else:  # another pool might give the very connection that a session is using
                    private = self._private_engine()
                    try:
                        self._notify(Executor(private), channels)
                    finally:
                        private.dispose()
            except Exception as error:  # noqa: BLE001  (nobody waits for it, and later wakes must be sent)
                pause = self._pause(error, wait)
                if pause is None:
                    return
                time.sleep(pause)
            else:
                return


class _TaskSender(_Sender):
    """Sends from a task of the event loop in which the commit was made, through an async engine.

    The task opens no connection: that takes a while, and a loop that is ended or paused meanwhile leaves the server
    with half of one. It waits a little for the pool to have an idle one, and queues for one in an exhausted pool.
    Otherwise, also without a pool, after a dispose, or when the loop is being ended, wakes go from a thread, over a
    connection that it opens, and closes when it has had nothing to do for a second.
    """

    def forget_after_fork(self) -> None:
        super().forget_after_fork()
        self._task: asyncio.Task[None] | None = None
        self._taken: set[str] = set()
        self._hurry = False

    def send(self, channel: str) -> None:
        loop = asyncio.get_running_loop()
        with self._changed:
            self._note(channel)
            if self._thread is not None or not isinstance(self._pool, QueuePool):
                self._hand_over()
            elif not self._is_running(loop):
                self._take_back()
                # In a context of its own: what a request keeps in its context variables is none of its business.
                start = partial(KeptTask, self._run(), FLUSH_TIME, loop=loop, name="alkstore-waker")
                self._task = contextvars.Context().run(start)

    async def flush_async(self) -> None:
        loop = asyncio.get_running_loop()
        with self._changed:
            if not self._is_running(loop):
                self._take_back()
                self._hand_over()
            task = self._task
        if task is not None and task.get_loop() is loop:
            task.cancel()  # which leaves it two seconds
            await asyncio.wait({task}, timeout=2 * FLUSH_TIME)
        if self._thread is not None:
            await asyncio.to_thread(self.flush)

    def flush_at_exit(self) -> None:
        self.flush()
        with self._changed:
            self._take_back()
        if self._pending and time.monotonic() - self._noted_at < LAST_WORD_TIME:
            self._deliver_alone([None])  # a loop was closed before its task came to it, and no thread can start now

    def flush(self) -> None:
        """Wait until the thread has sent everything and closed its connection, at most 2 seconds."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None, FLUSH_TIME)
            self._hurry = False

    def _is_running(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether there is a task that will see what is pending: one on `loop`, or on another that is running."""
        if self._task is None or self._task.done():
            return False
        return self._task.get_loop() is loop or self._task.get_loop().is_running()

    async def _run(self) -> None:
        try:
            while channels := self._take_in_task():
                begun = time.monotonic()
                if not await self._may_send():
                    return
                await self._deliver(channels)
                self._taken = set()
                await asyncio.sleep(_gap(begun))
        finally:
            with self._changed:
                self._take_back()
                self._hand_over()

    def _take_in_task(self) -> set[str]:
        """Return what is to be sent; when that is nothing, or nothing for this event loop, the task is over."""
        with self._changed:
            channels = self._taken = self._take() if self._engine.pool is self._pool else set[str]()
            if not channels and self._task is asyncio.current_task():
                self._task = None
        return channels

    def _take_back(self) -> None:
        """Have sent again what a task has taken and not sent; with the lock held."""
        self._pending |= self._taken
        self._taken = set()

    def _hand_over(self) -> None:
        """Have the thread send what is pending; with the lock held."""
        if self._pending and self._thread is None:
            self._start_thread(self._deliver_alone)
        self._changed.notify_all()

    async def _deliver(self, channels: set[str]) -> None:
        for wait in RETRIES:
            try:
                await greenlet_spawn(self._notify, self._executor, channels)
            except Exception as error:  # noqa: BLE001  (nobody waits for it, and later wakes must be sent)
                pause = self._pause(error, wait)
                if pause is None:
                    return
                await asyncio.sleep(pause)
            else:
                return

    async def _may_send(self) -> bool:
        """Tell whether the pool gives a connection without opening one; wait a little for it to have an idle one."""
        pool = self._engine.pool
        if not isinstance(pool, QueuePool):
            return False
        for wait in IDLE_WAITS:
            if pool.checkedin():
                return True
            await asyncio.sleep(wait)
        exhausted: bool = 0 <= pool._max_overflow <= pool.overflow()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return exhausted or pool.checkedin() > 0

    def _deliver_alone(self, retries: Sequence[float | None] = RETRIES) -> None:
        """Send what is pending over a connection that belongs to no other event loop and no pool."""
        loop = _LoopAlone()
        private = self._private_engine()
        executor = Executor(private)

        def deliver(channels: set[str]) -> None:
            delivery = greenlet_spawn(self._notify, executor, channels)
            loop.run_until_complete(asyncio.wait_for(delivery, FLUSH_TIME))

        try:
            while channels := self._take_in_thread(linger=retries is RETRIES):
                begun = time.monotonic()
                for wait in retries:
                    try:
                        deliver(channels)
                    except Exception as error:  # noqa: BLE001  (nobody waits for it, and later wakes must be sent)
                        pause = self._pause(error, wait)
                        if pause is None:
                            break
                        time.sleep(pause)
                    else:
                        break
                time.sleep(_gap(begun))
            loop.run_until_complete(greenlet_spawn(private.dispose))
        finally:
            loop.close()
            with self._changed:
                self._thread = None
                self._hand_over()  # what has come in these moments

    def _take_in_thread(self, *, linger: bool) -> set[str]:
        """Return what is to be sent, waiting for it for a second; when that is nothing, the thread is over."""
        end = time.monotonic() + LINGER_TIME
        with self._changed:
            while (
                linger
                and not self._pending
                and not self._hurry
                and self._engine.pool is self._pool
                and time.monotonic() < end
            ):
                self._changed.wait(LINGER_TIME / 20)
            return self._take()


class _LoopAlone(asyncio.SelectorEventLoop):
    """An event loop that looks up names by itself: at exit no thread can be started for it."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        return socket.getaddrinfo(host, port, **options)


def _gap(begun: float) -> float:
    """Return how long to wait after an announcement that has begun at that time."""
    return min(max(SHORTEST_GAP, COST_FACTOR * (time.monotonic() - begun)), LONGEST_GAP)
