"""Scripts of environments that ask for the driver's own paramstyle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from support.catalog import has_schema
from support.revisions import Application

from alkstore_sa import migrations

if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


@pytest.mark.parametrize("schema", ["100%", "%s %(x)s", "a:b"])
def test_a_schema_has_its_own_name_in_a_script_whatever_the_paramstyle(
    empty: Database, tmp_path: Path, schema: str
) -> None:
    application = Application(tmp_path, empty)
    env = tmp_path / "env.py"
    env.write_text(env.read_text().replace(', dialect_opts={"paramstyle": "named"}', ""))
    application.add_revision(f"op.alkstore_upgrade(to={migrations.LATEST}, from_=0, schema={schema!r})", "pass")
    with psycopg.connect(empty.dsn, autocommit=True) as connection:
        connection.execute(application.script().encode())
        assert has_schema(connection, schema)
