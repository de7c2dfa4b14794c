"""Secrets of callbacks that can be exchanged. Those that are there stay what they are."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("num_rotations", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("tenants", sa.Column("old_key_until", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "old_key_until")
    op.drop_column("tenants", "num_rotations")
