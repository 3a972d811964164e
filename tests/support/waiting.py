"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE: Final = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until `condition()` is true; fail after the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        await asyncio.sleep(0.01)


async def finish(running: asyncio.Task[None]) -> None:
    """Wait for a loop that was asked to stop."""
    await asyncio.wait_for(running, DEADLINE)
