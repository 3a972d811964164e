"""Handles on claimed jobs: what a claim hands out, and how it is brought to an end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, overload

from alkstore_sa._jobs import Held, lease_lost
from alkstore_sa._session import in_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine
    from datetime import datetime

    from sqlalchemy.orm import Session

    from alkstore_sa._jobs import Claim, QueueCore, Renewal
    from alkstore_sa._rules import Duration
    from alkstore_sa._runner import AsyncRunner, Runner
    from alkstore_sa._types import AnySession, AnySyncSession, AsyncAnySession

__all__ = ["ClaimedJob", "JobHandle", "SyncJobHandle", "ThreadJobHandle"]

T = TypeVar("T")

OUTLIVED: Final = "the event loop that this job was claimed on is not running any more: the job is left to its lease"


class ClaimedJob(Generic[T]):
    """A claimed job: the row's values at the claim, and what both kinds of handle can do with them.

    The handle names one claim, by its lease. Once that claim is over, be it through the handle itself or because its
    lease lapsed and another claim came, every operation of the handle changes nothing and raises `LeaseLost`.
    """

    def __init__(self, core: QueueCore, claim: Claim) -> None:
        row = claim.row
        self._core = core
        self._claim = claim
        self._held = Held(row.id, row.lease)
        self._document: str = row.payload
        self._backoff_base: timedelta = timedelta(seconds=row.backoff_base)
        self.id: int = row.id
        """Stable for the life of the job: what a receiver recognises a repeated delivery by."""
        self.queue: str = row.queue
        self.payload: T = claim.payload
        self.headers: dict[str, Any] = claim.headers
        self.priority: int = row.priority
        self.attempts: int = row.attempts
        """How often the job has been claimed, this claim included."""
        self.max_attempts: int = row.max_attempts
        self.run_at: datetime = row.run_at
        self.created_at: datetime = row.created_at
        self.lease_expires_at: datetime = row.lease_expires_at
        """When the lease lapses, by the database's clock; `heartbeat` moves it."""
        self.last_error: str | None = row.last_error
        """What the last attempt failed with, None at the first."""
        self.finished: bool = False
        """Whether this handle has ended its claim, by ack, retry, fail or release; `ack_tx` counts at the call, since
        what becomes of its transaction the handle does not know."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, attempt {self.attempts} of {self.max_attempts}>"

    def decode(self, into: type[Any]) -> Any:
        """Return the payload as an `into`, by the queue's codec; raises `PayloadError` where it does not fit."""
        return self._core.codec.decode(self._document, into)

    @overload
    def ack_tx(self, session: AnySyncSession) -> None: ...
    @overload
    def ack_tx(self, session: AsyncAnySession) -> Awaitable[None]: ...
    def ack_tx(self, session: AnySession) -> Awaitable[None] | None:
        """Finish the job in the session's transaction: its database effects and its completion commit together.

        For an async session it returns an awaitable, and nothing happens until that is awaited. Rolling the session (or
        the innermost savepoint) back brings the job back under its lease (docs/guide.md, Sessions).

        Raises:
            LeaseLost: this claim is over. The transaction, or the innermost savepoint, is then good for a rollback
                only: the server refuses every further statement in it, and a commit of the session raises again.
            BindError: the session is in AUTOCOMMIT; or, at its commit, it has written through another connection too.
        """
        return in_session(session, self._ack_in)

    def _ack_in(self, session: Session) -> None:
        self._core.ack_tx(session, self._held)
        self._end()

    def _end(self) -> None:
        """Take over that an operation has ended this claim."""
        self.finished = True

    def _end_if_counted(self, operation: str, counted: set[int]) -> None:
        """Take over that an operation has ended this claim, or raise that it did not count."""
        if self.id not in counted:
            raise lease_lost(operation, self.id)
        self._end()

    def _apply(self, renewal: Renewal) -> datetime:
        """Take a heartbeat's outcome over, or raise."""
        if self.id in renewal.lost:
            raise lease_lost("heartbeat", self.id)
        self.lease_expires_at = renewal.renewed.get(self.id, self.lease_expires_at)
        return self.lease_expires_at


class JobHandle(ClaimedJob[T]):
    """A claimed job of an async `Queue`. Each operation is one statement in a transaction of its own."""

    def __init__(self, core: QueueCore, claim: Claim, runner: AsyncRunner) -> None:
        super().__init__(core, claim)
        self._runner = runner

    def for_thread(self) -> ThreadJobHandle[T]:
        """Return a handle on the same claim for a function that runs in a thread beside this event loop."""
        return ThreadJobHandle(self._core, self._claim, self._runner, asyncio.get_running_loop())

    async def ack(self) -> None:
        """Finish the job: its row is deleted.

        An ack that comes after the lease has lapsed, but before another claim, still counts.

        Raises:
            LeaseLost: this claim is over; nothing was changed.
        """
        self._end_if_counted("ack", await self._runner.run(self._core.ack([self._held])))

    async def retry(
        self, error: BaseException | str | None = None, *, delay: Duration | None = None
    ) -> Literal["pending", "dead"]:
        """Give the job back for another attempt, or to dead if this was its last; return which.

        It runs again after `delay` (seconds or a `timedelta`; zero is at once), or else after the job's own curve:
        `d = min(backoff_base * 2**(attempts - 1), 1 hour)`, uniform in `[d/2, d]`. `error` becomes `last_error`.

        Raises:
            LeaseLost: this claim is over; nothing was changed.
        """
        state = await self._runner.run(
            self._core.retry(self._held, error, delay, self._backoff_base, self.attempts),
            announce=self._core.announcement,
        )
        self._end()
        return state

    async def retry_if_rolled_back(self, error: BaseException | str | None = None) -> None:
        """Retry a job whose `ack_tx` may have been rolled back, by the very error that is given here.

        Where that transaction was committed, or is still open, nothing is done; a later rollback leaves the job to its
        lease.
        """
        await self._runner.run(
            self._core.retry_if_free(self._held, error, self._backoff_base, self.attempts),
            announce=self._core.announcement,
        )

    async def fail(self, error: BaseException | str | None = None) -> None:
        """Move the job to dead now, with `error` as its `last_error`.

        Raises:
            LeaseLost: this claim is over; nothing was changed.
        """
        await self._runner.run(self._core.fail(self._held, error))
        self._end()

    async def heartbeat(self, extend: Duration | None = None) -> datetime:
        """Renew the lease, from now, for `extend` or the job's own visibility timeout; return when it lapses.

        While an open transaction holds the row (an `ack_tx` not yet committed) nothing is renewed or lost, and the
        time is the old one. A lease that has lapsed cannot be renewed.

        Raises:
            LeaseLost: this claim is over, or its lease has lapsed; nothing was changed.
        """
        return self._apply(await self._runner.run(self._core.heartbeat([self._held], extend)))

    async def release(self) -> None:
        """Give an unstarted job back at once, its attempt with it.

        Raises:
            LeaseLost: this claim is over; nothing was changed.
        """
        operation = self._core.release([self._held])
        self._end_if_counted("release", await self._runner.run(operation, announce=self._core.announcement))


class ThreadJobHandle(JobHandle[T]):
    """A claimed job for a plain function that runs in a thread beside an event loop.

    In that thread its operations block, like those of a `SyncJobHandle`. On the event loop they are awaitable, so that
    a coroutine which the function returns can use the handle too.
    """

    def __init__(self, core: QueueCore, claim: Claim, runner: AsyncRunner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(core, claim, runner)
        self._loop = loop

    def ack(self) -> Any:
        """Finish the job: see `JobHandle.ack`."""
        return self._here(super().ack())

    def retry(self, error: BaseException | str | None = None, *, delay: Duration | None = None) -> Any:
        """Give the job back for another attempt, or to dead if this was its last: see `JobHandle.retry`."""
        return self._here(super().retry(error, delay=delay))

    def fail(self, error: BaseException | str | None = None) -> Any:
        """Move the job to dead now: see `JobHandle.fail`."""
        return self._here(super().fail(error))

    def heartbeat(self, extend: Duration | None = None) -> Any:
        """Renew the lease from now: see `JobHandle.heartbeat`."""
        return self._here(super().heartbeat(extend))

    def release(self) -> Any:
        """Give an unstarted job back, its attempt with it: see `JobHandle.release`."""
        return self._here(super().release())

    def _here(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Return `operation` on the event loop; elsewhere have that loop run it, and wait, while it is running."""
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return operation
        if not self._loop.is_running():
            operation.close()
            raise RuntimeError(OUTLIVED)
        future = asyncio.run_coroutine_threadsafe(operation, self._loop)
        while not concurrent.futures.wait([future], timeout=1.0).done:
            if not self._loop.is_running():
                future.cancel()
                raise RuntimeError(OUTLIVED)
        return future.result()


class SyncJobHandle(ClaimedJob[T]):
    """A claimed job of a `SyncQueue`: a `JobHandle` whose operations block. `JobHandle` says what each does."""

    def __init__(self, core: QueueCore, claim: Claim, runner: Runner) -> None:
        super().__init__(core, claim)
        self._runner = runner

    def ack(self) -> None:
        """Finish the job: see `JobHandle.ack`."""
        self._end_if_counted("ack", self._runner.run(self._core.ack([self._held])))

    def retry(
        self, error: BaseException | str | None = None, *, delay: Duration | None = None
    ) -> Literal["pending", "dead"]:
        """Give the job back for another attempt, or to dead if this was its last: see `JobHandle.retry`."""
        state = self._runner.run(
            self._core.retry(self._held, error, delay, self._backoff_base, self.attempts),
            announce=self._core.announcement,
        )
        self._end()
        return state

    def retry_if_rolled_back(self, error: BaseException | str | None = None) -> None:
        """Retry a job whose `ack_tx` may have been rolled back: see `JobHandle.retry_if_rolled_back`."""
        self._runner.run(
            self._core.retry_if_free(self._held, error, self._backoff_base, self.attempts),
            announce=self._core.announcement,
        )

    def fail(self, error: BaseException | str | None = None) -> None:
        """Move the job to dead now: see `JobHandle.fail`."""
        self._runner.run(self._core.fail(self._held, error))
        self._end()

    def heartbeat(self, extend: Duration | None = None) -> datetime:
        """Renew the lease from now: see `JobHandle.heartbeat`."""
        return self._apply(self._runner.run(self._core.heartbeat([self._held], extend)))

    def release(self) -> None:
        """Give an unstarted job back, its attempt with it: see `JobHandle.release`."""
        operation = self._core.release([self._held])
        self._end_if_counted("release", self._runner.run(operation, announce=self._core.announcement))
