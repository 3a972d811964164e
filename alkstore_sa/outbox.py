"""The outbox: messages that commit with the caller's transaction and are then delivered, at least once, by a callable.

A helper over queues: the messages are jobs of a queue that only the outbox can name (docs/guide.md, Deliveries).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from alkstore_sa._failures import is_transient
from alkstore_sa._jobs import JobDefaults
from alkstore_sa._pace import Pace
from alkstore_sa._rules import check_count, check_duration, check_name
from alkstore_sa._tasks import kept
from alkstore_sa.errors import LeaseLost
from alkstore_sa.queue import Queue, SyncQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from typing_extensions import Unpack

    from alkstore_sa._hub import Wakeup
    from alkstore_sa._jobs import QueueCore
    from alkstore_sa._listener import Listener
    from alkstore_sa._rules import Duration
    from alkstore_sa._runner import AsyncRunner, Runner
    from alkstore_sa._stop import StopToken
    from alkstore_sa._types import AnySession, OutboxOptions, QueueStats
    from alkstore_sa.job import JobHandle, SyncJobHandle, ThreadJobHandle
    from alkstore_sa.models import JobTable

T = TypeVar("T")

__all__ = ["OUTBOX_DEFAULTS", "Delivery", "Outbox", "SyncDelivery", "SyncOutbox"]

Delivery: TypeAlias = "Callable[[ThreadJobHandle[Any]], Any]"
"""Takes a job and delivers it; a function of any `JobHandle` will do, be it sync or async."""

SyncDelivery: TypeAlias = "Callable[[SyncJobHandle[Any]], Any]"

OUTBOX_DEFAULTS: Final = JobDefaults(
    visibility_timeout=timedelta(seconds=60), max_attempts=5, backoff_base=timedelta(seconds=5)
)

FIRST_RETRY: Final = 0.05
LAST_RETRY: Final = 2.0
SWEEP_INTERVAL: Final = 30.0
CLAIM_TIME: Final = 2.0

logger: Final = logging.getLogger("alkstore_sa.outbox")


class _OutboxDoor:
    """What both doors have in common: everything that joins the caller's session."""

    def __init__(self, queue: Queue[Any] | SyncQueue[Any], core: QueueCore) -> None:
        self._door = queue
        self._core = core
        self.name: str = core.name.partition(":")[2]
        """The outbox's name."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} in schema {self._core.store.schema!r}>"

    def enqueue_tx(self, session: AnySession, payload: Any, **options: Unpack[OutboxOptions]) -> JobTable:
        """Add a message to the session's transaction: it commits with it, or never existed.

        The same as `Queue.enqueue_tx`: no I/O, nothing to await, `job.id` after the flush. What the payload takes from
        other rows must be there by now: a key that the database makes (`order.id`) is None until a flush.

        Raises:
            PayloadError, PayloadTooLarge, ValueError: the payload or an option is bad; nothing was added.
            BindError: the session cannot carry the message; at its flush or commit also where it has written elsewhere.
        """
        return self._door.enqueue_tx(session, payload, **options)

    def enqueue_many_tx(
        self, session: AnySession, payloads: Iterable[Any], **options: Unpack[OutboxOptions]
    ) -> list[JobTable]:
        """Add a message for each payload to the session's transaction: see `enqueue_tx`."""
        return self._door.enqueue_many_tx(session, payloads, **options)


class Outbox(_OutboxDoor):
    """An outbox of a `Store`. A cheap handle: making one does no I/O.

    A message has 5 attempts of 60 seconds each, with retries after 5, 10, 20 and 40 seconds (jitter takes off up to
    half), unless its enqueue says otherwise. No order is promised between messages.
    """

    def __init__(self, core: QueueCore, runner: AsyncRunner, listener: Listener) -> None:
        self._queue: Queue[Any] = Queue(core, runner, listener)
        super().__init__(self._queue, core)
        self._listener = listener

    async def enqueue(self, payload: Any, **options: Unpack[OutboxOptions]) -> int:
        """Store a message in a transaction of its own and return its id."""
        return await self._queue.enqueue(payload, **options)

    async def enqueue_many(self, payloads: Iterable[Any], **options: Unpack[OutboxOptions]) -> list[int]:
        """Store a message for each payload, all or none, and return their ids in order."""
        return await self._queue.enqueue_many(payloads, **options)

    async def run_once(self, worker_id: str, delivery: Delivery) -> bool:
        """Deliver one message; return whether there was one, whatever became of it.

        `delivery(job)` is a coroutine function; or a plain function, which runs in a thread and gets a handle whose
        methods block there; or an object with `__call__` of either kind. Whatever it returns is awaited if it can be.
        When it returns, the message is acknowledged. When it raises, the message is retried after the curve, with the
        error's text, and at its last attempt moved to dead with it. A delivery may end the job itself (`job.ack_tx`,
        `job.fail`); then that counts. There is no heartbeat: a delivery that may take longer than the visibility
        timeout calls `job.heartbeat()` itself.

        A message may be delivered more than once (the acknowledgement can get lost): the receiver tells by `job.id`.
        Cancelling leaves the message to its lease.

        Raises:
            LeaseLost: the delivery took longer than its lease, and another has claimed the message since.
        """
        (jobs, buried) = await self._queue.claim_or_bury(worker_id)
        for claimed in jobs:
            job = claimed.for_thread()
            await _finish(job, await _attempt(job, delivery, None, _is_being_cancelled))
        return bool(jobs or buried)

    async def run(
        self,
        worker_id: str,
        delivery: Delivery,
        stop: StopToken,
        *,
        concurrency: int = 10,
        poll: Duration = 1.0,
    ) -> None:
        """Deliver messages until `stop` is cancelled or the store is closed, up to `concurrency` at once.

        Each message is treated as by `run_once` and acknowledged at once. When there is nothing to do it looks again at
        a wake, at the soonest due time, or after `poll` (seconds, give or take a tenth), whichever is first. Every 30
        seconds it moves its messages that must not run any more to dead (expired, or abandoned at their last attempt).
        A lost lease, a dropped connection or a restarting server is logged and does not end it. On a stop it claims no
        more, waits for the deliveries under way, and returns; cancelling the task cancels these and leaves their
        messages to their leases, and what was claimed and not begun is given back.

        Raises:
            SchemaMissing, SchemaMismatch, and database errors that do not pass by themselves, such as a missing right.
        """
        check_name(worker_id, "worker")
        check_count(concurrency, "concurrency")
        pace = Pace(check_duration(poll, "poll").total_seconds())
        with self._listener.wakes(self._core.announcement.channel) as wakeup:
            keep = self._listener.keep
            loop = _DeliveryLoop(self._queue, worker_id, delivery, concurrency, pace, wakeup, keep)
            with stop.notifying(loop.stop_soon), self._listener.closed.notifying(loop.stop_soon):
                await loop.run()

    async def stats(self) -> QueueStats:
        """Count the outbox's messages: see `Queue.stats`."""
        return await self._queue.stats()


class SyncOutbox(_OutboxDoor):
    """An outbox of a `SyncStore`: an `Outbox` whose operations block. The loop `run` is asyncio's alone."""

    def __init__(self, core: QueueCore, runner: Runner) -> None:
        self._queue: SyncQueue[Any] = SyncQueue(core, runner)
        super().__init__(self._queue, core)

    def enqueue(self, payload: Any, **options: Unpack[OutboxOptions]) -> int:
        """Store a message in a transaction of its own and return its id."""
        return self._queue.enqueue(payload, **options)

    def enqueue_many(self, payloads: Iterable[Any], **options: Unpack[OutboxOptions]) -> list[int]:
        """Store a message for each payload, all or none, and return their ids in order."""
        return self._queue.enqueue_many(payloads, **options)

    def run_once(self, worker_id: str, delivery: SyncDelivery) -> bool:
        """Deliver one message; return whether there was one: see `Outbox.run_once`.

        The delivery runs in this thread. An awaitable that it returns is run to its end on an event loop of its own.
        """
        (jobs, buried) = self._queue.claim_or_bury(worker_id)
        if not jobs:
            return bool(buried)
        (job,) = jobs
        try:
            result = delivery(job)
            _refuse_generator(result)
            if inspect.isawaitable(result):
                _run_to_end(result)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (whatever it raises means: not delivered)
            if job.finished:
                job.retry_if_rolled_back(error)
            else:
                job.retry(error)
        else:
            if not job.finished:
                job.ack()
        return True

    def stats(self) -> QueueStats:
        """Count the outbox's messages: see `Queue.stats`."""
        return self._queue.stats()


def _run_to_end(result: Awaitable[Any]) -> None:
    """Run an awaitable on an event loop of its own, in this thread unless that is running one already."""

    async def main() -> None:
        await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(main())
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="alkstore-outbox") as thread:
            thread.submit(lambda: asyncio.run(main())).result()


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Tell whether calling `function` makes a coroutine, looking through partials and at `__call__` of objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _refuse_generator(result: object) -> None:
    """Raise for what a delivery with a `yield` in it returns: nothing of it has run, so nothing is delivered."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the delivery is a generator function: it has a yield in it, so calling it delivers nothing")


async def _attempt(
    job: ThreadJobHandle[Any],
    delivery: Delivery,
    threads: ThreadPoolExecutor | None,
    is_being_cancelled: Callable[[], bool],
) -> BaseException | None:
    """Call the delivery; return what it raised, None if it has delivered. Plain functions run in `threads`."""
    try:
        if is_async_callable(delivery):
            result = delivery(job)
        else:
            call = functools.partial(_call_in_thread, contextvars.copy_context(), delivery, job)
            result, error = await asyncio.get_running_loop().run_in_executor(threads, call)
            if error is not None:
                return error
        _refuse_generator(result)
        if inspect.isawaitable(result):
            await result
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        return error  # something within the delivery was cancelled, not this task
    except Exception as error:  # noqa: BLE001  (whatever a delivery raises means: not delivered)
        return error
    return None


def _is_being_cancelled() -> bool:
    """Tell whether somebody has cancelled the current task; before Python 3.11 a task does not say, so it may be."""
    cancelling: Callable[[], int] | None = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0


async def _finish(job: ThreadJobHandle[Any], error: BaseException | None) -> None:
    """Store the outcome of a delivery, unless the delivery has ended the job itself."""
    if job.finished:
        if error is not None:
            await job.retry_if_rolled_back(error)
    elif error is not None:
        await job.retry(error)
    else:
        await job.ack()


def _call_in_thread(
    context: contextvars.Context, delivery: Delivery, job: ThreadJobHandle[Any]
) -> tuple[Any, BaseException | None]:
    """Return what the delivery returns and what it raises; a future could not carry a StopIteration."""
    try:
        return context.run(delivery, job), None
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (raised again on the event loop)
        return None, error


class _DeliveryLoop:
    """The state of one `Outbox.run`."""

    def __init__(
        self,
        queue: Queue[Any],
        worker_id: str,
        delivery: Delivery,
        concurrency: int,
        pace: Pace,
        wakeup: Wakeup,
        keep: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._delivery = delivery
        self._concurrency = concurrency
        self._pace = pace
        self._wakeup = wakeup
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._cancelling = False
        self._running: set[asyncio.Task[None]] = set()
        self._next_sweep = 0.0
        self._failure: BaseException | None = None
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="alkstore-outbox")

    def stop_soon(self) -> None:
        """Stop; from any thread, and also after the event loop was closed."""
        self._stopping = True
        self._wakeup.set_from_anywhere()

    async def run(self) -> None:
        """Claim and deliver until stopped, then wait for what is under way."""
        try:
            while not self._stopping:
                self._wakeup.clear()
                await self._wakeup.wait(await self._fill())
                if self._failure is not None:
                    raise self._failure
            if self._running:
                await asyncio.wait(self._running)
            if self._failure is not None:
                raise self._failure
        finally:
            self._cancelling = True
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fill(self) -> float:
        """Start as many deliveries as there are free slots; return how long to sleep, unless one becomes free."""
        free = self._concurrency - len(self._running)
        try:
            if self._loop.time() >= self._next_sweep:
                self._next_sweep = self._loop.time() + SWEEP_INTERVAL
                await self._undisturbed(self._queue.sweep_expired())
            if not free:
                return self._until_sweep()
            jobs = await self._undisturbed(self._queue.claim(self._worker_id, free), self._queue.release_many)
            for job in jobs:
                task = asyncio.create_task(self._deliver_one(job))
                self._running.add(task)
                task.add_done_callback(self._finished)
            if jobs:
                self._pace.found()
            if len(jobs) == free:
                return self._until_sweep()
            due = await self._undisturbed(self._queue.next_due())
        except Exception as error:
            if not is_transient(error):
                raise
            wait = self._pace.back_off()
            logger.warning("outbox %s: claim failed, next try in %.2f s: %s", self._queue.name, wait, error)
            return wait
        return min(self._pace.pause(due), self._until_sweep())

    async def _undisturbed(
        self, operation: Coroutine[Any, Any, T], drop: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Have an operation come to its end before a cancellation: see `kept`."""
        return await kept(operation, CLAIM_TIME, drop=drop, keep=self._keep)

    def _until_sweep(self) -> float:
        return max(0.0, self._next_sweep - self._loop.time())

    async def _deliver_one(self, claimed: JobHandle[Any]) -> None:
        job = claimed.for_thread()
        try:
            error = await _attempt(job, self._delivery, self._threads, lambda: self._cancelling)
            await self._store(job, error)
        except LeaseLost as lost:
            logger.warning("outbox %s: %s", self._queue.name, lost)

    async def _store(self, job: ThreadJobHandle[Any], error: BaseException | None) -> None:
        """Store the outcome of a delivery, with some patience for a server that is away.

        A message that was delivered but cannot be acknowledged is delivered again, so it is worth a few seconds.
        """
        wait = FIRST_RETRY
        while True:
            try:
                await _finish(job, error)
            except Exception as failure:
                if not is_transient(failure):
                    raise
                if wait > LAST_RETRY:
                    logger.warning(
                        "outbox %s: the outcome of job %d was not stored, so its lease decides: %s",
                        self._queue.name,
                        job.id,
                        failure,
                    )
                    return
                await asyncio.sleep(wait)
                wait *= 2
            else:
                return

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wakeup.set()
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
