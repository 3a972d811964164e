"""Every statement that the engine sends, outside the migrations; those on streams stand in `_stream_statements`.

A `Statements` holds them for one schema, each built once: the text never depends on values, so the drivers prepare it
and SQLAlchemy caches it. Values are bound; payloads travel as text and are cast to `jsonb` by the server.

Three shapes keep the plans right whatever the statistics say (docs/design.md has the figures):

- Rows are found by `id = ANY (array)`, never by a join with the array: a join lets a planner that believes the table
  to be empty read the whole of it once for each id.
- The rows to change are chosen and locked by a CTE that is `MATERIALIZED`, and `LIMIT` stands in it: as a plain
  subselect it may be run again for each row, and then more rows are taken than were asked for.
- `lease` is drawn from one sequence, so `id = ANY (ids) AND lease = ANY (leases)` names exactly the claims meant.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from sqlalchemy import TextClause, text

__all__ = [
    "DOOM",
    "HAS_WRITTEN",
    "MAX_LEVELS",
    "NOTIFY",
    "PROBE",
    "WAKE",
    "Statements",
    "lease_sequence",
    "quoted_schema",
    "statements_for",
    "unbound",
]

MAX_LEVELS: Final = 64
"""How many priorities a claim from the head reports, for later claims to start from."""

# -- Parts that several statements share -------------------------------------------------------------------------------

# The columns that a job takes along to the dead table as they are.
CONTENT: Final = """id, queue, payload, headers, priority, run_at, created_at, expires_at, attempts, max_attempts,
    visibility_timeout, backoff_base, worker_id"""

# A live lease protects a job; whatever else is due, has an attempt left and is still valid may be claimed.
CLAIMABLE: Final = """job.run_at <= statement_timestamp()
        AND (job.state = 'pending' OR job.lease_expires_at <= statement_timestamp())
        AND job.attempts < job.max_attempts
        AND (job.expires_at IS NULL OR job.expires_at > statement_timestamp())"""

# The claims that are meant, and no later ones of the same jobs.
HELD: Final = "id = ANY (CAST(:ids AS bigint[])) AND lease = ANY (CAST(:leases AS bigint[]))"

# Durations are read as seconds: psycopg reads intervals in one of the server's IntervalStyles only.
DURATIONS: Final = """CAST(extract(epoch FROM visibility_timeout) AS float8) AS visibility_timeout,
    CAST(extract(epoch FROM backoff_base) AS float8) AS backoff_base"""

# A condition on rows that are found by something narrower. As a plain comparison it would tempt a planner that believes
# the table to be empty into reading the whole queue.
OF_QUEUE: Final = "(queue = :queue) IS TRUE"

# The priorities in use, highest first: one index probe for each, however many jobs it has.
LEVELS: Final = """level (priority) AS (
    (SELECT job.priority FROM {job} AS job WHERE job.queue = :queue ORDER BY job.priority DESC LIMIT 1)
    UNION ALL
    SELECT (
        SELECT job.priority FROM {job} AS job WHERE job.queue = :queue AND job.priority < level.priority
        ORDER BY job.priority DESC LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
)"""

# -- Enqueue -----------------------------------------------------------------------------------------------------------

# One row for each payload, in their order: the identity is drawn after the sort. All or none.
ENQUEUE: Final = """
INSERT INTO {job} (
    queue, payload, headers, priority,
    run_at,
    expires_at,
    max_attempts, visibility_timeout, backoff_base)
SELECT
    CAST(:queue AS text), CAST(item.payload AS jsonb), CAST(:headers AS jsonb), CAST(:priority AS smallint),
    coalesce(CAST(:run_at AS timestamptz), statement_timestamp() + CAST(:delay AS interval)),
    coalesce(CAST(:expires_at AS timestamptz), statement_timestamp() + CAST(:expires AS interval)),
    CAST(:max_attempts AS integer), CAST(:visibility_timeout AS interval), CAST(:backoff_base AS interval)
FROM unnest(CAST(:payloads AS text[])) WITH ORDINALITY AS item (payload, place)
ORDER BY item.place
RETURNING id"""

# -- Claim -------------------------------------------------------------------------------------------------------------

TAKE: Final = """
UPDATE {job} AS job SET
    state = 'processing',
    attempts = job.attempts + 1,
    worker_id = :worker_id,
    lease = nextval({lease_sequence}),
    lease_expires_at = statement_timestamp() + job.visibility_timeout
WHERE job.id = ANY (ARRAY(SELECT picked.id FROM picked))
RETURNING
    job.id, job.queue, CAST(job.payload AS text) AS payload, CAST(job.headers AS text) AS headers, job.priority,
    job.attempts, job.max_attempts, job.run_at, job.created_at, job.lease, job.lease_expires_at, job.last_error,
    CAST(extract(epoch FROM job.backoff_base) AS float8) AS backoff_base"""

# From the head of each priority: looks everywhere, and takes the first :n in order. A million future jobs of a high
# priority cost it one probe.
CLAIM_FROM_HEAD: Final = (
    """
WITH RECURSIVE {levels}, picked AS MATERIALIZED (
    SELECT due.id FROM level CROSS JOIN LATERAL (
        SELECT job.id FROM {job} AS job
        WHERE job.queue = :queue AND job.priority = level.priority AND {claimable}
        ORDER BY job.run_at, job.id + 0 LIMIT :n FOR UPDATE SKIP LOCKED) AS due
    LIMIT :n
)"""
    + TAKE
    + """,
    statement_timestamp() AS now,
    ARRAY(SELECT level.priority FROM level WHERE level.priority IS NOT NULL LIMIT {max_levels}) AS levels"""
)

# The same from a place in each known priority on. What is behind these places is found by the claim from the head.
CLAIM_FROM_MARKS: Final = (
    """
WITH picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(CAST(:priorities AS smallint[]), CAST(:run_ats AS timestamptz[]), CAST(:ids AS bigint[]))
        AS mark (priority, run_at, id)
    CROSS JOIN LATERAL (
        SELECT job.id FROM {job} AS job
        WHERE job.queue = :queue AND job.priority = mark.priority
            AND (job.run_at, job.id + 0) > (mark.run_at, mark.id) AND {claimable}
        ORDER BY job.run_at, job.id + 0 LIMIT :n FOR UPDATE SKIP LOCKED) AS due
    LIMIT :n
)"""
    + TAKE
)

# -- The end of a claim ------------------------------------------------------------------------------------------------

ACK: Final = "DELETE FROM {job} WHERE {held} RETURNING id"

# Back to pending, or, at the last attempt, to dead. Answers with the state that the job is in now.
RETRY: Final = """
WITH target AS MATERIALIZED (
    SELECT job.id, job.attempts < job.max_attempts AS again FROM {job} AS job
    WHERE job.id = :id AND job.lease = :lease FOR UPDATE {skip_locked}
), again AS (
    UPDATE {job} AS job SET
        state = 'pending',
        run_at = statement_timestamp() + CAST(:delay AS interval),
        last_error = coalesce(:error, job.last_error),
        lease = NULL, lease_expires_at = NULL, worker_id = NULL
    WHERE job.id = ANY (ARRAY(SELECT target.id FROM target WHERE target.again))
    RETURNING job.id
), gone AS (
    DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT target.id FROM target WHERE NOT target.again))
    RETURNING job.*
), buried AS (
    INSERT INTO {dead} ({content}, last_error, reason)
    SELECT {content}, coalesce(:error, gone.last_error), 'exhausted' FROM gone
    RETURNING id
)
SELECT 'pending' AS state FROM again UNION ALL SELECT 'dead' FROM buried"""

# To dead now.
FAIL: Final = """
WITH gone AS (
    DELETE FROM {job} AS job WHERE job.id = :id AND job.lease = :lease RETURNING job.*
)
INSERT INTO {dead} ({content}, last_error, reason)
SELECT {content}, coalesce(:error, gone.last_error), CAST(:reason AS text) FROM gone
RETURNING id"""

# Back to pending as if never claimed.
RELEASE: Final = """
UPDATE {job} SET
    state = 'pending', attempts = greatest(attempts - 1, 0), lease = NULL, lease_expires_at = NULL, worker_id = NULL
WHERE {held}
RETURNING id"""

# Renew from now. A row that an open transaction holds is skipped, not waited for: it answers 'held' and no more. A
# lapsed lease is not renewed, and a claim that is over does not answer at all.
HEARTBEAT: Final = """
WITH mine AS (
    SELECT id FROM {job} WHERE {held}
), free AS MATERIALIZED (
    SELECT id, lease_expires_at > statement_timestamp() AS live FROM {job} WHERE {held} FOR UPDATE SKIP LOCKED
), renewed AS (
    UPDATE {job} AS job
    SET lease_expires_at = statement_timestamp() + coalesce(CAST(:extend AS interval), job.visibility_timeout)
    WHERE job.id = ANY (ARRAY(SELECT free.id FROM free WHERE free.live))
    RETURNING job.id, job.lease_expires_at
)
SELECT renewed.id, 'renewed' AS outcome, renewed.lease_expires_at FROM renewed
UNION ALL SELECT free.id, 'lapsed', NULL FROM free WHERE NOT free.live
UNION ALL SELECT mine.id, 'held', NULL FROM mine"""

# -- Looking and cancelling --------------------------------------------------------------------------------------------

# One statement, so a job on its way to dead is seen in exactly one of the two tables.
GET_JOB: Final = """
SELECT
    id, queue, state, CAST(payload AS text) AS payload, CAST(headers AS text) AS headers, priority, run_at, created_at,
    expires_at, attempts, max_attempts, {durations}, worker_id, lease_expires_at, last_error,
    CAST(NULL AS timestamptz) AS died_at, CAST(NULL AS text) AS reason
FROM {job} WHERE id = :id AND {of_queue}
UNION ALL
SELECT
    id, queue, 'dead', CAST(payload AS text), CAST(headers AS text), priority, run_at, created_at,
    expires_at, attempts, max_attempts, {durations}, worker_id, NULL, last_error,
    died_at, reason
FROM {dead} WHERE id = :id AND {of_queue}"""

CANCEL: Final = "DELETE FROM {job} WHERE id = :id AND {of_queue} AND state = 'pending' RETURNING id"

STATS: Final = """
SELECT
    queue, sum(pending) AS pending, sum(processing) AS processing, sum(dead) AS dead, sum(due) AS due,
    sum(future) AS future, CAST(extract(epoch FROM statement_timestamp() - min(oldest)) AS float8) AS oldest_due
FROM (
    SELECT
        job.queue,
        count(*) FILTER (WHERE job.state = 'pending') AS pending,
        count(*) FILTER (WHERE job.state = 'processing') AS processing,
        0 AS dead,
        count(*) FILTER (WHERE {claimable}) AS due,
        count(*) FILTER (WHERE job.state = 'pending' AND job.run_at > statement_timestamp()) AS future,
        min(job.run_at) FILTER (WHERE {claimable}) AS oldest
    FROM {job} AS job {where_queue} GROUP BY job.queue
    UNION ALL
    SELECT queue, 0, 0, count(*), 0, 0, NULL FROM {dead} {where_queue} GROUP BY queue
) AS part
GROUP BY queue"""

# How long until the soonest job may be due, be it pending or under a lease. It is asked after a claim that found
# nothing; what has become due since then answers with zero or less.
NEXT_DUE: Final = """
WITH RECURSIVE {levels}
SELECT CAST(extract(epoch FROM min(soonest.at) - statement_timestamp()) AS float8) AS wait
FROM level CROSS JOIN LATERAL (
    SELECT min(job.lease_expires_at) AS at FROM {job} AS job
    WHERE job.queue = :queue AND job.priority = level.priority AND job.run_at <= statement_timestamp()
        AND job.state = 'processing' AND job.attempts < job.max_attempts
        AND (job.expires_at IS NULL OR job.expires_at > statement_timestamp())
    UNION ALL
    (SELECT job.run_at FROM {job} AS job
    WHERE job.queue = :queue AND job.priority = level.priority
        AND job.state = 'pending' AND job.attempts < job.max_attempts
        AND (job.expires_at IS NULL OR job.expires_at > statement_timestamp())
    ORDER BY job.run_at, job.id + 0 LIMIT 1)
) AS soonest"""

# -- Sweeps: in portions, and never waiting for a row that somebody else holds -----------------------------------------

BURY_PICKED: Final = """, gone AS (
    DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT picked.id FROM picked)) RETURNING job.*
)
INSERT INTO {dead} ({content}, last_error, reason)
SELECT {content}, gone.last_error, {reason} FROM gone
RETURNING id"""

SWEEP_EXPIRED: Final = (
    """
WITH picked AS MATERIALIZED (
    SELECT id FROM {job}
    WHERE expires_at <= statement_timestamp()
        AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp()) {and_of_queue}
    ORDER BY expires_at LIMIT :n FOR UPDATE SKIP LOCKED
)"""
    + BURY_PICKED
)

# The jobs without an attempt left, once no live lease holds them.
SWEEP_SPENT: Final = (
    """
WITH picked AS MATERIALIZED (
    SELECT id FROM {job} WHERE spent_at <= statement_timestamp() {and_of_queue}
    ORDER BY spent_at LIMIT :n FOR UPDATE SKIP LOCKED
)"""
    + BURY_PICKED
)

SWEEP_DEAD: Final = """
WITH picked AS MATERIALIZED (
    SELECT id FROM {dead} WHERE died_at < statement_timestamp() - CAST(:older_than AS interval) {and_queue}
    ORDER BY died_at LIMIT :n FOR UPDATE SKIP LOCKED
)
DELETE FROM {dead} WHERE id = ANY (ARRAY(SELECT picked.id FROM picked)) RETURNING id"""

# -- The schema, and the end of a doomed transaction -------------------------------------------------------------------

FIND_VERSION_TABLE: Final = """
SELECT
    to_regclass(:table) IS NOT NULL AS present, current_schema() AS default_schema,
    current_setting('DateStyle') AS date_style"""

VERSION: Final = "SELECT coalesce(max(version), 0) FROM {schema_version}"

# Delivered when the transaction is committed.
NOTIFY: Final = text("SELECT pg_notify(:channel, :payload)")

# The engine's own wakes, sent after the commit of what they announce.
WAKE: Final = text("SELECT pg_notify(wake.channel, :token) FROM unnest(CAST(:channels AS text[])) AS wake (channel)")

# Whether the transaction has anything to commit.
HAS_WRITTEN: Final = text("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")

# Fails, and so puts the transaction, or the innermost savepoint, into the state that only a rollback leads out of.
DOOM: Final = text('SELECT 1 / 0 AS "the lease was lost"')

# Fails in that state.
PROBE: Final = text("SELECT 1")


def quoted_schema(schema: str) -> str:
    """Return `schema` as an SQL identifier."""
    return '"' + schema.replace('"', '""') + '"'


def unbound(sql: str) -> str:
    """Return `sql` for use in `text()`, where a colon would begin a parameter."""
    return sql.replace(":", r"\:")


def lease_sequence(quoted: str) -> str:
    """Return the sequence that leases are drawn from, as the SQL string that `nextval` takes."""
    return unbound("'" + f"{quoted}.job_lease".replace("'", "''") + "'")


class Statements:
    """The statements on the tables of one schema. The pairs are for all queues, and for `:queue` alone."""

    stats: TextClause
    stats_of_queue: TextClause
    sweep_expired: TextClause
    sweep_expired_of_queue: TextClause
    sweep_spent: TextClause
    sweep_spent_of_queue: TextClause
    sweep_dead: TextClause
    sweep_dead_of_queue: TextClause

    def __init__(self, schema: str) -> None:
        schema = quoted_schema(schema)
        self.version_table: str = f"{schema}.schema_version"
        self._parts: dict[str, str] = {
            "job": unbound(f"{schema}.job"),
            "dead": unbound(f"{schema}.dead"),
            "schema_version": unbound(self.version_table),
            "lease_sequence": lease_sequence(schema),
        }

        self.enqueue: TextClause = self._build(ENQUEUE)
        self.claim_from_head: TextClause = self._build(CLAIM_FROM_HEAD)
        self.claim_from_marks: TextClause = self._build(CLAIM_FROM_MARKS)
        self.ack: TextClause = self._build(ACK)
        self.retry: TextClause = self._build(RETRY, skip_locked="")
        self.retry_if_free: TextClause = self._build(RETRY, skip_locked="SKIP LOCKED")
        self.fail: TextClause = self._build(FAIL)
        self.release: TextClause = self._build(RELEASE)
        self.heartbeat: TextClause = self._build(HEARTBEAT)
        self.get_job: TextClause = self._build(GET_JOB)
        self.cancel: TextClause = self._build(CANCEL)
        self.next_due: TextClause = self._build(NEXT_DUE)
        self.stats, self.stats_of_queue = self._build_pair(STATS)
        self.sweep_expired, self.sweep_expired_of_queue = self._build_pair(SWEEP_EXPIRED, reason="'expired'")
        self.sweep_spent, self.sweep_spent_of_queue = self._build_pair(
            SWEEP_SPENT, reason="CASE gone.state WHEN 'processing' THEN 'lapsed' ELSE 'exhausted' END"
        )
        self.sweep_dead, self.sweep_dead_of_queue = self._build_pair(SWEEP_DEAD)
        self.find_version_table: TextClause = text(FIND_VERSION_TABLE)
        self.version: TextClause = self._build(VERSION)

    def _build(self, template: str, **parts: str) -> TextClause:
        levels = LEVELS.format(**self._parts)
        return text(
            template.format(
                **self._parts,
                **parts,
                levels=levels,
                claimable=CLAIMABLE,
                held=HELD,
                of_queue=OF_QUEUE,
                durations=DURATIONS,
                content=CONTENT,
                max_levels=MAX_LEVELS,
            )
        )

    def _build_pair(self, template: str, **parts: str) -> tuple[TextClause, TextClause]:
        return (
            self._build(template, **parts, where_queue="", and_queue="", and_of_queue=""),
            self._build(
                template,
                **parts,
                where_queue="WHERE queue = :queue",
                and_queue="AND queue = :queue",
                and_of_queue=f"AND {OF_QUEUE}",
            ),
        )


@cache
def statements_for(schema: str) -> Statements:
    """Return the statements on the tables in `schema`, the same object at each call."""
    return Statements(schema)
