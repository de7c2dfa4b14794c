"""Which snapshot stores have the KV of which documents. Empty at first: it is known as attempts start."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "held_documents",
        sa.Column("store", sa.String(), nullable=False),
        sa.Column("lead", sa.String(), nullable=False),
        sa.Column("document_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["documents.id"],
            name=op.f("fk_held_documents_document_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("store", "lead", name=op.f("pk_held_documents")),
    )
    op.create_index("ix_held_documents_lead", "held_documents", ["lead"])
    op.create_index("ix_held_documents_document_id", "held_documents", ["document_id"])


def downgrade() -> None:
    op.drop_table("held_documents")
