"""What one run works with and what comes of it, and a line that says so while it goes on."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alkstore_sa import StopToken
    from examples.orders.models import Order
    from examples.orders.receiver import Receiver


class Progress:
    """One line that is rewritten on a terminal; elsewhere, such as in a log, a new line every second."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._interval = 0.1 if self._terminal else 1.0
        self._next = time.monotonic() + self._interval

    def show(self, line: str) -> None:
        """Show `line`, unless another one has only just been shown."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            print(
                f"\r\x1b[K  {line}" if self._terminal else f"  {line}", end="" if self._terminal else "\n", flush=True
            )

    def end(self) -> None:
        """Wipe the line, so that the next print begins on a clean one."""
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)


@dataclass
class Run:
    """One run of the application, by either door."""

    orders: list[Order]
    receiver: Receiver
    stop: StopToken
    progress: Progress = field(default_factory=Progress)
    placed: list[str] = field(default_factory=list)
    """The numbers of the orders whose transactions were committed."""
    rolled_back: list[str] = field(default_factory=list)
    """The numbers of the orders whose transactions were rolled back."""

    def show(self, waiting: int | None = None) -> None:
        """Show how far things are; `waiting` messages are still to be delivered, as far as that is known."""
        self.progress.show(
            f"{len(self.placed)} of {len(self.orders)} orders placed, {len(self.rolled_back)} rolled back, "
            f"{len(self.receiver.received)} received" + ("" if waiting is None else f", {waiting} to deliver")
        )
