"""Roles with few rights, and engines that act as them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Database


def make_role(database: Database) -> Iterator[str]:
    """Yield a new role without any right beyond those of PUBLIC; remove it and all that is its own afterwards."""
    name = f"alkstore_test_role_{secrets.token_hex(6)}"
    role = sql.Identifier(name)
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(role))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


def acting_as(role: str, driver: str, **settings: str) -> dict[str, Any]:
    """Return the `connect_args` that make every connection act as `role`, with server settings as given."""
    settings["role"] = role
    if driver == "asyncpg":
        return {"server_settings": settings}
    return {"options": " ".join(f"-c {name}={value}" for name, value in settings.items())}
