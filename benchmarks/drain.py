"""How fast a queue drains, and what slows it down: `python -m benchmarks.drain [--full]`.

One process claims and acknowledges in batches of 100 through the library, on one connection, on a throw-away server
with fsync on. It is measured on a queue alone, beside a million (short round: 100,000) future jobs of a higher
priority, and while another session holds an old snapshot, so that nothing can be vacuumed. Beside the rate stands that
of the last tenth against the first: 1 means that finished jobs do not slow the rest down. `plain` is the floor: the
same two statements by hand on asyncpg, on a table with this library's indexes.

Read ratios within one run: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
from alembic.config import Config
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from alembic import command
from alkstore_sa import Store, embedded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BATCH = 100


@dataclass(frozen=True)
class Result:
    """One drain: jobs a second, and the last tenth's rate against the first's."""

    name: str
    rate: float
    last_to_first: float


async def drain(take: Callable[[], Awaitable[int]], jobs: int) -> tuple[float, float]:
    """Call `take`, which finishes some jobs and returns how many, until all are done; return rate and last to first."""
    done, laps = 0, [time.perf_counter()]
    while done < jobs:
        done += await take()
        while done >= jobs * len(laps) // 10 and len(laps) <= 10:  # noqa: PLR2004  (tenths)
            laps.append(time.perf_counter())
    return jobs / (laps[-1] - laps[0]), (laps[1] - laps[0]) / (laps[-1] - laps[-2])


async def reset(connection: asyncpg.Connection, jobs: int) -> None:
    """Empty the tables and enqueue the jobs."""
    await connection.execute("TRUNCATE alkstore.job, alkstore.dead")
    await connection.execute(
        "INSERT INTO alkstore.job (queue, payload) SELECT 'q', jsonb_build_object('order', n, 'text', repeat('x', 60))"
        f" FROM generate_series(1, {jobs}) AS n"
    )
    await connection.execute("VACUUM (ANALYZE) alkstore.job")


async def through_the_library(engine: AsyncEngine, jobs: int) -> tuple[float, float]:
    """Drain through a queue's claim and ack_many."""
    queue = Store(engine).queue("q")

    async def take() -> int:
        claimed = await queue.claim("w", BATCH)
        lost = await queue.ack_many(claimed)
        return len(claimed) - len(lost)

    return await drain(take, jobs)


async def by_hand(connection: asyncpg.Connection, jobs: int) -> tuple[float, float]:
    """Drain by two prepared statements of the plainest form."""
    claim = await connection.prepare(
        "UPDATE alkstore.job SET state = 'processing', attempts = attempts + 1, worker_id = 'w',"
        " lease = nextval('alkstore.job_lease'), lease_expires_at = statement_timestamp() + visibility_timeout"
        " WHERE id = ANY (ARRAY(SELECT id FROM alkstore.job WHERE queue = 'q' AND priority = 0 AND state = 'pending'"
        f" AND run_at <= statement_timestamp() ORDER BY run_at, id + 0 LIMIT {BATCH} FOR UPDATE SKIP LOCKED))"
        " RETURNING id, payload, lease"
    )
    ack = await connection.prepare("DELETE FROM alkstore.job WHERE id = ANY ($1) AND lease = ANY ($2)")

    async def take() -> int:
        rows = await claim.fetch()
        for row in rows:
            json.loads(row["payload"])
        await ack.fetch([row["id"] for row in rows], [row["lease"] for row in rows])
        return len(rows)

    return await drain(take, jobs)


async def measure(jobs: int, others: int, rounds: int) -> list[Result]:
    """Run every case `rounds` times, in turns; return the medians."""
    with embedded.start(durable=True) as server:
        print(f"{server.source}; {jobs} jobs, batch {BATCH}, {rounds} rounds", flush=True)
        await asyncio.to_thread(migrate, server.url("psycopg"))
        engine = create_async_engine(server.url("asyncpg"))
        connection, holder = await asyncpg.connect(server.dsn), await asyncpg.connect(server.dsn)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            await reset(connection, jobs)
            found.setdefault("plain", []).append(await by_hand(connection, jobs))
            await reset(connection, jobs)
            found.setdefault("alone", []).append(await through_the_library(engine, jobs))
            await reset(connection, jobs)
            await connection.execute(
                "INSERT INTO alkstore.job (queue, payload, priority, run_at) SELECT 'q', '1', 5,"
                f" statement_timestamp() + interval '1 day' FROM generate_series(1, {others})"
            )
            found.setdefault("beside future jobs", []).append(await through_the_library(engine, jobs))
            await reset(connection, jobs)
            async with holder.transaction(isolation="repeatable_read"):
                await holder.fetch("SELECT 1 FROM alkstore.job LIMIT 1")
                found.setdefault("old snapshot held", []).append(await through_the_library(engine, jobs))
        await connection.close()
        await holder.close()
        await engine.dispose()
    return [
        Result(name, statistics.median(rate for rate, _ in runs), statistics.median(ratio for _, ratio in runs))
        for name, runs in found.items()
    ]


def migrate(url: str) -> None:
    """Build the engine's tables by the stand-alone environment."""
    config = Config("alembic.ini")
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    command.upgrade(config, "head")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="100,000 jobs, a million others, 5 rounds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON too")
    arguments = parser.parse_args()
    jobs, others, rounds = (100_000, 1_000_000, 5) if arguments.full else (20_000, 100_000, 3)
    results = asyncio.run(measure(jobs, others, rounds))
    floor: Any = results[0].rate
    print(f"{'':<20}{'jobs/s':>10}{'to plain':>10}{'last/first tenth':>18}")
    for result in results:
        print(f"{result.name:<20}{result.rate:>10,.0f}{result.rate / floor:>10.2f}{result.last_to_first:>18.2f}")
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
