"""Jobs that expire."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("expiring", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("jobs", "expiring")
    op.drop_column("jobs", "expires_at")
