"""What a document's text lacks, and the names that a job's documents had when it was accepted."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("documents", sa.Column("warnings", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("job_documents", sa.Column("name", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("job_documents", "name")
    op.drop_column("documents", "warnings")
