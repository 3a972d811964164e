"""Contract sections 2 and 3: what names and ids may be, at an enqueue and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.both_doors import BOTH_DOORS, open_store

from alkstore_sa import InvalidName, ReservedName, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore

ODD_NAMES = [
    'it\'s "quoted"',
    "two words.and dots",
    "100% %s %(a)s",
    "a:b ::text :name",
    "\\ {} $1 ;--",
    "naïve 队列 🐘",
    "x" * 200,
    "é" * 200,
]


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


# -- names and ids -----------------------------------------------------------------------------------------------------


async def test_any_characters_may_stand_in_a_queues_name(store: Store) -> None:
    for name in ODD_NAMES:
        await use_queue(store, name)


async def use_queue(store: Store, name: str) -> None:
    queue = store.queue(name)
    job_id = await queue.enqueue(name)
    async with store.begin() as session:
        queue.enqueue_tx(session, name)
    first, second = await queue.claim("w", 5)
    assert (first.id, first.queue, first.payload, second.queue) == (job_id, name, name, name)
    assert (await queue.stats()).processing == 2
    assert await queue.release_many([first, second]) == []
    assert await queue.cancel(job_id)
    assert await queue.sweep_expired() == 0


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "\ud800", 5, None])
def test_an_impossible_name_is_refused(sync_store: SyncStore, name: Any) -> None:
    with pytest.raises(InvalidName):
        sync_store.queue(name)


def test_the_engines_prefix_is_refused(sync_store: SyncStore) -> None:
    with pytest.raises(ReservedName):
        sync_store.queue("__alkstore_outbox:mail")


@pytest.mark.parametrize("first_id", [2**31 - 1, 2**53 - 1, 2**63 - 10])
async def test_ids_beyond_31_and_53_bits_stay_exact(door: Store, sql: Sql, first_id: int) -> None:
    sql.execute(f"ALTER TABLE alkstore.job ALTER COLUMN id RESTART WITH {first_id}")
    queue = door.queue("q")
    ids = await queue.enqueue_many(["a", "b", "c", "d"])
    assert ids == [first_id, first_id + 1, first_id + 2, first_id + 3]
    acked, retried, failed, released = await queue.claim("w", 4)
    assert [acked.id, retried.id, failed.id, released.id] == ids
    await acked.ack()
    await retried.retry(delay=60)
    await failed.fail("no")
    await released.release()
    assert [getattr(await queue.get_job(job_id), "state", None) for job_id in ids] == [
        None,
        "pending",
        "dead",
        "pending",
    ]
    assert await queue.cancel(ids[3])
