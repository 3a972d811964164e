"""The plans of the hot statements, under the worst statistics that a queue's table can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from support.plans import explain, nodes, prepare

from alkstore_sa.statements import statements_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Databases

ROWS: Final = 1_000_000
IDS: Final = {"ids": "'{1,2,3}'", "leases": "'{1,2,3}'"}
HEAD: Final = {"queue": "'emails'", "n": "100", "worker_id": "'w'"}
MARKS: Final = {"priorities": "'{0}'", "run_ats": "'{2020-01-01 00:00+00}'", "ids": "'{0}'"}

HOT: Final[dict[str, dict[str, str]]] = {
    "claim_from_head": HEAD,
    "claim_from_marks": {**HEAD, **MARKS},
    "ack": IDS,
    "retry": {"id": "1", "lease": "1", "delay": "'1 s'", "error": "'x'"},
    "fail": {"id": "1", "lease": "1", "reason": "'failed'", "error": "'x'"},
    "release": IDS,
    "heartbeat": {**IDS, "extend": "NULL"},
    "get_job": {"id": "1", "queue": "'emails'"},
    "cancel": {"id": "1", "queue": "'emails'"},
    "next_due": {"queue": "'emails'"},
    "sweep_expired": {"n": "1000"},
    "sweep_spent": {"n": "1000"},
    "sweep_spent_of_queue": {"n": "1000", "queue": "'emails'"},
}

STATISTICS: Final = {
    "never vacuumed, never analyzed": "",
    "vacuumed and analyzed while it was empty": "VACUUM (ANALYZE) alkstore.job",
}


@pytest.fixture(scope="module", params=list(STATISTICS.values()), ids=list(STATISTICS))
def filled(databases: Databases, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A million jobs, on a connection which has planned every statement while the table was empty."""
    for database in databases.clone():
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute("ALTER TABLE alkstore.job SET (autovacuum_enabled = false)")
            if request.param:
                connection.execute(request.param)
            for name, values in HOT.items():
                order = prepare(connection, name, getattr(statements_for("alkstore"), name))
                connection.execute("SET plan_cache_mode = force_generic_plan")
                explain(connection, name, order, values)
            connection.execute(
                "INSERT INTO alkstore.job (queue, payload)"
                " SELECT 'emails', to_jsonb(n) FROM generate_series(1, %s) AS n",
                [ROWS],
            )
            yield connection


@pytest.mark.parametrize("plan", ["kept from when the table was empty", "made for any values", "made for these values"])
@pytest.mark.parametrize("name", HOT)
def test_every_hot_statement_goes_through_an_index_on_a_million_rows(
    filled: psycopg.Connection[Any], name: str, plan: str
) -> None:
    order = list(_parameters(name))
    if plan == "kept from when the table was empty":
        filled.execute("SET plan_cache_mode = force_generic_plan")
        prepared = name
    else:
        filled.execute(f"SET plan_cache_mode = {'force_generic_plan' if 'any' in plan else 'force_custom_plan'}")
        prepared = f"again_{name}"
        prepare(filled, prepared, getattr(statements_for("alkstore"), name))
    found = list(nodes(explain(filled, prepared, order, HOT[name])))
    if prepared != name:
        filled.execute(f"DEALLOCATE {prepared}")
    scans = {
        (node["Node Type"], node.get("Index Name"))
        for node in found
        if node["Node Type"].endswith("Scan")
        and node["Node Type"] != "Bitmap Heap Scan"  # its index is the node below
        and (node.get("Relation Name") == "job" or node.get("Index Name"))
    }
    by_id = {("Index Scan", "pk_job"), ("Bitmap Index Scan", "pk_job"), ("Index Scan", "pk_dead")}
    in_order = {("Index Scan", "ix_job_claim"), ("Index Only Scan", "ix_job_claim")}
    if name == "next_due":  # it looks at all that is due, which is next to nothing when it is asked
        in_order.add(("Bitmap Index Scan", "ix_job_claim"))
    by_time = {
        (kind, f"ix_job_{index}")
        for kind in ("Index Scan", "Bitmap Index Scan")
        for index in ("expires_at", "spent_at")
    }
    assert scans
    if name.startswith("sweep"):
        assert scans <= by_id | by_time
    else:
        assert scans <= by_id | (in_order if name in {"claim_from_head", "claim_from_marks", "next_due"} else set())


@pytest.mark.parametrize("name", ["claim_from_head", "claim_from_marks"])
def test_a_claim_sorts_nothing(filled: psycopg.Connection[Any], name: str) -> None:
    filled.execute("SET plan_cache_mode = force_custom_plan")
    plan = explain(filled, name, list(_parameters(name)), HOT[name])
    assert not [node for node in nodes(plan) if node["Node Type"] == "Sort"]


def _parameters(name: str) -> list[str]:
    """Return the parameters of a statement in the order in which `prepare` numbered them."""
    order: list[str] = []

    class Recorder:
        def execute(self, _: str) -> None: ...

    order.extend(prepare(Recorder(), name, getattr(statements_for("alkstore"), name)))  # type: ignore[arg-type]
    return order
