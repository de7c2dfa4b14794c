"""Pauses between a job's attempts. None pauses at first."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("not_before", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "not_before")
