"""Tenants and API keys. What is there belongs to the default tenant."""

import secrets
import time

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    tenants = op.create_table(
        "tenants",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.bulk_insert(
        tenants,
        [{"id": "default", "name": "default", "secret": secrets.token_hex(32), "created_at": time.time()}],
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    for table in ("documents", "jobs", "idempotency_keys"):
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("tenant_id", sa.String(), nullable=False, server_default="default"))
            batch.create_foreign_key(
                op.f(f"fk_{table}_tenant_id"), "tenants", ["tenant_id"], ["id"], ondelete="CASCADE"
            )
    # The default was for the rows that were there: whoever forgets the tenant must not get one.
    with op.batch_alter_table("documents") as batch:
        batch.alter_column("tenant_id", server_default=None)
        batch.drop_constraint("uq_documents_sha256", type_="unique")
        batch.create_unique_constraint(op.f("uq_documents_tenant_id_sha256"), ["tenant_id", "sha256"])
        batch.create_index("ix_documents_tenant_id_id", ["tenant_id", "id"])
    with op.batch_alter_table("jobs") as batch:
        batch.alter_column("tenant_id", server_default=None)
        batch.create_index("ix_jobs_tenant_id_id", ["tenant_id", "id"])
    with op.batch_alter_table("idempotency_keys") as batch:
        batch.alter_column("tenant_id", server_default=None)
        batch.drop_constraint("pk_idempotency_keys", type_="primary")
        batch.create_primary_key(op.f("pk_idempotency_keys"), ["tenant_id", "key"])


def downgrade() -> None:
    with op.batch_alter_table("idempotency_keys") as batch:
        batch.drop_constraint("pk_idempotency_keys", type_="primary")
        batch.drop_constraint("fk_idempotency_keys_tenant_id", type_="foreignkey")
        batch.create_primary_key(op.f("pk_idempotency_keys"), ["key"])
        batch.drop_column("tenant_id")
    with op.batch_alter_table("jobs") as batch:
        batch.drop_index("ix_jobs_tenant_id_id")
        batch.drop_constraint("fk_jobs_tenant_id", type_="foreignkey")
        batch.drop_column("tenant_id")
    with op.batch_alter_table("documents") as batch:
        batch.drop_index("ix_documents_tenant_id_id")
        batch.drop_constraint("uq_documents_tenant_id_sha256", type_="unique")
        batch.drop_constraint("fk_documents_tenant_id", type_="foreignkey")
        batch.create_unique_constraint(op.f("uq_documents_sha256"), ["sha256"])
        batch.drop_column("tenant_id")
    op.drop_table("api_keys")
    op.drop_table("tenants")
