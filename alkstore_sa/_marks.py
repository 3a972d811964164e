"""Where a process's claims of one queue have got to.

While any session of the database holds an old snapshot, finished jobs cannot be cleaned away, and a claim that starts
at the head of its index walks over all of them. So a busy consumer starts where its last claim ended, in each priority.
The marks are a hint of this process alone: what is behind them (late commits, lapsed leases, priorities it has not met)
is found by a claim from the head, which comes whenever a claim comes short, and otherwise at the latest after 20 times
what the last one took, held between 1 and 3 seconds; that is the bound of how long a job may be overtaken.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

__all__ = ["Marks"]

Place: TypeAlias = "tuple[datetime, int]"

SHORTEST_INTERVAL: Final = 1.0
LONGEST_INTERVAL: Final = 3.0  # what a claim took may have been a lock or a stalled network
COST_FACTOR: Final = 20.0


@dataclass
class Marks:
    """The places in one queue, a priority each. Threads may share it: each change replaces a value as a whole."""

    places: dict[int, Place] = field(default_factory=dict[int, Place])
    next_walk: float = 0.0

    def usable(self) -> bool:
        """Tell whether the next claim may start from the marks."""
        return bool(self.places) and time.monotonic() < self.next_walk

    def parameters(self) -> dict[str, list[Any]]:
        """Return the places as the claim's statement takes them, highest priority first."""
        places = sorted(self.places.items(), reverse=True)
        return {
            "priorities": [priority for priority, _ in places],
            "run_ats": [run_at for _, (run_at, _) in places],
            "ids": [job_id for _, (_, job_id) in places],
        }

    def advance(self, rows: Sequence[Any]) -> None:
        """Move each place behind the rows that a claim has just taken."""
        places = dict(self.places)
        for row in rows:
            place = (row.run_at, row.id)
            if row.priority not in places or places[row.priority] < place:
                places[row.priority] = place
        self.places = places

    def walked(self, rows: Sequence[Any], wanted: int, cost: float) -> None:
        """Take over what a claim of `wanted` jobs from the head, which took `cost` seconds, has found.

        In each priority above the last one taken from, nothing else was due at that time, so its place is that time. A
        claim that came short leaves no marks: the next one is for jobs that have come since, wherever they are.
        """
        if len(rows) < wanted:
            self.places = {}
            return
        last = min(row.priority for row in rows)
        self.places = {priority: (rows[0].now, 0) for priority in rows[0].levels if priority > last}
        self.advance(rows)
        interval = min(max(SHORTEST_INTERVAL, COST_FACTOR * cost), LONGEST_INTERVAL)
        self.next_walk = time.monotonic() + interval

    def behind(self, priority: int, run_at: datetime | None) -> bool:
        """Tell whether a job that this process makes claimable would be overtaken; `run_at` None means now."""
        if not self.places:
            return False
        place = self.places.get(priority)
        return place is None or (run_at is not None and run_at <= place[0])

    def forget(self) -> None:
        """Have the next claim start at the head, also if one is under way that sets marks again."""
        self.places = {}
        self.next_walk = 0.0
