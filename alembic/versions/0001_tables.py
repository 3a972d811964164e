"""Version 1: all tables of the engine."""

from __future__ import annotations

import alkstore_sa.migrations
from alembic import context, op

revision = "alkstore_0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = context.get_x_argument(as_dictionary=True).get("schema", "alkstore")


def upgrade() -> None:
    alkstore_sa.migrations.upgrade(op, to=1, from_=0, schema=SCHEMA)


def downgrade() -> None:
    alkstore_sa.migrations.downgrade(op, to=0, from_=1, schema=SCHEMA)
