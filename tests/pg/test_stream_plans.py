"""The plans of the statements on a long stream, under the worst statistics that the table of events can have."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from support.plans import buffers, explain, nodes, prepare

from alkstore_sa._stream_statements import stream_statements_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Databases

EVENTS: Final = 300_000
# Each page of an index on all the events is one buffer: to go through one of them costs a thousand and more.
FEW: Final = 300
# To place an event moves it from one index to another and writes a new version of its row: a score of buffers each.
FOR_A_HUNDRED_NEW_ONES: Final = 2500

STATISTICS: Final = {
    "never vacuumed, never analyzed": "",
    "vacuumed while it was empty": "VACUUM alkstore.stream_event",
    "vacuumed and analyzed while it was empty": "VACUUM (ANALYZE) alkstore.stream_event",
}
PLANS: Final = ("kept from when the table was empty", "made for any values", "made for these values")
READ_VALUES: Final = {"stream": "'s'", "after": "0", "limit": "100"}
TRIM_VALUES: Final = {"stream": "'s'", "keep": "100", "older_than": "NULL", "n": "1000"}


@pytest.fixture(scope="module", params=list(STATISTICS.values()), ids=list(STATISTICS))
def filled(databases: Databases, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A stream of many events, on a connection which has planned the statements while the table was empty."""
    for database in databases.clone():
        # Without a threshold, or psycopg would deallocate the statements prepared here at a rollback.
        with psycopg.connect(database.dsn, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("ALTER TABLE alkstore.stream_event SET (autovacuum_enabled = false)")
            if request.param:
                connection.execute(request.param)
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for name, values in {"read": READ_VALUES, "trim": TRIM_VALUES}.items():
                order = prepare(connection, f"kept_{name}", getattr(stream_statements_for("alkstore"), name))
                explain(connection, f"kept_{name}", order, values)
            connection.execute("INSERT INTO alkstore.stream (name, head) VALUES ('s', %s)", [EVENTS])
            connection.execute(
                'INSERT INTO alkstore.stream_event (stream, "offset", payload, created_at)'
                " SELECT 's', n, to_jsonb(n), statement_timestamp() - interval '1 day'"
                " FROM generate_series(1, %s) AS n",
                [EVENTS],
            )
            yield connection


@contextmanager
def planned(connection: psycopg.Connection[Any], name: str, plan: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of a prepared statement that runs by a plan of this kind, and the order of its parameters."""
    connection.execute(f"SET plan_cache_mode = force_{'custom' if 'these' in plan else 'generic'}_plan")
    order = prepare(connection, f"again_{name}", getattr(stream_statements_for("alkstore"), name))
    try:
        yield f"{'kept' if plan.startswith('kept') else 'again'}_{name}", order
    finally:
        connection.execute(f"DEALLOCATE again_{name}")


def read(connection: psycopg.Connection[Any], plan: str, after: int) -> Any:
    """Return how a page behind `after` was read, after seeing to it that it was found by indexes alone."""
    with planned(connection, "read", plan) as (prepared, order):
        values = READ_VALUES | {"after": str(after)}
        done = explain(connection, prepared, order, values, "ANALYZE, BUFFERS,")
    ways = [node["Node Type"] for node in nodes(done) if node.get("Relation Name") == "stream_event"]
    assert ways
    assert "Seq Scan" not in ways
    return done


@pytest.mark.parametrize("plan", PLANS)
def test_a_page_from_the_middle_costs_its_own_events(filled: psycopg.Connection[Any], plan: str) -> None:
    done = read(filled, plan, EVENTS // 2)
    assert done["Actual Rows"] == 101  # the last row says how it went
    assert buffers(done) < FEW


@pytest.mark.parametrize("plan", PLANS)
def test_a_look_at_the_end_of_a_long_stream_costs_next_to_nothing(filled: psycopg.Connection[Any], plan: str) -> None:
    done = read(filled, plan, EVENTS)
    assert done["Actual Rows"] == 1
    assert buffers(done) < FEW


@pytest.mark.parametrize("plan", PLANS)
def test_placing_new_events_costs_no_look_at_the_old_ones(filled: psycopg.Connection[Any], plan: str) -> None:
    with filled.transaction(force_rollback=True):
        filled.execute(
            "INSERT INTO alkstore.stream_event (stream, payload) SELECT 's', to_jsonb(n) FROM generate_series(1, 100) n"
        )
        done = read(filled, plan, EVENTS)
    assert done["Actual Rows"] == 101
    assert buffers(done) < FOR_A_HUNDRED_NEW_ONES


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rule", [{"keep": "100"}, {"keep": "NULL", "older_than": "'1 hour'"}], ids=["keep", "age"])
def test_a_portion_of_a_trim_costs_no_look_at_the_events_behind_it(
    filled: psycopg.Connection[Any], rule: dict[str, str], plan: str
) -> None:
    with filled.transaction(force_rollback=True), planned(filled, "trim", plan) as (prepared, order):
        done = explain(filled, prepared, order, TRIM_VALUES | rule, "ANALYZE, BUFFERS,")
    assert done["Actual Rows"] == 1000
    assert max(rows(node) for node in nodes(done)) <= 2000


def rows(node: dict[str, Any]) -> int:
    """Return how many rows a part of a plan has looked at."""
    return int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
