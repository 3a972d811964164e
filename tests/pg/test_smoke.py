from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alkstore_sa import Store, SyncStore


async def test_a_job_is_enqueued_claimed_and_acknowledged(store: Store) -> None:
    queue = store.queue("emails")
    job_id = await queue.enqueue({"to": "a@example.org"})
    (job,) = await queue.claim("w", 5)
    assert (job.id, job.payload) == (job_id, {"to": "a@example.org"})
    await job.ack()
    assert await queue.get_job(job_id) is None


def test_the_sync_door_does_the_same(sync_store: SyncStore) -> None:
    queue = sync_store.queue("emails")
    job_id = queue.enqueue({"to": "a@example.org"})
    (job,) = queue.claim("w", 5)
    assert (job.id, job.payload) == (job_id, {"to": "a@example.org"})
    job.ack()
    assert queue.get_job(job_id) is None
