"""Work that the end of an event loop must not cut short."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["KeptTask", "finish_within", "kept", "succeeded", "wait_or_give_up"]

T = TypeVar("T")


class KeptTask(asyncio.Task[T]):
    """A task that takes a cancellation from `give_up` alone.

    `asyncio.run` cancels all tasks of its loop when the main one is over, and then waits for them. Work whose outcome
    the server may have stored already, such as a claim, has to see its answer.
    """

    _given_up = False

    def cancel(self, msg: Any = None) -> bool:
        """Do nothing, unless the task was given up."""
        return super().cancel(msg) if self._given_up else False

    def give_up(self) -> None:
        """Cancel the task."""
        self._given_up = True
        self.cancel()


async def kept(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return what `work` returns; a cancellation that comes meanwhile has it come to its end, within `seconds`, first.

    It is raised here, whatever becomes of it within: SQLAlchemy's ping before use, say, may swallow one.
    """
    task = KeptTask(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_or_give_up(task, seconds)
        raise


async def finish_within(seconds: float, work: Coroutine[Any, Any, T]) -> KeptTask[T]:
    """Run `work` to its end, or give it up after `seconds`; it may then take a while in the background to notice.

    Returns the task, done or given up; its exception counts as seen.
    """
    task = KeptTask(work)
    await wait_or_give_up(task, seconds)
    return task


async def wait_or_give_up(task: KeptTask[Any], seconds: float) -> None:
    """Wait for a task, and give it up after `seconds`."""
    task.add_done_callback(_see)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.give_up()
        await asyncio.wait({task}, timeout=seconds)


def succeeded(task: asyncio.Task[Any]) -> bool:
    """Tell whether a task has come to its end without an exception."""
    return task.done() and not task.cancelled() and task.exception() is None


def _see(task: asyncio.Task[Any]) -> None:
    try:
        task.exception()
    except asyncio.CancelledError as error:
        error.__traceback__ = None  # its frames would keep a half-open connection until the next garbage collection
