"""Plans and costs of the engine's statements, as the server tells them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg
    from sqlalchemy import TextClause


def prepare(sql: psycopg.Connection[Any], name: str, statement: TextClause) -> list[str]:
    """Prepare an SQLAlchemy statement on the server under `name`; return its parameters in their order."""
    order: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"${order.index(match[1]) + 1}"

    text = re.sub(r"(?<![:\w]):(\w+)", number, statement.text)
    sql.execute(f"PREPARE {name} AS {text}")
    return order


def explain(
    sql: psycopg.Connection[Any], name: str, order: list[str], values: Mapping[str, str], options: str = ""
) -> Any:
    """Return the plan of a prepared statement with these SQL literals for its parameters."""
    arguments = ", ".join(values[parameter] for parameter in order)
    row = sql.execute(f"EXPLAIN ({options} FORMAT JSON) EXECUTE {name} ({arguments})").fetchone()
    assert row is not None
    return row[0][0]["Plan"]


def nodes(plan: Any) -> Iterator[Any]:
    """Walk through a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(plan: Any) -> int:
    """Return how many pages a plan that was run has touched."""
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])
