"""Limits of API keys. Keys that are there have none."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = {
    "requests_per_minute": sa.Integer(),
    "max_queued_jobs": sa.Integer(),
    "max_document_bytes": sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
}


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("api_keys", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("api_keys", name)
