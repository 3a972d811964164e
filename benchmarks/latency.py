"""How soon an idle consumer starts a job, and what wakes cost the producer: `python -m benchmarks.latency [--full]`.

`wake`: a consumer in a process of its own waits; this process commits a transaction that carries a job, and looks how
long after the commit has returned the consumer's handler starts. The producer then waits until the consumer is idle
again. `plain` is the floor: asyncpg alone, NOTIFY inside the producer's transaction, LISTEN and one claim statement in
the consumer. `here` has the consumer in the producer's process.

`chain`: the next job is committed at the instant at which the handler of the last one starts. The longest wait shows
whether any job has waited for the re-poll.

`commits`: business transactions a second over 32 connections, with one insert and a job, against the same with a second
plain insert.

Read ratios within one run: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from datetime import datetime  # noqa: TC003  (SQLAlchemy reads the annotations when the module runs)
from typing import TYPE_CHECKING, Any

import asyncpg
from sqlalchemy import BigInteger, DateTime, Integer, Text, func, make_url
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from alkstore_sa import Store, embedded
from benchmarks.drain import migrate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from multiprocessing.connection import Connection as Pipe

    from alkstore_sa.embedded import PostgresServer

CONNECTIONS = 32
ROUNDS = 5
IDLE = 0.02  # seconds that a consumer is given to become idle
POLL = 5.0  # so that a job that had to wait for the re-poll shows
CLAIM = (
    "UPDATE alkstore.job SET state = 'processing', attempts = attempts + 1, worker_id = 'w',"
    " lease = nextval('alkstore.job_lease'), lease_expires_at = statement_timestamp() + visibility_timeout"
    " WHERE id = ANY (ARRAY(SELECT id FROM alkstore.job WHERE queue = 'plain' AND priority = 0 AND state = 'pending'"
    " AND run_at <= statement_timestamp() ORDER BY run_at, id + 0 LIMIT 1 FOR UPDATE SKIP LOCKED))"
    " RETURNING id, payload"
)


class Base(DeclarativeBase):
    """Base of the business tables."""


class Order(Base):
    """What a business transaction inserts."""

    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    note: Mapped[str] = mapped_column(Text)


class Line(Base):
    """What it inserts in place of a job."""

    __tablename__ = "bench_line"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    product: Mapped[str] = mapped_column(Text)
    quantity: Mapped[int] = mapped_column(Integer, default=1)
    placed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.statement_timestamp())
    details: Mapped[dict[str, int]] = mapped_column(JSONB)


# -- The consumers, each in a process of its own -----------------------------------------------------------------------


async def consume(dsn: str, started: Callable[[], None]) -> None:
    """Consume through the library."""
    engine = create_async_engine(make_url(dsn).set(drivername="postgresql+asyncpg"))
    async for job in Store(engine).queue("q").consume("w", poll=POLL):
        started()
        await job.ack()


async def consume_plain(dsn: str, started: Callable[[], None]) -> None:
    """Consume with asyncpg alone."""
    listener, worker = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    woken = asyncio.Event()
    await listener.add_listener("plain", lambda *_: woken.set())
    claim = await worker.prepare(CLAIM)
    ack = await worker.prepare("DELETE FROM alkstore.job WHERE id = $1")
    while True:
        woken.clear()
        while rows := await claim.fetch():
            json.loads(rows[0]["payload"])
            started()
            await ack.fetch(rows[0]["id"])
        await woken.wait()


def run_consumer(main: Callable[[str, Callable[[], None]], Coroutine[Any, Any, None]], dsn: str, pipe: Pipe) -> None:
    """Run a consumer that tells through `pipe` when each handler starts, by the clock that all processes share."""
    asyncio.run(main(dsn, lambda: pipe.send(time.perf_counter())))


# -- The producers -----------------------------------------------------------------------------------------------------


class Starts:
    """The times at which the handlers of a consumer process start, as they arrive."""

    def __init__(self, pipe: Pipe) -> None:
        self._times: asyncio.Queue[float] = asyncio.Queue()
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            self._times.put_nowait(self._pipe.recv())
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    async def next(self) -> float:
        """Wait for the next one."""
        return await asyncio.wait_for(self._times.get(), 60)


async def measure_wakes(commit: Callable[[int], Awaitable[None]], starts: Starts, samples: int) -> list[float]:
    """Return how long after each commit's return the handler started, the consumer being idle before."""
    await commit(-1)
    await starts.next()
    waits: list[float] = []
    for n in range(samples):
        await asyncio.sleep(IDLE)
        await commit(n)
        committed = time.perf_counter()
        waits.append(await starts.next() - committed)
    return waits


async def measure_chain(commit: Callable[[int], Awaitable[None]], starts: Starts, length: int) -> list[float]:
    """Return how long after each commit's return the handler started, each committed when the last one had started."""
    waits: list[float] = []
    for n in range(length):
        await commit(n)
        committed = time.perf_counter()
        waits.append(await starts.next() - committed)
    return waits


async def measure_commits(commit: Callable[[int], Awaitable[None]], seconds: float) -> float:
    """Return how many transactions a second are committed over all connections."""
    end = time.perf_counter() + seconds
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await commit(done)
            done += 1

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return done / (time.perf_counter() - begun)


class Producer:
    """What commits the jobs whose handlers' starts are looked for."""

    def __init__(self, server: PostgresServer, connection: asyncpg.Connection) -> None:
        self.engine = create_async_engine(server.url("asyncpg"), pool_size=CONNECTIONS)
        self.store = Store(self.engine)
        self.queue = self.store.queue("q")
        self._connection = connection

    async def commit(self, n: int) -> None:
        """Commit a row and a job through the library."""
        async with AsyncSession(self.engine) as session:
            session.add(Order(note="x"))
            self.queue.enqueue_tx(session, {"n": n})
            await session.commit()

    async def commit_rows(self, n: int) -> None:
        """Commit two rows."""
        async with AsyncSession(self.engine) as session:
            session.add(Order(note="x"))
            session.add(Line(product="x", details={"n": n}))
            await session.commit()

    async def commit_plain(self, n: int) -> None:
        """Commit a row, a job and a notification with asyncpg alone."""
        async with self._connection.transaction():
            await self._connection.execute("INSERT INTO bench_order (note) VALUES ($1)", "x")
            await self._connection.execute(
                "INSERT INTO alkstore.job (queue, payload) VALUES ('plain', $1)", json.dumps({"n": n})
            )
            await self._connection.execute("SELECT pg_notify('plain', '')")


async def measure(server: PostgresServer, samples: int, chain: int, seconds: float) -> dict[str, list[float]]:
    """Measure everything: waits in seconds, and rates of commits."""
    found: dict[str, list[float]] = {name: [] for name in ("plain", "wake", "here", "chain", "rows", "jobs")}
    connection = await asyncpg.connect(server.dsn)
    producer = Producer(server, connection)
    async with producer.engine.begin() as setup:
        await setup.run_sync(Base.metadata.create_all)
    context = multiprocessing.get_context("spawn")
    starts: list[Starts] = []
    processes: list[Any] = []
    for main in (consume_plain, consume):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=run_consumer, args=(main, server.dsn, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        starts.append(Starts(ours))
    for _ in range(ROUNDS):  # in turns, so that what else the machine does meets all alike
        found["plain"] += await measure_wakes(producer.commit_plain, starts[0], samples // ROUNDS)
        found["wake"] += await measure_wakes(producer.commit, starts[1], samples // ROUNDS)
    found["chain"] = await measure_chain(producer.commit, starts[1], chain)
    for process in processes:
        process.terminate()
        process.join()
    found["here"] = await measure_here(producer, samples)
    for _ in range(ROUNDS):
        found["rows"].append(await measure_commits(producer.commit_rows, seconds))
        found["jobs"].append(await measure_commits(producer.commit, seconds))
        await connection.execute("TRUNCATE alkstore.job, bench_order, bench_line")
    await producer.store.close()
    await producer.engine.dispose()
    await connection.close()
    return found


async def measure_here(producer: Producer, samples: int) -> list[float]:
    """Measure wakes with the consumer in this process, on the producer's store."""
    started: asyncio.Queue[float] = asyncio.Queue()

    async def consumer() -> None:
        async for job in producer.queue.consume("w", poll=POLL):
            started.put_nowait(time.perf_counter())
            await job.ack()

    task = asyncio.create_task(consumer())
    waits: list[float] = []
    for n in range(samples):
        await asyncio.sleep(IDLE)
        await producer.commit(n)
        committed = time.perf_counter()
        waits.append(await asyncio.wait_for(started.get(), 60) - committed)
    task.cancel()
    await asyncio.wait({task})
    return waits


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="2000 samples, 400 in the chain, rounds of 5 s")
    parser.add_argument("--json", action="store_true", help="print the results as JSON too")
    arguments = parser.parse_args()
    samples, chain, seconds = (2000, 400, 5.0) if arguments.full else (300, 400, 1.0)
    with embedded.start(durable=True) as server:
        print(f"{server.source}; {samples} samples, {ROUNDS} rounds", flush=True)
        migrate(server.url("psycopg"))
        found = asyncio.run(measure(server, samples, chain, seconds))
    plain = quantiles(found["plain"])
    print(f"{'':<8}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'p50 to plain':>14}{'p99 to plain':>14}")
    for name in ("plain", "wake", "here", "chain"):
        half, most, longest = quantiles(found[name])
        print(f"{name:<8}{half:>9.2f}{most:>9.2f}{longest:>9.2f}{half / plain[0]:>14.2f}{most / plain[1]:>14.2f}")
    rows, jobs = statistics.median(found["rows"]), statistics.median(found["jobs"])
    print(f"commits/s over {CONNECTIONS} connections: {rows:,.0f} of two rows, {jobs:,.0f} of a row and a job", end="")
    print(f": {jobs / rows:.2f}")
    if arguments.json:
        print(json.dumps(found))


def quantiles(waits: list[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the longest, in milliseconds."""
    ordered = sorted(wait * 1000 for wait in waits)
    return statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[-1]


if __name__ == "__main__":
    main()
