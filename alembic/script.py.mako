"""${message}"""

from __future__ import annotations

from alembic import context, op

import alkstore_sa.migrations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

SCHEMA = context.get_x_argument(as_dictionary=True).get("schema", "alkstore")


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
