"""The orders table."""

import sqlalchemy as sa

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("number", sa.String(), primary_key=True),
        sa.Column("customer", sa.String(), nullable=False),
        sa.Column("amount", sa.Numeric(10, 2), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
    )
    op.create_index("ix_orders_customer", "orders", ["customer"])


def downgrade() -> None:
    op.drop_table("orders")
