"""The queue core, written once: functions of a sync `Connection`, or of the caller's sync `Session`.

Both doors (`Queue` and `SyncQueue`) and the outbox stand on it. Arguments are checked when an operation is made, before
there is a connection; what it returns is run by a runner, or inside a session.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sqlalchemy import func
from sqlalchemy.exc import DBAPIError

from alkstore_sa._connect import is_autocommit
from alkstore_sa._insertion import Insertion
from alkstore_sa._rules import (
    Duration,
    backoff_delay,
    check_attempts,
    check_count,
    check_duration,
    check_name,
    check_priority,
    check_time,
    error_text,
    is_bigint,
)
from alkstore_sa._session import add_rows, doom, read_connection, write_connection
from alkstore_sa._types import EnqueueOptions, JobSnapshot, QueueStats
from alkstore_sa.codec import encode_document
from alkstore_sa.errors import LeaseLost, PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from alkstore_sa._core import StoreCore
    from alkstore_sa._types import AnySession
    from alkstore_sa._waker import Announcement
    from alkstore_sa.codec import Codec
    from alkstore_sa.models import JobTable

__all__ = [
    "Claim",
    "Claims",
    "Held",
    "JobDefaults",
    "QueueCore",
    "Renewal",
    "lease_lost",
    "read_stats",
    "sweep",
    "sweep_dead",
]

SWEEP_PORTION: Final = 1000

logger: Final = logging.getLogger("alkstore_sa.queue")


class Held(NamedTuple):
    """The claim that a handle stands for."""

    id: int
    lease: int


class Claim(NamedTuple):
    """A claimed job's row, and its payload and headers decoded."""

    row: Any
    payload: Any
    headers: dict[str, Any]


class Claims(NamedTuple):
    """What a claim took: the jobs to work on, and how many went to dead because they do not decode."""

    claims: list[Claim]
    buried: int


class Renewal(NamedTuple):
    """What became of a heartbeat: the leases that were renewed, and the claims that are over."""

    renewed: dict[int, datetime]
    lost: set[int]


@dataclass(frozen=True)
class JobDefaults:
    """The options that a queue stamps onto its jobs unless the enqueue says otherwise."""

    visibility_timeout: timedelta
    max_attempts: int
    backoff_base: timedelta

    @classmethod
    def checked(cls, visibility_timeout: Duration, max_attempts: int, backoff_base: Duration) -> JobDefaults:
        """Return the defaults, or raise `ValueError` for what no job could have."""
        return cls(
            check_duration(visibility_timeout, "visibility_timeout"),
            check_attempts(max_attempts),
            check_duration(backoff_base, "backoff_base"),
        )


@dataclass(frozen=True)
class _Stamp:
    """The checked options of an enqueue, as its jobs' rows carry them. Relative times are added by the server."""

    queue: str
    headers: str
    priority: int
    run_at: datetime | None
    delay: timedelta | None
    expires_at: datetime | None
    expires: timedelta | None
    max_attempts: int
    visibility_timeout: timedelta
    backoff_base: timedelta


class QueueCore:
    """One queue of one store: its name, its defaults, and the operations on its jobs."""

    def __init__(
        self, store: StoreCore, name: str, defaults: JobDefaults, codec: Codec | None, payload_type: type[Any]
    ) -> None:
        self.store = store
        self.name = name
        self.announcement: Announcement = store.announcement("queue", name)
        self.codec: Codec = codec or store.codec
        self.payload_type = payload_type
        self._defaults = defaults
        self._statements = store.statements
        self._plain_stamp: _Stamp | None = None

    # -- enqueue -------------------------------------------------------------------------------------------------------

    def enqueue(self, payloads: Iterable[Any], options: EnqueueOptions) -> Insertion:
        """Return the operation that inserts a job for each payload and returns their ids in the same order."""
        stamp = self._stamp(options)
        parameters = vars(stamp) | {"delay": stamp.delay or timedelta(0)}
        insertion = Insertion.of(self._statements.enqueue, parameters, map(self._encode, payloads))
        self._expect(stamp)
        return insertion

    def enqueue_tx(self, session: AnySession, payloads: Iterable[Any], options: EnqueueOptions) -> list[JobTable]:
        """Add a pending job for each payload to the session's unit of work."""
        stamp = self._stamp(options)
        jobs = [self._new_row(stamp, self._encode(payload)) for payload in payloads]
        add_rows(session, self.store.models, jobs, self.announcement)
        self._expect(stamp)
        return jobs

    def _stamp(self, options: EnqueueOptions) -> _Stamp:
        """Return the checked options; most enqueues have none, and share one."""
        if options:
            return self._checked_stamp(options)
        if self._plain_stamp is None:
            self._plain_stamp = self._checked_stamp(options)
        return self._plain_stamp

    def _checked_stamp(self, options: EnqueueOptions) -> _Stamp:
        unknown = options.keys() - EnqueueOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(sorted(EnqueueOptions.__annotations__))
            raise TypeError(f"enqueue has no option {', '.join(sorted(unknown))}; it has {known}")
        given = {name: value for name, value in options.items() if value is not None}
        delay, run_at, limit = given.get("delay"), given.get("run_at"), given.get("expires")
        if delay is not None and run_at is not None:
            raise ValueError("delay and run_at are two ways to say when the job runs: give one of them")
        relative = limit is not None and not isinstance(limit, datetime)
        stamp = _Stamp(
            queue=self.name,
            headers=self._encode_headers(options.get("headers")),
            priority=check_priority(given.get("priority", 0)),
            run_at=None if run_at is None else check_time(run_at, "run_at"),
            delay=None if delay is None else check_duration(delay, "delay"),
            expires_at=None if limit is None or relative else check_time(limit, "expires"),
            expires=check_duration(limit, "expires") if relative else None,
            max_attempts=check_attempts(given.get("max_attempts", self._defaults.max_attempts)),
            visibility_timeout=check_duration(
                given.get("visibility_timeout", self._defaults.visibility_timeout), "visibility_timeout"
            ),
            backoff_base=check_duration(given.get("backoff_base", self._defaults.backoff_base), "backoff_base"),
        )
        if (stamp.delay and stamp.expires and stamp.expires <= stamp.delay) or (
            stamp.run_at and stamp.expires_at and stamp.expires_at <= stamp.run_at
        ):
            raise ValueError(f"expires={limit!r}: the job would expire before its run time, so it could never run")
        return stamp

    def _encode(self, payload: Any) -> str:
        return encode_document(self.codec, payload, self.store.max_payload_bytes)

    def _encode_headers(self, headers: Mapping[str, Any] | None) -> str:
        if not headers:
            return "{}"
        if not all(isinstance(key, str) for key in headers):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PayloadError("headers need str keys")
        return encode_document(self.store.header_codec, dict(headers), self.store.max_payload_bytes, "headers")

    def _new_row(self, stamp: _Stamp, document: str) -> JobTable:
        """Return the row as a model. Its payload is the plain JSON value that a worker will see."""
        job = self.store.models.Job()
        job.queue = stamp.queue
        job.payload = self.store.header_codec.decode(document, object)
        job.headers = self.store.header_codec.decode(stamp.headers, dict[str, Any])
        job.priority = stamp.priority
        job.state = "pending"
        job.attempts = 0
        job.max_attempts = stamp.max_attempts
        job.visibility_timeout = stamp.visibility_timeout
        job.backoff_base = stamp.backoff_base
        # Expressions: what counts is the server's clock at the flush, not the transaction's start or our own clock.
        if stamp.run_at or stamp.delay:
            job.run_at = stamp.run_at or func.statement_timestamp() + stamp.delay
        if stamp.expires_at or stamp.expires:
            job.expires_at = stamp.expires_at or func.statement_timestamp() + stamp.expires
        return job

    def _expect(self, stamp: _Stamp) -> None:
        """Have the next claim of this process look where these jobs will be."""
        marks = self.store.marks(self.name)
        if marks.behind(stamp.priority, stamp.run_at):
            marks.forget()

    # -- claim ---------------------------------------------------------------------------------------------------------

    def claim(self, worker_id: str, n: int) -> Callable[[Connection], Claims]:
        """Return the operation that claims up to `n` due jobs, in order; fewer means that there are no more."""
        check_name(worker_id, "worker")
        check_count(n, "n")

        def operation(connection: Connection) -> Claims:
            claims: list[Claim] = []
            buried = 0
            with _kept(connection, claims):
                complete = False
                while not complete and len(claims) < n:
                    complete = True
                    for rows in self._claim_rows(connection, worker_id, n - len(claims)):
                        decoded, undecodable = self._decode(rows)
                        claims += decoded
                        buried += len(undecodable)
                        for held, error in undecodable:
                            self._bury(connection, held, error)
                        complete = complete and not undecodable
            claims.sort(key=lambda claim: (-claim.row.priority, claim.row.run_at, claim.row.id))
            return Claims(claims, buried)

        return operation

    def _claim_rows(self, connection: Connection, worker_id: str, n: int) -> Iterator[list[Any]]:
        """Take rows from the marks on, as far as there are marks, and from the head where that comes short."""
        marks = self.store.marks(self.name)
        parameters = {"queue": self.name, "worker_id": worker_id}
        if marks.usable():
            rows = [*connection.execute(self._statements.claim_from_marks, parameters | {"n": n} | marks.parameters())]
            marks.advance(rows)
            yield rows
            n -= len(rows)
        if n:
            begun = time.monotonic()
            rows = [*connection.execute(self._statements.claim_from_head, parameters | {"n": n})]
            marks.walked(rows, n, time.monotonic() - begun)
            yield rows

    def _decode(self, rows: Iterable[Any]) -> tuple[list[Claim], list[tuple[Held, Exception]]]:
        """Return the claims of rows whose payload and headers decode, and what is wrong with the others."""
        decoded: list[Claim] = []
        undecodable: list[tuple[Held, Exception]] = []
        for row in rows:
            try:
                payload = self.codec.decode(row.payload, self.payload_type)
                headers = self.store.header_codec.decode(row.headers, dict[str, Any])
            except Exception as error:  # noqa: BLE001  (whatever a codec raises must not cost the other jobs their claim)
                undecodable.append((Held(row.id, row.lease), error))
            else:
                decoded.append(Claim(row, payload, headers))
        return decoded, undecodable

    def _bury(self, connection: Connection, held: Held, error: Exception) -> None:
        """Move a job that does not decode to dead; where the server refuses that, leave it to its lease."""
        try:
            self.fail(held, error, "undecodable")(connection)
        except LeaseLost:
            pass  # another claim has it already, and will come to the same end
        except DBAPIError as failure:
            if failure.connection_invalidated or not is_autocommit(connection):
                raise
            logger.warning(
                "job %d of %s does not decode and could not be moved to dead: %s", held.id, self.name, failure
            )

    def next_due(self) -> Callable[[Connection], timedelta | None]:
        """Return the operation that tells how long until the soonest job that is not due yet."""
        return lambda connection: _span(connection.scalar(self._statements.next_due, {"queue": self.name}))

    # -- the end of a claim --------------------------------------------------------------------------------------------

    def ack(self, held: Sequence[Held]) -> Callable[[Connection], set[int]]:
        """Return the operation that deletes the jobs and returns the ids of those whose lease still counted."""
        return self._for_each_held(self._statements.ack, held)

    def ack_tx(self, session: Session, held: Held) -> None:
        """Delete the job in the session's transaction, or doom that transaction."""
        connection = write_connection(session, self.store.models)
        if held.id not in self.ack([held])(connection):
            error = lease_lost("ack_tx", held.id)
            doom(session, connection, error)
            raise error

    def release(self, held: Sequence[Held]) -> Callable[[Connection], set[int]]:
        """Return the operation that gives jobs back unstarted and returns the ids whose lease still counted."""
        self.store.marks(self.name).forget()
        return self._for_each_held(self._statements.release, held)

    def retry(
        self,
        held: Held,
        error: BaseException | str | None,
        delay: Duration | None,
        backoff_base: timedelta,
        attempts: int,
    ) -> Callable[[Connection], Literal["pending", "dead"]]:
        """Return the operation that puts the job back, or to dead at its last attempt, and tells which."""
        wait = backoff_delay(backoff_base, attempts) if delay is None else check_duration(delay, "delay", zero=True)
        parameters = {**held._asdict(), "delay": wait, "error": error_text(error)}
        if not wait:
            self.store.marks(self.name).forget()

        def operation(connection: Connection) -> Literal["pending", "dead"]:
            state = connection.scalar(self._statements.retry, parameters)
            if state is None:
                raise lease_lost("retry", held.id)
            return "pending" if state == "pending" else "dead"

        return operation

    def retry_if_free(
        self, held: Held, error: BaseException | str | None, backoff_base: timedelta, attempts: int
    ) -> Callable[[Connection], None]:
        """Return the operation that does what `retry` does, unless the claim is over or a transaction has its row."""
        parameters = {**held._asdict(), "delay": backoff_delay(backoff_base, attempts), "error": error_text(error)}
        return lambda connection: connection.scalar(self._statements.retry_if_free, parameters)

    def fail(
        self, held: Held, error: BaseException | str | None, reason: str = "failed"
    ) -> Callable[[Connection], None]:
        """Return the operation that moves the job to dead now."""
        parameters = {**held._asdict(), "error": error_text(error), "reason": reason}

        def operation(connection: Connection) -> None:
            if connection.scalar(self._statements.fail, parameters) is None:
                raise lease_lost("fail", held.id)

        return operation

    def heartbeat(self, held: Sequence[Held], extend: Duration | None) -> Callable[[Connection], Renewal]:
        """Return the operation that renews leases from now; one that an open transaction holds is left as it is."""
        parameters = _arrays(held) | {"extend": None if extend is None else check_duration(extend, "extend")}

        def operation(connection: Connection) -> Renewal:
            renewed: dict[int, datetime] = {}
            lapsed: set[int] = set()
            seen: set[int] = set()
            for job_id, outcome, lease_expires_at in connection.execute(self._statements.heartbeat, parameters):
                seen.add(job_id)
                if outcome == "renewed":
                    renewed[job_id] = lease_expires_at
                elif outcome == "lapsed":
                    lapsed.add(job_id)
            return Renewal(renewed, {job.id for job in held} - seen | lapsed)

        return operation

    def _for_each_held(self, statement: Any, held: Sequence[Held]) -> Callable[[Connection], set[int]]:
        return lambda connection: set(connection.scalars(statement, _arrays(held)))

    # -- looking, cancelling -------------------------------------------------------------------------------------------

    def get_job(self, job_id: int) -> Callable[[Connection], JobSnapshot | None]:
        """Return the operation that reads one job of this queue."""

        def operation(connection: Connection) -> JobSnapshot | None:
            if not is_bigint(job_id):
                return None
            found = connection.execute(self._statements.get_job, {"id": job_id, "queue": self.name})
            row = found.mappings().one_or_none()
            if row is None:
                return None
            values: dict[str, Any] = dict(row)
            values["payload"] = self._show(row["payload"], self.codec, self.payload_type)
            values["headers"] = self._show(row["headers"], self.store.header_codec, object)
            for name in ("visibility_timeout", "backoff_base"):
                values[name] = _span(row[name])
            return JobSnapshot(**values)

        return operation

    def _show(self, document: str, codec: Codec, into: type[Any]) -> Any:
        """Return a document as its reader decodes it; else as plain JSON; else, to be looked at, as the text it is."""
        for reader, target in ((codec, into), (self.store.header_codec, object)):
            with contextlib.suppress(Exception):  # whatever a codec raises means that it does not decode
                return reader.decode(document, target)
        return document

    def get_job_in(self, session: Session, job_id: int) -> JobSnapshot | None:
        """Read one job of this queue as the session's transaction sees it."""
        return self.get_job(job_id)(read_connection(session, self.store.models))

    def cancel(self, job_id: int) -> Callable[[Connection], bool]:
        """Return the operation that deletes a pending job of this queue and tells whether there was one."""

        def operation(connection: Connection) -> bool:
            parameters = {"id": job_id, "queue": self.name}
            return is_bigint(job_id) and connection.scalar(self._statements.cancel, parameters) is not None

        return operation


@contextlib.contextmanager
def _kept(connection: Connection, claims: list[Claim]) -> Generator[None]:
    """Let a database error pass where jobs were claimed before it, and committed.

    To hand them out is better than to leave them to their leases. If the trouble lasts, the next claim raises.
    """
    try:
        yield
    except DBAPIError as failure:
        if not (claims and is_autocommit(connection)):
            raise
        logger.warning("a claim was cut short: %s", failure)


def lease_lost(operation: str, job_id: int) -> LeaseLost:
    """Return the error for an operation on a claim that is over."""
    return LeaseLost(
        f"{operation} of job {job_id}: this claim of it is over (another claim, retry, release or the sweep came first,"
        " or its lease lapsed), so nothing was changed; stop working on it"
    )


def read_stats(store: StoreCore, queue: str | None = None) -> Callable[[Connection], dict[str, QueueStats]]:
    """Return the operation that counts jobs, for one queue or all that have any."""
    statement = store.statements.stats if queue is None else store.statements.stats_of_queue

    def operation(connection: Connection) -> dict[str, QueueStats]:
        return {
            row.queue: QueueStats(
                int(row.pending),
                int(row.processing),
                int(row.dead),
                int(row.due),
                int(row.future),
                _span(row.oldest_due),
            )
            for row in connection.execute(statement, {} if queue is None else {"queue": queue})
        }

    return operation


def sweep(store: StoreCore, queue: str | None = None) -> list[Callable[[Connection], int]]:
    """Return the operations that each move a portion of what must not run any more to dead, and return how many."""
    statements = store.statements
    if queue is None:
        return [_portion(statements.sweep_expired, {}), _portion(statements.sweep_spent, {})]
    parameters = {"queue": queue}
    return [
        _portion(statements.sweep_expired_of_queue, parameters),
        _portion(statements.sweep_spent_of_queue, parameters),
    ]


def sweep_dead(store: StoreCore, older_than: Duration, queue: str | None = None) -> list[Callable[[Connection], int]]:
    """Return the operation that deletes a portion of the jobs that died longer ago than `older_than`."""
    age = check_duration(older_than, "older_than", zero=True)
    if queue is None:
        return [_portion(store.statements.sweep_dead, {"older_than": age})]
    return [_portion(store.statements.sweep_dead_of_queue, {"older_than": age, "queue": queue})]


def _portion(statement: Any, parameters: dict[str, Any]) -> Callable[[Connection], int]:
    return lambda connection: len(connection.scalars(statement, parameters | {"n": SWEEP_PORTION}).all())


def _span(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _arrays(held: Sequence[Held]) -> dict[str, list[int]]:
    return {"ids": [job.id for job in held], "leases": [job.lease for job in held]}
