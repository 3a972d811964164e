"""How long a loop that looks for work sleeps between two looks."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Final

__all__ = ["Pace"]

FIRST_RECONNECT: Final = 0.05
LAST_RECONNECT: Final = 2.0
MAX_DOUBLINGS: Final = 6  # of 10 ms
JITTER: Final = 0.1


class Pace:
    """The pace of one loop: `poll` seconds at most, give or take a tenth, when nothing wakes it earlier."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._reconnect = FIRST_RECONNECT
        self._fruitless = 0

    def found(self) -> None:
        """Note that a look has found something."""
        self._fruitless = 0
        self._reconnect = FIRST_RECONNECT

    def pause(self, due: timedelta | None) -> float:
        """Return how long to sleep after a look that came short, with the next thing due in `due`.

        What fell due since that look is looked for at once. What is due and yet was not found is locked by an open
        transaction, so to look again at once leads nowhere: the pause then grows.
        """
        self._reconnect = FIRST_RECONNECT
        pause = self._poll * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311  (jitter, no secret)
        if due is not None and due <= timedelta(0):
            self._fruitless += 1
            return min(pause, 0.0 if self._fruitless == 1 else 0.01 * 2 ** min(self._fruitless, MAX_DOUBLINGS))
        self._fruitless = 0
        return pause if due is None else min(pause, due.total_seconds())

    def back_off(self) -> float:
        """Return how long to sleep after a look that failed: from 50 ms on, doubling to 2 s."""
        wait, self._reconnect = self._reconnect, min(self._reconnect * 2, LAST_RECONNECT)
        return wait
