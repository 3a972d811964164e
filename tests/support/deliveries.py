"""Deliveries of every kind that an outbox takes."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from alkstore_sa import JobHandle


def nothing(_: Any) -> None:
    """Deliver successfully."""


def fail(_: Any) -> None:
    """Fail to deliver."""
    raise RuntimeError("no route to host")


class Log:
    """What deliveries of every kind write to; the async ones only after they were really awaited."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, bool]] = []
        self.error: Exception | None = None

    def write(self, job: Any) -> None:
        if self.error is not None:
            raise self.error
        self.entries.append((job.payload, threading.current_thread() is threading.main_thread()))

    async def write_later(self, job: Any, *_: Any) -> None:
        await asyncio.sleep(0)
        self.write(job)

    def write_with(self, _: str, job: Any) -> None:
        self.write(job)

    async def write_later_with(self, _: str, job: Any) -> None:
        await self.write_later(job)


class AsyncObject(Log):
    async def __call__(self, job: Any) -> None:
        await self.write_later(job)


class Object(Log):
    def __call__(self, job: Any) -> None:
        self.write(job)


class Awaitable:
    """An awaitable that is no coroutine."""

    def __init__(self, log: Log, job: Any) -> None:
        self._log, self._job = log, job

    def __await__(self) -> Any:
        return self._log.write_later(self._job).__await__()


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def of_kind(kind: str) -> tuple[Log, Callable[[Any], Any]]:
    log = AsyncObject() if kind == "async object" else Object()
    kinds: dict[str, Callable[[Any], Any]] = {
        "function": lambda job: log.write(job),  # noqa: PLW0108  (the lambda is meant)
        "bound method": log.write,
        "object": log,
        "partial": functools.partial(log.write_with, "x"),
        "async bound method": log.write_later,
        "async object": log,
        "lambda returning a coroutine": lambda job: log.write_later(job),  # noqa: PLW0108  (the lambda is meant)
        "partial of a coroutine function": functools.partial(log.write_later_with, "x"),
        "partial of a partial of one": functools.partial(functools.partial(log.write_later_with), "x"),
        "partial of a lambda returning one": functools.partial(lambda _, job: log.write_later(job), "x"),
        "decorated coroutine function": decorated(log.write_later),
        "function returning an awaitable": functools.partial(Awaitable, log),
    }
    return log, kinds[kind]


IN_A_THREAD = ["function", "bound method", "object", "partial"]
ON_THE_LOOP = [
    *("async bound method", "async object", "lambda returning a coroutine", "partial of a coroutine function"),
    *("partial of a partial of one", "partial of a lambda returning one", "decorated coroutine function"),
    "function returning an awaitable",
]


class Gate:
    """A delivery that waits until it is let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun: list[Any] = []
        self.done: list[Any] = []
        self.cancelled: list[Any] = []

    async def __call__(self, job: JobHandle[Any]) -> None:
        self.begun.append(job.payload)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.payload)
            raise
        self.done.append(job.payload)
