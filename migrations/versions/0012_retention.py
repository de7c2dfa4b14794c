"""What retention looks for. Documents that are there count as uploaded once."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("documents", sa.Column("uploaded_at", sa.Double(), nullable=False, server_default="0"))
    op.execute("UPDATE documents SET uploaded_at = created_at")
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])
    op.create_index("ix_audit_entries_item_id", "audit_entries", ["item_id"])


def downgrade() -> None:
    op.drop_index("ix_audit_entries_item_id", "audit_entries")
    op.drop_index("ix_jobs_finished_at", "jobs")
    op.drop_column("documents", "uploaded_at")
