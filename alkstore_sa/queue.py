"""Queues: the async door and the sync door to the queue core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from alkstore_sa._consume import consume
from alkstore_sa._jobs import read_stats, sweep, sweep_dead
from alkstore_sa._rules import check_count, check_duration, check_name
from alkstore_sa._session import in_session
from alkstore_sa._types import QueueStats
from alkstore_sa.job import ClaimedJob, JobHandle, SyncJobHandle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
    from datetime import timedelta

    from sqlalchemy import Connection
    from typing_extensions import Unpack

    from alkstore_sa._core import StoreCore
    from alkstore_sa._jobs import Held, QueueCore, Renewal
    from alkstore_sa._listener import Listener
    from alkstore_sa._rules import Duration
    from alkstore_sa._runner import AsyncRunner, Runner
    from alkstore_sa._types import AnySession, AnySyncSession, AsyncAnySession, EnqueueOptions, JobSnapshot
    from alkstore_sa._waker import Announcement
    from alkstore_sa.models import JobTable

__all__ = ["Queue", "SyncQueue", "sweep_all", "sweep_all_sync"]

T = TypeVar("T")
R = TypeVar("R")
Handle = TypeVar("Handle", bound="ClaimedJob[Any]")


class _QueueDoor:
    """What both doors have in common: everything that joins the caller's session."""

    def __init__(self, core: QueueCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} in schema {self._core.store.schema!r}>"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._core.name

    def enqueue_tx(self, session: AnySession, payload: Any, **options: Unpack[EnqueueOptions]) -> JobTable:
        """Add a job to the session's transaction: it commits with it, or never existed (docs/guide.md, Sessions).

        There is no I/O and nothing to await, for sync and async sessions alike: the pending `Job` joins the session's
        unit of work and is inserted by its next flush. `job.id` is there after the flush and stays readable after the
        commit. A `delay` counts from the flush.

        Args:
            session: a `Session`, `AsyncSession`, or a scoped registry of either.
            payload: a JSON value, dataclass, datetime, UUID, decimal, enum, or a structure of these. It is encoded now.
            options: see `EnqueueOptions`.

        Raises:
            PayloadError, PayloadTooLarge, ValueError: the payload or an option is bad; nothing was added.
            BindError: the session cannot carry the job; at its flush or commit also where it has written elsewhere.
        """
        return self._core.enqueue_tx(session, [payload], options)[0]

    def enqueue_many_tx(
        self, session: AnySession, payloads: Iterable[Any], **options: Unpack[EnqueueOptions]
    ) -> list[JobTable]:
        """Add a job for each payload to the session's transaction: see `enqueue_tx`."""
        return self._core.enqueue_tx(session, payloads, options)


class Queue(_QueueDoor, Generic[T]):
    """A queue of a `Store`. A cheap handle: making one does no I/O, and its options are stamped onto each job."""

    def __init__(self, core: QueueCore, runner: AsyncRunner, listener: Listener) -> None:
        super().__init__(core)
        self._runner = runner
        self._listener = listener

    async def enqueue(self, payload: Any, **options: Unpack[EnqueueOptions]) -> int:
        """Insert a job in a transaction of its own and return its id; `options` are those of `EnqueueOptions`.

        Raises:
            PayloadError, PayloadTooLarge, ValueError: the payload or an option is bad; nothing was stored.
        """
        return (await self.enqueue_many([payload], **options))[0]

    async def enqueue_many(self, payloads: Iterable[Any], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Insert a job for each payload, all or none, and return their ids in the payloads' order.

        One round trip carries 100,000 jobs or 128 MiB of JSON; more goes in several, in one transaction.
        """
        insertion = self._core.enqueue(payloads, options)
        return await self._run(insertion, atomic=insertion.atomic, announce=self._core.announcement)

    async def claim(self, worker_id: str, n: int = 1) -> list[JobHandle[T]]:
        """Claim up to `n` due jobs, for each job's own visibility timeout; an empty list means there are none.

        They come in the order of priority (higher first), `run_at`, id. Fewer than `n` means that the whole queue was
        looked through. Each claim uses up an attempt; a job without one left is never handed out. No job is handed out
        twice while a lease lasts. A job that becomes claimable behind the place that claims have reached (it committed
        late, or its lease lapsed) may be overtaken for 20 times what a claim from the head takes, held between 1 and 3
        seconds.

        A job whose payload does not decode is moved to dead and not returned.
        """
        return (await self.claim_or_bury(worker_id, n))[0]

    def consume(self, worker_id: str, *, batch: int = 1, poll: Duration = 1.0) -> AsyncGenerator[JobHandle[T]]:
        """Iterate over the queue's jobs as they become due: `async for job in queue.consume("web-1"): ...`.

        The body ends each job itself (`job.ack()`, `job.ack_tx(session)`, `job.retry()`, ...); a job that it does not
        end comes back when its lease lapses. Between jobs the loop sleeps until a wake, the soonest due time, or
        `poll` (seconds, give or take a tenth), whichever is first; a wake that arrives meanwhile counts. A dropped
        connection or a restarting server is logged and does not end it. It ends when the store is closed, or when the
        iterator is (`contextlib.aclosing`): jobs that were claimed and not handed out are then given back.

        Args:
            worker_id: who claims, for people to look at.
            batch: how many jobs to claim at once; the lease of each runs from the claim, so keep it small.
            poll: how long to sleep at most.

        Raises:
            SchemaMissing, SchemaMismatch, and database errors that do not pass by themselves, such as a missing right.
        """
        check_name(worker_id, "worker")
        seconds = check_duration(poll, "poll").total_seconds()
        return consume(self._core, self._runner, self._listener, worker_id, check_count(batch, "batch"), seconds)

    async def claim_or_bury(self, worker_id: str, n: int = 1) -> tuple[list[JobHandle[T]], int]:
        """Do what `claim` does, and tell also how many jobs went to dead because they do not decode."""
        claims, buried = await self._run(self._core.claim(worker_id, n))
        return [JobHandle(self._core, claim, self._runner) for claim in claims], buried

    async def ack_many(self, jobs: Sequence[JobHandle[Any]]) -> list[JobHandle[Any]]:
        """Finish jobs in one round trip; return those whose lease was lost, for which nothing was changed."""
        return _missing(jobs, await self._run(self._core.ack(_held(jobs))))

    async def release_many(self, jobs: Sequence[JobHandle[Any]]) -> list[JobHandle[Any]]:
        """Give unstarted jobs back in one round trip; return those whose lease was lost."""
        return _missing(jobs, await self._run(self._core.release(_held(jobs)), announce=self._core.announcement))

    async def heartbeat_many(
        self, jobs: Sequence[JobHandle[Any]], extend: Duration | None = None
    ) -> list[JobHandle[Any]]:
        """Renew leases in one round trip; return the jobs whose lease was lost: see `JobHandle.heartbeat`."""
        return _apply(jobs, await self._run(self._core.heartbeat(_held(jobs), extend)))

    @overload
    def get_job(self, job_id: int, *, session: AsyncAnySession | None = None) -> Awaitable[JobSnapshot | None]: ...
    @overload
    def get_job(self, job_id: int, *, session: AnySyncSession) -> JobSnapshot | None: ...
    def get_job(
        self, job_id: int, *, session: AnySession | None = None
    ) -> Awaitable[JobSnapshot | None] | JobSnapshot | None:
        """Return a snapshot of the job, pending, processing or dead; None if it is done, or another queue's.

        With `session` it reads in that session's transaction and sees what it has enqueued and not yet committed.
        """
        if session is None:
            return self._run(self._core.get_job(job_id))
        return in_session(session, self._core.get_job_in, job_id)

    async def cancel(self, job_id: int) -> bool:
        """Delete a pending job of this queue; False if there is none, or it is being processed."""
        return await self._run(self._core.cancel(job_id))

    async def next_due(self) -> timedelta | None:
        """Tell how long until the soonest job may be claimed: until its `run_at`, or the end of its lease.

        Zero or less for one that is due already, None when there is none. A hint: the job may be done or cancelled.
        """
        return await self._run(self._core.next_due())

    async def stats(self) -> QueueStats:
        """Count the queue's jobs."""
        return (await self._run(read_stats(self._core.store, self.name))).get(self.name, QueueStats())

    async def sweep_expired(self) -> int:
        """Move the jobs that must not run any more to dead and return how many: see `Store.sweep_expired`."""
        return await sweep_all(self._runner, self._core.store, sweep(self._core.store, self.name))

    async def sweep_dead(self, older_than: Duration) -> int:
        """Delete the dead jobs that died longer ago than `older_than` and return how many."""
        return await sweep_all(self._runner, self._core.store, sweep_dead(self._core.store, older_than, self.name))

    async def _run(
        self, operation: Callable[[Connection], R], *, atomic: bool = False, announce: Announcement | None = None
    ) -> R:
        return await self._runner.run(self._core.store.checked(operation), atomic=atomic, announce=announce)


class SyncQueue(_QueueDoor, Generic[T]):
    """A queue of a `SyncStore`: a `Queue` whose operations block. `Queue` says what each does."""

    def __init__(self, core: QueueCore, runner: Runner) -> None:
        super().__init__(core)
        self._runner = runner

    def enqueue(self, payload: Any, **options: Unpack[EnqueueOptions]) -> int:
        """Insert a job in a transaction of its own and return its id: see `Queue.enqueue`."""
        return self.enqueue_many([payload], **options)[0]

    def enqueue_many(self, payloads: Iterable[Any], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Insert a job for each payload, all or none, and return their ids in order: see `Queue.enqueue_many`."""
        insertion = self._core.enqueue(payloads, options)
        return self._run(insertion, atomic=insertion.atomic, announce=self._core.announcement)

    def claim(self, worker_id: str, n: int = 1) -> list[SyncJobHandle[T]]:
        """Claim up to `n` due jobs: see `Queue.claim`."""
        return self.claim_or_bury(worker_id, n)[0]

    def claim_or_bury(self, worker_id: str, n: int = 1) -> tuple[list[SyncJobHandle[T]], int]:
        """Do what `claim` does, and tell also how many jobs went to dead: see `Queue.claim_or_bury`."""
        claims, buried = self._run(self._core.claim(worker_id, n))
        return [SyncJobHandle(self._core, claim, self._runner) for claim in claims], buried

    def ack_many(self, jobs: Sequence[SyncJobHandle[Any]]) -> list[SyncJobHandle[Any]]:
        """Finish jobs in one round trip; return those whose lease was lost."""
        return _missing(jobs, self._run(self._core.ack(_held(jobs))))

    def release_many(self, jobs: Sequence[SyncJobHandle[Any]]) -> list[SyncJobHandle[Any]]:
        """Give unstarted jobs back in one round trip; return those whose lease was lost."""
        return _missing(jobs, self._run(self._core.release(_held(jobs)), announce=self._core.announcement))

    def heartbeat_many(
        self, jobs: Sequence[SyncJobHandle[Any]], extend: Duration | None = None
    ) -> list[SyncJobHandle[Any]]:
        """Renew leases in one round trip; return the jobs whose lease was lost."""
        return _apply(jobs, self._run(self._core.heartbeat(_held(jobs), extend)))

    @overload
    def get_job(self, job_id: int, *, session: AnySyncSession | None = None) -> JobSnapshot | None: ...
    @overload
    def get_job(self, job_id: int, *, session: AsyncAnySession) -> Awaitable[JobSnapshot | None]: ...
    def get_job(
        self, job_id: int, *, session: AnySession | None = None
    ) -> Awaitable[JobSnapshot | None] | JobSnapshot | None:
        """Return a snapshot of the job, or None: see `Queue.get_job`."""
        if session is None:
            return self._run(self._core.get_job(job_id))
        return in_session(session, self._core.get_job_in, job_id)

    def cancel(self, job_id: int) -> bool:
        """Delete a pending job of this queue: see `Queue.cancel`."""
        return self._run(self._core.cancel(job_id))

    def next_due(self) -> timedelta | None:
        """Tell how long until the soonest job that cannot be claimed now may be: see `Queue.next_due`."""
        return self._run(self._core.next_due())

    def stats(self) -> QueueStats:
        """Count the queue's jobs."""
        return self._run(read_stats(self._core.store, self.name)).get(self.name, QueueStats())

    def sweep_expired(self) -> int:
        """Move the jobs that must not run any more to dead and return how many: see `Store.sweep_expired`."""
        return sweep_all_sync(self._runner, self._core.store, sweep(self._core.store, self.name))

    def sweep_dead(self, older_than: Duration) -> int:
        """Delete the dead jobs that died longer ago than `older_than` and return how many."""
        return sweep_all_sync(self._runner, self._core.store, sweep_dead(self._core.store, older_than, self.name))

    def _run(
        self, operation: Callable[[Connection], R], *, atomic: bool = False, announce: Announcement | None = None
    ) -> R:
        return self._runner.run(self._core.store.checked(operation), atomic=atomic, announce=announce)


def _held(jobs: Sequence[ClaimedJob[Any]]) -> list[Held]:
    return [job._held for job in jobs]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  (the same package's own)


def _missing(jobs: Sequence[Handle], ids: set[int]) -> list[Handle]:
    return [job for job in jobs if job.id not in ids]


def _apply(jobs: Sequence[Handle], renewal: Renewal) -> list[Handle]:
    for job in jobs:
        job.lease_expires_at = renewal.renewed.get(job.id, job.lease_expires_at)
    return [job for job in jobs if job.id in renewal.lost]


async def sweep_all(runner: AsyncRunner, store: StoreCore, portions: Iterable[Callable[[Connection], int]]) -> int:
    """Run each portion, in its own transaction, until it finds nothing more; return how many rows that were."""
    total = 0
    for portion in portions:
        while moved := await runner.run(store.checked(portion)):
            total += moved
    return total


def sweep_all_sync(runner: Runner, store: StoreCore, portions: Iterable[Callable[[Connection], int]]) -> int:
    """Do what `sweep_all` does, blocking."""
    total = 0
    for portion in portions:
        while moved := runner.run(store.checked(portion)):
            total += moved
    return total
