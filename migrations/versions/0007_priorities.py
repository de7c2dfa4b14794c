"""The order in which jobs wait. Those that are there keep theirs, as of normal priority."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("rank", sa.Double(), nullable=False, server_default="0"))
    op.execute("UPDATE jobs SET rank = created_at + 600")
    op.create_index("ix_jobs_state_rank", "jobs", ["state", "rank"])


def downgrade() -> None:
    op.drop_index("ix_jobs_state_rank", "jobs")
    op.drop_column("jobs", "rank")
