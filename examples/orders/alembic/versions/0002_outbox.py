"""The library's tables, version 1, in a schema of their own.

Importing `alkstore_sa.migrations` gives `op` the two operations. For type checkers, which cannot know that,
`alkstore_sa.migrations.upgrade(op, ...)` and `downgrade(op, ...)` do the same.
"""

import alkstore_sa.migrations  # noqa: F401
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.alkstore_upgrade(to=1, from_=0, schema="alkstore")  # type: ignore[attr-defined]


def downgrade() -> None:
    op.alkstore_downgrade(to=0, from_=1, schema="alkstore")  # type: ignore[attr-defined]
