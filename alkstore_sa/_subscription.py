"""The loop behind `Stream.subscribe`: reads events and hands them out one by one, under the consumer's lease."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from alkstore_sa._failures import is_transient
from alkstore_sa._pace import Pace
from alkstore_sa._streams import Hold
from alkstore_sa._tasks import finish_within, kept, succeeded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from datetime import timedelta

    from sqlalchemy import Connection

    from alkstore_sa._listener import Listener
    from alkstore_sa._runner import AsyncRunner
    from alkstore_sa._streams import StreamCore

__all__ = ["Consumer"]

T = TypeVar("T")
E = TypeVar("E")

GOODBYE_TIME: Final = 2.0

logger: Final = logging.getLogger("alkstore_sa.stream")


class Consumer:
    """One consumer in this process: its lease, and how far it has come.

    An event is done when the next one is asked for. What is done is saved with each page, when there is nothing to
    read, at each renewal of the lease, and at the end.
    """

    def __init__(
        self,
        core: StreamCore,
        runner: AsyncRunner,
        listener: Listener,
        name: str,
        page: int,
        poll: float,
        ttl: timedelta,
    ) -> None:
        self._core = core
        self._runner = runner
        self._listener = listener
        self.name = name
        self._page = page
        self._pace = Pace(poll)
        self._ttl = ttl
        self._hold: Hold | None = None
        self._done = 0
        self._saved = 0
        self._until = 0.0
        self._lease_of_another: timedelta | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._in_body = False
        self._left = asyncio.Event()

    async def events(self, hand_out: Callable[[Any, int], E]) -> AsyncGenerator[E]:
        """Yield the events behind the consumer's offset as they come, until the store is closed.

        `hand_out` makes an event of a row and the number of the lease.
        """
        closed = self._listener.closed
        with self._listener.wakes(self._core.announcement.channel) as wakeup, self._listener.closing(self.close):
            try:
                while not closed.cancelled:
                    wakeup.clear()
                    try:
                        rows = await kept(self._look(), GOODBYE_TIME, drop=self._leave, keep=self._listener.keep)
                        pause = self._pace.pause(self._lease_of_another)
                    except Exception as error:
                        if not is_transient(error):
                            raise
                        rows, pause = [], self._pace.back_off()
                        logger.warning(
                            "consumer %s of stream %s: next try in %.2f s: %s", self.name, self._core.name, pause, error
                        )
                    for row in rows:
                        hold = self._held()
                        if hold is None or closed.cancelled:
                            break
                        self._in_body = True
                        yield hand_out(row, hold.lease)
                        self._in_body = False
                        self._done = row.offset
                    if not rows:
                        await wakeup.wait(pause)
            finally:
                self._in_body = False
                await self._briefly(self._leave())

    async def close(self) -> None:
        """Save what is done, and wait until the loop has ended unless the caller's body is at an event."""
        if self._in_body:
            await self._briefly(self._keep())
        if not self._in_body:  # by now: a body that was broken off is noticed a little later
            await self._briefly(self._left.wait())

    async def _look(self) -> list[Any]:
        """Return the next page; none where another process holds the lease. At the end of events save what is done."""
        if self._held() is None and not await self._take():
            return []
        self._lease_of_another = None
        if self._done > self._saved:
            await self._keep()
        rows = await self._run(self._core.read(self._done, self._page))
        if rows:
            self._pace.found()
        return rows

    def _held(self) -> Hold | None:
        """Return the lease while it is ours: by our own clock, which began before the server's."""
        return self._hold if time.monotonic() < self._until else None

    async def _take(self) -> bool:
        await self._end_keeper()
        self._hold = None
        begun = time.monotonic()
        taken = await self._run(self._core.take(self.name, self._ttl))
        if not isinstance(taken, Hold):
            self._lease_of_another = taken
            return False
        self._hold = taken
        self._done = self._saved = taken.offset
        self._until = begun + self._ttl.total_seconds()
        self._keeper = asyncio.create_task(self._keep_up(), name="alkstore-consumer")
        return True

    async def _keep(self) -> None:
        """Renew the lease and save what is done."""
        if self._hold is None:
            return
        begun, done = time.monotonic(), self._done
        outcome = await self._run(self._core.keep(self.name, self._hold.lease, done, self._ttl))
        if outcome == "kept":
            self._saved = done
            self._until = begun + self._ttl.total_seconds()
        elif outcome != "held":
            logger.warning("consumer %s of stream %s: its lease was lost", self.name, self._core.name)
            self._until = 0.0

    async def _keep_up(self) -> None:
        """Renew the lease while the caller's body is at an event."""
        while True:
            await asyncio.sleep(self._ttl.total_seconds() / 3)
            try:
                await self._keep()
            except Exception as error:
                if not is_transient(error):
                    raise
                logger.warning("consumer %s of stream %s: not renewed: %s", self.name, self._core.name, error)

    async def _leave(self, _: object = None) -> None:
        """Save what is done and give the lease back, also one that was taken when nobody waited for it any more."""
        try:
            await self._end_keeper()
            hold, self._hold = self._hold, None
            if hold is not None:
                leave = self._core.leave(self.name, hold.lease, self._done)
                await self._runner.run(leave, announce=self._core.announcement)
        finally:
            self._left.set()

    async def _end_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
            if not keeper.cancelled() and (error := keeper.exception()) is not None:
                logger.warning("consumer %s of stream %s: not renewed: %s", self.name, self._core.name, error)

    async def _run(self, operation: Callable[[Connection], T]) -> T:
        return await self._runner.run(self._core.store.checked(operation))

    async def _briefly(self, goodbye: Coroutine[Any, Any, Any]) -> None:
        """Do something at the end, for two seconds at most; a lease that is not given back lapses."""
        if not succeeded(await finish_within(GOODBYE_TIME, goodbye, self._listener.keep)):
            logger.warning("consumer %s of stream %s: what is done was not saved", self.name, self._core.name)
