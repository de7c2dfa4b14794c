"""Answers that are complete before their job is. Results that are there are whole, and say so from now on."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

jobs = sa.table(
    "jobs",
    sa.column("id", sa.Text),
    sa.column("state", sa.Text),
    sa.column("type", sa.Text),
    sa.column("spec", sa.JSON),
    sa.column("num_outputs", sa.Integer),
    sa.column("num_done", sa.Integer),
)
results = sa.table("job_results", sa.column("job_id", sa.Text), sa.column("result", sa.JSON))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("num_outputs", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("num_done", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "job_outputs",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("output_index", sa.Integer(), nullable=False),
        sa.Column("output", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_outputs_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "output_index", name=op.f("pk_job_outputs")),
    )
    connection = op.get_bind()
    for job in connection.execute(sa.select(jobs.c.id, jobs.c.state, jobs.c.type, jobs.c.spec)).all():
        num = {"ask": len(job.spec.get("questions", ())), "warm": 0}.get(job.type, 1)
        done = num if job.state == "succeeded" else 0
        connection.execute(jobs.update().where(jobs.c.id == job.id).values(num_outputs=num, num_done=done))
    # One at a time: answers may be long.
    for (job_id,) in connection.execute(sa.select(results.c.job_id)).all():
        of_job = results.c.job_id == job_id
        old = connection.execute(sa.select(results.c.result).where(of_job)).scalar_one()
        connection.execute(results.update().where(of_job).values(result=_whole(old)))


def downgrade() -> None:
    op.drop_table("job_outputs")
    op.drop_column("jobs", "num_done")
    op.drop_column("jobs", "num_outputs")


def _whole(result: dict[str, Any]) -> dict[str, Any]:
    outputs = [{"index": index, **output} for index, output in enumerate(result["outputs"])]
    return {**result, "outputs": outputs, "num_outputs": len(outputs), "complete": True}
