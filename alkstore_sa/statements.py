"""Every statement that the engine sends, outside the migrations.

A `Statements` holds them for one schema, each built once: the text never depends on values, so the drivers prepare it
and SQLAlchemy caches it. Values are bound; payloads travel as text and are cast to `jsonb` by the server.

Three shapes keep the plans right whatever the statistics say (docs/design.md has the figures):

- Rows are found by `id = ANY(array)`, never by a join with the array: a join lets a planner that believes the table
  to be empty read the whole of it once for each id.
- The rows to change are chosen and locked by a CTE that is `MATERIALIZED`, and `LIMIT` stands in it: as a plain
  subselect it may be run again for each row, and then more rows are taken than were asked for.
- `lease` is drawn from one sequence, so `id = ANY(ids) AND lease = ANY(leases)` names exactly the claims that are meant.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sqlalchemy import TextClause, text

__all__ = ["MAX_LEVELS", "Statements", "statements_for"]

MAX_LEVELS: Final = 64
"""How many priorities a claim from the head reports, for later claims to start from."""

CONTENT: Final = (
    "id, queue, payload, headers, priority, run_at, created_at, expires_at, attempts, max_attempts,"
    " visibility_timeout, backoff_base, worker_id"
)
"""The columns that a job takes along to the dead table as they are."""

# A live lease protects a job; whatever else is due, unspent and valid may be claimed.
CLAIMABLE: Final = """
                job.run_at <= statement_timestamp()
                AND (job.state = 'pending' OR job.lease_expires_at <= statement_timestamp())
                AND job.attempts < job.max_attempts
                AND (job.expires_at IS NULL OR job.expires_at > statement_timestamp())"""

TAKE: Final = """
    UPDATE {job} AS job SET
        state = 'processing',
        attempts = job.attempts + 1,
        worker_id = :worker_id,
        lease = nextval({lease_sequence}),
        lease_expires_at = statement_timestamp() + job.visibility_timeout
    WHERE job.id = ANY (ARRAY(SELECT picked.id FROM picked))
    RETURNING job.id, job.queue, CAST(job.payload AS text) AS payload, CAST(job.headers AS text) AS headers, job.priority,
        job.attempts, job.max_attempts, job.run_at, job.created_at, job.lease, job.lease_expires_at, job.backoff_base,
        job.last_error"""


class Statements:
    """The statements on the tables of one schema."""

    def __init__(self, schema: str) -> None:
        quoted = '"' + schema.replace('"', '""') + '"'
        sequence = "'" + f"{quoted}.job_lease".replace("'", "''") + "'"
        self._names = {
            name: _escape(value)
            for name, value in {
                "job": f"{quoted}.job",
                "dead": f"{quoted}.dead",
                "schema_version": f"{quoted}.schema_version",
                "lease_sequence": sequence,
            }.items()
        }
        self.version_table = f"{quoted}.schema_version"

        # -- enqueue ---------------------------------------------------------------------------------------------------

        # One row for each payload, in their order: the identity is drawn after the sort. All or none.
        self.enqueue = self._build("""
            INSERT INTO {job} (queue, payload, headers, priority, run_at, expires_at, max_attempts, visibility_timeout, backoff_base)
            SELECT CAST(:queue AS text), CAST(item.payload AS jsonb), CAST(:headers AS jsonb), CAST(:priority AS smallint),
                coalesce(CAST(:run_at AS timestamptz), statement_timestamp() + CAST(:delay AS interval)),
                coalesce(CAST(:expires_at AS timestamptz), statement_timestamp() + CAST(:expires AS interval)),
                CAST(:max_attempts AS integer), CAST(:visibility_timeout AS interval), CAST(:backoff_base AS interval)
            FROM unnest(CAST(:payloads AS text[])) WITH ORDINALITY AS item (payload, place)
            ORDER BY item.place
            RETURNING id""")

        # -- claim -----------------------------------------------------------------------------------------------------

        # From the head of each priority, highest first: looks everywhere, and takes the first :n in order. The loop over
        # the priorities in use makes one index probe for each, so a million future jobs of a high one cost one probe.
        self.claim_from_head = self._build(
            """
            WITH RECURSIVE level (priority) AS (
                (SELECT job.priority FROM {job} AS job WHERE job.queue = :queue ORDER BY job.priority DESC LIMIT 1)
                UNION ALL
                SELECT (
                    SELECT job.priority FROM {job} AS job
                    WHERE job.queue = :queue AND job.priority < level.priority ORDER BY job.priority DESC LIMIT 1)
                FROM level WHERE level.priority IS NOT NULL
            ), picked AS MATERIALIZED (
                SELECT due.id FROM level CROSS JOIN LATERAL (
                    SELECT job.id FROM {job} AS job
                    WHERE job.queue = :queue AND job.priority = level.priority AND"""
            + CLAIMABLE
            + """
                    ORDER BY job.run_at, job.id + 0 LIMIT :n FOR UPDATE SKIP LOCKED) AS due
                LIMIT :n)"""
            + TAKE
            + """,
                statement_timestamp() AS now,
                ARRAY(SELECT level.priority FROM level WHERE level.priority IS NOT NULL LIMIT {max_levels}) AS levels"""
        )

        # The same from a place in each known priority on. What is behind these places is found by the claim from the head.
        self.claim_from_marks = self._build(
            """
            WITH picked AS MATERIALIZED (
                SELECT due.id
                FROM unnest(CAST(:priorities AS smallint[]), CAST(:run_ats AS timestamptz[]), CAST(:ids AS bigint[]))
                    AS mark (priority, run_at, id)
                CROSS JOIN LATERAL (
                    SELECT job.id FROM {job} AS job
                    WHERE job.queue = :queue AND job.priority = mark.priority
                        AND (job.run_at, job.id + 0) > (mark.run_at, mark.id) AND"""
            + CLAIMABLE
            + """
                    ORDER BY job.run_at, job.id + 0 LIMIT :n FOR UPDATE SKIP LOCKED) AS due
                LIMIT :n)"""
            + TAKE
        )

        # -- the end of a claim: each names the claims by their leases and changes nothing else ------------------------

        self.ack = self._build("DELETE FROM {job} WHERE id = ANY (CAST(:ids AS bigint[])) AND lease = ANY (CAST(:leases AS bigint[])) RETURNING id")

        # Back to pending, or, at the last attempt, to dead. Answers with the state that the job is in now.
        self.retry = self._build(
            """
            WITH target AS MATERIALIZED (
                SELECT job.id, job.attempts < job.max_attempts AS again FROM {job} AS job
                WHERE job.id = :id AND job.lease = :lease FOR UPDATE
            ), again AS (
                UPDATE {job} AS job SET
                    state = 'pending', run_at = statement_timestamp() + CAST(:delay AS interval), last_error = coalesce(:error, job.last_error),
                    lease = NULL, lease_expires_at = NULL, worker_id = NULL
                WHERE job.id = ANY (ARRAY(SELECT target.id FROM target WHERE target.again))
                RETURNING job.id
            ), gone AS (
                DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT target.id FROM target WHERE NOT target.again)) RETURNING job.*
            ), buried AS (
                INSERT INTO {dead} ({content}, last_error, reason)
                SELECT {content}, coalesce(:error, gone.last_error), 'exhausted' FROM gone RETURNING id)
            SELECT 'pending' AS state FROM again UNION ALL SELECT 'dead' FROM buried"""
        )

        # To dead now.
        self.fail = self._build(
            """
            WITH gone AS (
                DELETE FROM {job} AS job
                WHERE job.id = :id AND job.lease = :lease RETURNING job.*
            )
            INSERT INTO {dead} ({content}, last_error, reason)
            SELECT {content}, coalesce(:error, gone.last_error), CAST(:reason AS text) FROM gone
            RETURNING id"""
        )

        # Back to pending as if never claimed.
        self.release = self._build(
            """
            UPDATE {job} SET
                state = 'pending', attempts = attempts - 1, lease = NULL, lease_expires_at = NULL, worker_id = NULL
            WHERE id = ANY (CAST(:ids AS bigint[])) AND lease = ANY (CAST(:leases AS bigint[]))
            RETURNING id"""
        )

        # Renew from now. A row that an open transaction holds is skipped, not waited for: it answers 'held' and no more.
        # A lapsed lease is not renewed, and a claim that is over does not answer at all.
        self.heartbeat = self._build(
            """
            WITH mine AS (
                SELECT job.id FROM {job} AS job
                WHERE job.id = ANY (CAST(:ids AS bigint[])) AND job.lease = ANY (CAST(:leases AS bigint[]))
            ), free AS MATERIALIZED (
                SELECT job.id, job.lease_expires_at > statement_timestamp() AS live FROM {job} AS job
                WHERE job.id = ANY (CAST(:ids AS bigint[])) AND job.lease = ANY (CAST(:leases AS bigint[]))
                FOR UPDATE SKIP LOCKED
            ), renewed AS (
                UPDATE {job} AS job SET lease_expires_at = statement_timestamp() + coalesce(CAST(:extend AS interval), job.visibility_timeout)
                WHERE job.id = ANY (ARRAY(SELECT free.id FROM free WHERE free.live))
                RETURNING job.id, job.lease_expires_at)
            SELECT renewed.id, 'renewed' AS outcome, renewed.lease_expires_at FROM renewed
            UNION ALL SELECT free.id, 'lapsed', NULL FROM free WHERE NOT free.live
            UNION ALL SELECT mine.id, 'held', NULL FROM mine"""
        )

        # -- looking, cancelling ---------------------------------------------------------------------------------------

        # One statement, so a job on its way to dead is seen in exactly one of the two tables.
        self.get_job = self._build(
            """
            SELECT id, queue, state, CAST(payload AS text) AS payload, CAST(headers AS text) AS headers, priority, run_at, created_at,
                expires_at, attempts, max_attempts, visibility_timeout, backoff_base, worker_id, lease_expires_at, last_error,
                CAST(NULL AS timestamptz) AS died_at, CAST(NULL AS text) AS reason
            FROM {job} WHERE id = :id AND queue = :queue
            UNION ALL
            SELECT id, queue, 'dead', CAST(payload AS text), CAST(headers AS text), priority, run_at, created_at,
                expires_at, attempts, max_attempts, visibility_timeout, backoff_base, worker_id, NULL, last_error, died_at, reason
            FROM {dead} WHERE id = :id AND queue = :queue"""
        )

        self.cancel = self._build("DELETE FROM {job} WHERE id = :id AND queue = :queue AND state = 'pending' RETURNING id")

        self.stats, self.stats_of_queue = (
            self._build(
                """
                SELECT queue, sum(pending) AS pending, sum(processing) AS processing, sum(dead) AS dead, sum(due) AS due,
                    sum(future) AS future, statement_timestamp() - min(oldest) AS oldest_due
                FROM (
                    SELECT job.queue,
                        count(*) FILTER (WHERE job.state = 'pending') AS pending,
                        count(*) FILTER (WHERE job.state = 'processing') AS processing,
                        0 AS dead,
                        count(*) FILTER (WHERE """
                + CLAIMABLE
                + """) AS due,
                        count(*) FILTER (WHERE job.state = 'pending' AND job.run_at > statement_timestamp()) AS future,
                        min(job.run_at) FILTER (WHERE """
                + CLAIMABLE
                + """) AS oldest
                    FROM {job} AS job """
                + condition
                + """ GROUP BY job.queue
                    UNION ALL
                    SELECT job.queue, 0, 0, count(*), 0, 0, NULL FROM {dead} AS job """
                + condition
                + """ GROUP BY job.queue) AS part
                GROUP BY queue"""
            )
            for condition in ("", "WHERE job.queue = :queue")
        )

        # How long until the soonest job that no claim can have now may be due: pending and future, or under a lease.
        self.next_due = self._build(
            """
            WITH RECURSIVE level (priority) AS (
                (SELECT job.priority FROM {job} AS job WHERE job.queue = :queue ORDER BY job.priority DESC LIMIT 1)
                UNION ALL
                SELECT (
                    SELECT job.priority FROM {job} AS job
                    WHERE job.queue = :queue AND job.priority < level.priority ORDER BY job.priority DESC LIMIT 1)
                FROM level WHERE level.priority IS NOT NULL)
            SELECT min(soonest.at) - statement_timestamp() AS wait
            FROM level CROSS JOIN LATERAL (
                SELECT min(job.lease_expires_at) AS at FROM {job} AS job
                WHERE job.queue = :queue AND job.priority = level.priority AND job.run_at <= statement_timestamp()
                    AND job.state = 'processing' AND job.attempts < job.max_attempts
                    AND (job.expires_at IS NULL OR job.expires_at > statement_timestamp())
                UNION ALL
                (SELECT job.run_at FROM {job} AS job
                WHERE job.queue = :queue AND job.priority = level.priority AND job.run_at > statement_timestamp()
                ORDER BY job.run_at, job.id + 0 LIMIT 1)) AS soonest"""
        )

        # -- sweeps: in portions, and never waiting for a row that somebody else holds ---------------------------------

        self.sweep_expired, self.sweep_expired_of_queue = (
            self._build(
                """
                WITH picked AS MATERIALIZED (
                    SELECT job.id FROM {job} AS job
                    WHERE job.expires_at <= statement_timestamp()
                        AND (job.lease_expires_at IS NULL OR job.lease_expires_at <= statement_timestamp())"""
                + condition
                + """ ORDER BY job.expires_at LIMIT :n FOR UPDATE SKIP LOCKED),"""
                + self._bury("'expired'")
            )
            for condition in ("", " AND job.queue = :queue")
        )

        self.sweep_spent, self.sweep_spent_of_queue = (
            self._build(
                """
                WITH picked AS MATERIALIZED (
                    SELECT job.id FROM {job} AS job WHERE job.spent_at <= statement_timestamp()"""
                + condition
                + """ ORDER BY job.spent_at LIMIT :n FOR UPDATE SKIP LOCKED),"""
                + self._bury("CASE gone.state WHEN 'processing' THEN 'lapsed' ELSE 'exhausted' END")
            )
            for condition in ("", " AND job.queue = :queue")
        )

        self.sweep_dead, self.sweep_dead_of_queue = (
            self._build(
                """
                WITH picked AS MATERIALIZED (
                    SELECT dead.id FROM {dead} AS dead WHERE dead.died_at < statement_timestamp() - CAST(:older_than AS interval)"""
                + condition
                + """ ORDER BY dead.died_at LIMIT :n FOR UPDATE SKIP LOCKED)
                DELETE FROM {dead} WHERE id = ANY (ARRAY(SELECT picked.id FROM picked)) RETURNING id"""
            )
            for condition in ("", " AND dead.queue = :queue")
        )

        # -- the schema ------------------------------------------------------------------------------------------------

        self.find_version_table = text("SELECT to_regclass(:table) IS NOT NULL AS present, current_schema() AS default_schema")
        self.version = self._build("SELECT coalesce(max(version), 0) FROM {schema_version}")

        # Puts the transaction, or the innermost savepoint, into the state from which only a rollback leads out.
        self.doom = text("SELECT 1 / 0 AS \"the lease was lost\"")

    def _build(self, template: str) -> TextClause:
        return text(template.format(**self._names, content=CONTENT, max_levels=MAX_LEVELS))

    @staticmethod
    def _bury(reason: str) -> str:
        """Return the rest of a sweep: the picked jobs leave one table for the other in one statement."""
        return (
            """ gone AS (
                DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT picked.id FROM picked)) RETURNING job.*)
            INSERT INTO {dead} ({content}, last_error, reason)
            SELECT {content}, gone.last_error, """
            + reason
            + """ FROM gone
            RETURNING id"""
        )


def _escape(identifier: str) -> str:
    """Return an identifier for `text()`, where a colon would begin a parameter."""
    return identifier.replace(":", r"\:")


@lru_cache(maxsize=None)
def statements_for(schema: str) -> Statements:
    """Return the statements on the tables in `schema`, the same object at each call."""
    return Statements(schema)
