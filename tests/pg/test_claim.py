"""Contract section 3: what a claim takes, in which order, and what it hands out."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.both_doors import BOTH_DOORS, open_store
from support.plain_sql import count, insert_job, server_time
from support.rows import job_row, lapse, make_due

from alkstore_sa import InvalidName, PayloadError, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import SyncStore

HOURS_AGO = "statement_timestamp() - interval '{} hours'"


@pytest.fixture(params=BOTH_DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Store]:
    async with open_store(str(request.param), database) as store:
        yield store


def ago(hours: float) -> str:
    return HOURS_AGO.format(hours)


# -- the order ---------------------------------------------------------------------------------------------------------


async def test_a_batch_comes_by_priority_then_run_at_then_id(door: Store, sql: Sql) -> None:
    same = "'2024-01-01 00:00+00'"
    expected = [
        insert_job(sql, "q", priority="32767", run_at=ago(1)),
        insert_job(sql, "q", priority="1", run_at=ago(9)),
        insert_job(sql, "q", priority="1", run_at=ago(3)),
        insert_job(sql, "q", run_at=same, id="901"),
        insert_job(sql, "q", run_at=same, id="905"),
        insert_job(sql, "q", run_at=ago(2), id="900"),
        insert_job(sql, "q", priority="-32768", run_at=ago(1000000)),
    ]
    shuffled = [expected[n] for n in (6, 2, 4, 0, 5, 1, 3)]
    for place, job_id in enumerate(shuffled):  # another physical order than that of the claim
        sql.execute("UPDATE alkstore.job SET payload = to_jsonb(%s::int) WHERE id = %s", [place, job_id])
    assert [job.id for job in await door.queue("q").claim("w", 50)] == expected


async def test_one_after_the_other_they_come_in_the_same_order(door: Store) -> None:
    queue = door.queue("q")
    for name, priority in {"a": 0, "b": 5, "c": 0, "d": -5, "e": 5, "f": 0}.items():
        await queue.enqueue(name, priority=priority)
    assert [(await queue.claim("w"))[0].payload for _ in range(6)] == list("beacfd")


async def test_a_reclaimed_job_takes_its_place_by_its_run_at(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    first, second = await queue.enqueue_many([1, 2])
    await queue.claim("w")
    lapse(sql, first)
    assert [job.id for job in await queue.claim("w", 2)] == [first, second]


# -- how many ----------------------------------------------------------------------------------------------------------


async def test_a_claim_takes_never_more_than_n_over_all_priorities(door: Store) -> None:
    queue = door.queue("q")
    for priority in range(5):
        await queue.enqueue_many(range(4), priority=priority)
    assert [len(await queue.claim("w", n)) for n in (1, 3, 7, 2, 50, 50)] == [1, 3, 7, 2, 7, 0]


async def test_a_claim_takes_one_job_unless_told_otherwise(door: Store) -> None:
    queue = door.queue("q")
    await queue.enqueue_many([1, 2])
    assert len(await queue.claim("w")) == 1


async def test_a_claim_takes_jobs_of_its_own_queue_alone(door: Store) -> None:
    await door.queue("q").enqueue(1)
    await door.queue("Q").enqueue(1)
    assert await door.queue("q ").claim("w", 5) == []
    assert [job.queue for job in await door.queue("q").claim("w", 5)] == ["q"]


@pytest.mark.parametrize("n", [0, -1, True, 1.0, None, 2**31])
def test_an_impossible_n_is_a_value_error(sync_store: SyncStore, n: Any) -> None:
    with pytest.raises(ValueError):
        sync_store.queue("q").claim("w", n)


# -- which -------------------------------------------------------------------------------------------------------------


async def test_a_job_is_not_claimed_before_its_run_at_and_is_from_then_on(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1, delay=3600)
    assert await queue.claim("w") == []
    make_due(sql, job_id)
    assert [job.id for job in await queue.claim("w")] == [job_id]


async def test_a_run_at_in_the_past_is_due_at_once(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    await queue.enqueue(1, run_at=server_time(sql) - timedelta(days=400))
    assert len(await queue.claim("w")) == 1


async def test_a_claimed_job_is_not_claimed_again_while_its_lease_lasts(door: Store) -> None:
    queue = door.queue("q")
    await queue.enqueue(1)
    await queue.claim("w")
    assert await queue.claim("w", 5) == []


async def test_a_lapsed_job_is_claimed_by_the_next_who_asks(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    await queue.claim("first")
    lapse(sql, job_id)
    assert [(job.id, job.attempts) for job in await queue.claim("second")] == [(job_id, 2)]
    row = job_row(sql, job_id)
    assert row is not None
    assert row["worker_id"] == "second"


async def test_an_expired_job_is_never_claimed(door: Store, sql: Sql) -> None:
    insert_job(sql, "q", expires_at=ago(1))
    insert_job(sql, "q", expires_at="statement_timestamp()")
    valid = insert_job(sql, "q", expires_at="statement_timestamp() + interval '1 hour'")
    assert [job.id for job in await door.queue("q").claim("w", 5)] == [valid]


async def test_a_claim_never_changes_run_at(door: Store, sql: Sql) -> None:
    queue = door.queue("q")
    job_id = await queue.enqueue(1)
    before = job_row(sql, job_id)
    await queue.claim("w")
    lapse(sql, job_id)
    (job,) = await queue.claim("w")
    after = job_row(sql, job_id)
    assert before is not None
    assert after is not None
    assert before["run_at"] == after["run_at"] == job.run_at


# -- attempts ----------------------------------------------------------------------------------------------------------


async def test_attempts_rise_by_one_at_each_claim_a_reclaim_included(door: Store, sql: Sql) -> None:
    queue = door.queue("q", max_attempts=4)
    job_id = await queue.enqueue(1)
    seen = []
    for end in ("lapse", "retry", "lapse", "lapse"):
        (job,) = await queue.claim("w")
        row = job_row(sql, job_id)
        assert row is not None
        seen.append((job.attempts, row["attempts"]))
        if end == "retry":
            await job.retry(delay=0)
        else:
            lapse(sql, job_id)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert await queue.claim("w") == []


async def test_a_job_whose_attempts_are_used_up_is_never_handed_out_again(door: Store, sql: Sql) -> None:
    queue = door.queue("q", max_attempts=1)
    lapsed = await queue.enqueue(1)
    await queue.claim("w")
    lapse(sql, lapsed)
    insert_job(sql, "q", attempts="3")
    insert_job(sql, "q", attempts="9", priority="5")
    assert await queue.claim("w", 5) == []


async def test_the_lease_number_only_grows(door: Store, sql: Sql) -> None:
    queue = door.queue("q", max_attempts=9)
    job_id = await queue.enqueue(1)
    leases = []
    for _ in range(4):
        (job,) = await queue.claim("w")
        row = job_row(sql, job_id)
        assert row is not None
        leases.append(row["lease"])
        await job.release()
    assert leases == sorted(set(leases))


# -- what is handed out ------------------------------------------------------------------------------------------------


async def test_a_handle_carries_the_rows_values_and_not_the_claiming_handles_defaults(door: Store, sql: Sql) -> None:
    job_id = await door.queue("q", visibility_timeout=1000, max_attempts=8).enqueue(
        {"n": 1}, priority=2, headers={"h": 1}
    )
    before = server_time(sql)
    (job,) = await door.queue("q", visibility_timeout=1, max_attempts=1).claim("w")
    row = job_row(sql, job_id)
    assert row is not None
    assert (job.id, job.queue, job.payload, job.headers, job.priority) == (job_id, "q", {"n": 1}, {"h": 1}, 2)
    assert (job.attempts, job.max_attempts, job.last_error) == (1, 8, None)
    assert (job.run_at, job.created_at) == (row["run_at"], row["created_at"])
    assert job.lease_expires_at == row["lease_expires_at"]
    assert before <= job.lease_expires_at - timedelta(seconds=1000) <= server_time(sql)


async def test_a_handle_tells_what_the_last_attempt_failed_with(door: Store) -> None:
    queue = door.queue("q")
    await queue.enqueue(1)
    (job,) = await queue.claim("w")
    await job.retry(KeyError("colour"), delay=0)
    (job,) = await queue.claim("w")
    assert job.last_error == "KeyError: 'colour'"


async def test_any_characters_may_stand_in_a_workers_name(store: Store, sql: Sql) -> None:
    queue = store.queue("q")
    for name in ('it\'s "w"', "100% %s", "a:b :c", "naïve 队列 🐘", "w" * 200):
        job_id = await queue.enqueue(name)
        (job,) = await queue.claim(name)
        row = job_row(sql, job_id)
        assert row is not None
        assert row["worker_id"] == name
        await job.ack()


@pytest.mark.parametrize("name", ["", "w" * 201, "a\0b", None])
def test_an_impossible_workers_name_is_refused(sync_store: SyncStore, name: Any) -> None:
    with pytest.raises(InvalidName):
        sync_store.queue("q").claim(name)


# -- what does not decode ----------------------------------------------------------------------------------------------


class Picky:
    """A codec that refuses one document, with whatever error it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def encode(self, payload: Any, /) -> str:
        return f'"{payload}"'

    def decode(self, document: str, into: type[Any], /) -> Any:
        if document == '"poison"':
            raise self.error
        return document.strip('"')


async def test_a_payload_that_does_not_fit_goes_to_dead_and_the_others_are_returned(door: Store, sql: Sql) -> None:
    poison = await door.queue("q").enqueue("seven", priority=1)
    good = await door.queue("q").enqueue_many([1, 2])
    typed = door.queue("q", payload_type=int)
    assert [(job.id, job.payload) for job in await typed.claim("w", 3)] == [(good[0], 1), (good[1], 2)]
    row = job_row(sql, poison, table="dead")
    assert row is not None
    assert (row["reason"], row["payload"], row["attempts"]) == ("undecodable", "seven", 1)
    assert "PayloadError: payload does not decode into int" in row["last_error"]
    assert job_row(sql, poison) is None


async def test_a_claim_passes_over_payloads_that_do_not_decode_until_it_has_n(door: Store, sql: Sql) -> None:
    await door.queue("q").enqueue_many(["x"] * 7, priority=1)
    await door.queue("q").enqueue_many([1, 2, 3])
    assert [job.payload for job in await door.queue("q", payload_type=int).claim("w", 2)] == [1, 2]
    assert (count(sql), count(sql, "dead")) == (3, 7)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), TypeError("t"), RecursionError()])
async def test_whatever_a_codec_raises_means_that_the_payload_does_not_decode(
    store: Store, sql: Sql, error: Exception
) -> None:
    queue = store.queue("q", codec=Picky(error))
    poison, _ = await queue.enqueue_many(["poison", "good"])
    assert [job.payload for job in await queue.claim("w", 2)] == ["good"]
    row = job_row(sql, poison, table="dead")
    assert row is not None
    assert row["reason"] == "undecodable"
    assert type(error).__name__ in row["last_error"]


async def test_a_claim_survives_that_another_takes_its_undecodable_job_meanwhile(store: Store, sql: Sql) -> None:
    class Slow(Picky):
        def decode(self, document: str, into: type[Any], /) -> Any:
            if document == '"poison"':
                sql.execute(
                    "UPDATE alkstore.job SET lease = nextval('alkstore.job_lease') WHERE payload = '\"poison\"'"
                )
            return super().decode(document, into)

    queue = store.queue("q", codec=Slow(PayloadError("no")))
    await queue.enqueue("poison", priority=1)
    await queue.enqueue("good")
    assert [job.payload for job in await queue.claim("w", 2)] == ["good"]
    assert count(sql, "dead") == 0


@pytest.mark.parametrize(
    "headers",
    ["""(repeat('{"a":', 3000) || '1' || repeat('}', 3000))::jsonb""", """'{"a": 1e5000}'"""],
    ids=["nested too deeply", "a number too long"],
)
async def test_headers_that_do_not_decode_cost_no_other_job_its_claim(store: Store, sql: Sql, headers: str) -> None:
    poison = insert_job(sql, "q", headers=headers, priority="1")
    good = insert_job(sql, "q")
    assert [job.id for job in await store.queue("q").claim("w", 2)] == [good]
    assert sql.execute("SELECT id, reason FROM alkstore.dead").fetchall() == [(poison, "undecodable")]


@pytest.mark.parametrize("column", ["run_at", "created_at", "expires_at"])
@pytest.mark.parametrize("time", ["'0044-03-15 BC'", "'20000-01-01'", "'infinity'"])
async def test_a_time_that_python_cannot_read_is_refused_or_costs_no_other_job_its_claim(
    store: Store, sql: Sql, column: str, time: str
) -> None:
    try:
        odd = insert_job(sql, "q", **{column: time}, priority="1")
    except psycopg.errors.CheckViolation:
        return
    queue = store.queue("q")
    good = insert_job(sql, "q")
    assert good in [job.id for job in await queue.claim("w", 2)]
    assert await queue.get_job(odd) is not None
