"""What a worker is given for a job's current attempt, read from the database."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from api import outputs
from api.models import Document, Job, JobDocument, Tenant
from api.tenants import prefix_salt
from jobs import DocumentRef, RunRequest, parse_spec


def run_request(session: Session, job: Job) -> RunRequest:
    """The request, its documents in the order and by the names that they had when the job was accepted.

    A name that a later upload gives to the same content changes no prompt: an attempt reads what the first
    one read, and finds its stored prefix.
    """
    query = (
        select(Document, JobDocument.name)
        .join(JobDocument, JobDocument.document_id == Document.id)
        .where(JobDocument.job_id == job.id)
        .order_by(JobDocument.position)
    )
    documents = [
        DocumentRef(id=row.id, name=name or row.name, text_sha256=row.text_sha256, num_chars=row.num_chars)
        for row, name in session.execute(query)
    ]
    return RunRequest(
        job_id=job.id,
        attempt=job.attempt,
        spec=parse_spec(job.spec),
        documents=documents,
        owed=outputs.owed(session, job),
        prefix_salt=prefix_salt(session.get_one(Tenant, job.tenant_id)),
    )
