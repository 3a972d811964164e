"""Work that a cancellation, or the end of an event loop, must not cut short."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["KeptTask", "finish_within", "kept", "succeeded"]

T = TypeVar("T")


class KeptTask(asyncio.Task[T]):
    """A task that goes on for some seconds after it was cancelled, and is done by then if the server answers.

    `asyncio.run` cancels all tasks of its loop when the main one is over, and then waits for them; a task may be
    cancelled again while it waits for something to come to an end. Work whose outcome the server may have stored
    already, such as a claim, has to see its answer all the same. Nobody need wait for it: the loop bounds it.
    """

    def __init__(self, work: Coroutine[Any, Any, T], seconds: float, **options: Any) -> None:
        super().__init__(work, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        # A loop that is ended may not come to a task that was made in its last moments, and that is all right.
        self._log_destroy_pending = False
        self.add_done_callback(_forget_failure)

    def cancel(self, msg: Any = None) -> bool:  # noqa: ARG002  (the message is nobody's here)
        """Give the task its last seconds; only after them it is cancelled for good."""
        if self._timer is None and not self.done():
            self._timer = self.get_loop().call_later(self._seconds, super().cancel)
            self.add_done_callback(self._stop_timer)
        return False

    def _stop_timer(self, _: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def kept(
    work: Coroutine[Any, Any, T],
    seconds: float,
    *,
    limit: float | None = None,
    drop: Callable[[T], Awaitable[object]] | None = None,
    keep: Callable[[asyncio.Task[Any]], None] | None = None,
) -> T:
    """Return what `work` returns; a cancellation that comes meanwhile lets it come to its end first, for `seconds`.

    The cancellation is raised here whatever becomes of it within: SQLAlchemy's ping before use, say, may swallow one.

    Args:
        work: what to do.
        seconds: how long it may go on when nobody waits for it any more.
        limit: how long to wait for it, in seconds.
        drop: what to do with a result that comes when nobody waits for it any more.
        keep: is handed the task, which a second cancellation leaves behind.

    Raises:
        asyncio.TimeoutError: `limit` has passed.
    """
    wanted = True

    async def finish() -> T:
        result = await work
        if drop is not None and not wanted:
            await drop(result)
        return result

    task = KeptTask(finish(), seconds)
    if keep is not None:
        keep(task)
    try:
        await asyncio.wait({task}, timeout=limit)
    except asyncio.CancelledError:
        wanted = False
        if drop is not None and succeeded(task):  # at this very moment
            await drop(task.result())
        task.cancel()
        await asyncio.wait({task}, timeout=2 * seconds)
        raise
    if task.done():
        return task.result()
    wanted = False
    task.cancel()
    raise asyncio.TimeoutError


async def finish_within(
    seconds: float, work: Coroutine[Any, Any, T], keep: Callable[[asyncio.Task[Any]], None] | None = None
) -> KeptTask[T]:
    """Run `work`, for `seconds` at most; return the task. Drivers may take a while in the background to notice."""
    task = KeptTask(work, seconds)
    if keep is not None:
        keep(task)
    task.cancel()
    await asyncio.wait({task}, timeout=2 * seconds)
    return task


def succeeded(task: asyncio.Task[Any]) -> bool:
    """Tell whether a task has come to its end without an exception."""
    return task.done() and not task.cancelled() and task.exception() is None


def _forget_failure(task: asyncio.Task[Any]) -> None:
    """Let nobody miss an exception that nobody waits for, and nothing be kept alive by a cancelled task's frames."""
    try:
        task.exception()
    except asyncio.CancelledError as error:
        error.__traceback__ = None
