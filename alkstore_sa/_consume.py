"""The loop behind `Queue.consume`: claims jobs and hands them out one by one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from alkstore_sa._failures import is_transient
from alkstore_sa._jobs import Held
from alkstore_sa._pace import Pace
from alkstore_sa._tasks import finish_within, kept, succeeded
from alkstore_sa.job import JobHandle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from alkstore_sa._jobs import Claim, Claims, QueueCore
    from alkstore_sa._listener import Listener
    from alkstore_sa._runner import AsyncRunner

__all__ = ["consume"]

GIVE_BACK_TIME: Final = 2.0

logger: Final = logging.getLogger("alkstore_sa.queue")


async def consume(
    core: QueueCore, runner: AsyncRunner, listener: Listener, worker_id: str, batch: int, poll: float
) -> AsyncGenerator[JobHandle[Any]]:
    """Yield the queue's jobs as they become due, until the store is closed."""
    pace = Pace(poll)
    unstarted: list[Claim] = []

    async def give_back(claims: Claims) -> None:
        await _give_back(core, runner, listener, claims.claims)

    with listener.wakes(core.announcement.channel) as wakeup:
        try:
            while not listener.closed.cancelled:
                wakeup.clear()
                try:
                    claim = runner.run(core.store.checked(core.claim(worker_id, batch)))
                    # A cancellation that comes meanwhile costs no job its attempt.
                    claimed = await kept(claim, GIVE_BACK_TIME, drop=give_back, keep=listener.keep)
                    claims = claimed.claims
                    pause = 0.0 if claims or claimed.buried else pace.pause(await runner.run(core.next_due()))
                except Exception as error:
                    if not is_transient(error):
                        raise
                    claims, pause = [], pace.back_off()
                    logger.warning("queue %s: claim failed, next try in %.2f s: %s", core.name, pause, error)
                if claims:
                    pace.found()
                    unstarted = claims[::-1]
                    while unstarted and not listener.closed.cancelled:
                        yield JobHandle(core, unstarted.pop(), runner)
                else:
                    await wakeup.wait(pause)
        finally:
            await _give_back(core, runner, listener, unstarted)


async def _give_back(core: QueueCore, runner: AsyncRunner, listener: Listener, claims: Sequence[Claim]) -> None:
    """Release what was claimed and not handed out; where the server does not answer in time, leave it to the leases."""
    if not claims:
        return
    release = core.release([Held(claim.row.id, claim.row.lease) for claim in claims])
    releasing = runner.run(release, announce=core.announcement)
    if not succeeded(await finish_within(GIVE_BACK_TIME, releasing, listener.keep)):
        logger.warning("queue %s: %d jobs were not given back, so their leases decide", core.name, len(claims))
