"""The answers of a job that are complete, each kept as soon as it is, until the job's result has them all.

A job that ends otherwise than well has these for its result, and its next attempt asks only for the others.
Every function works inside the caller's transaction.
"""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from api.models import Job, JobOutput
from jobs import Output, Result


def keep(session: Session, job: Job, output: Output) -> bool:
    """Keep an answer; False where that one is kept already, and then the first stands.

    Raises LookupError where the job has no such output.
    """
    if not 0 <= output.index < job.num_outputs:
        raise LookupError(f"{job.id} has {job.num_outputs} outputs and none of index {output.index}")
    if session.get(JobOutput, (job.id, output.index)) is not None:
        return False
    session.add(JobOutput(job_id=job.id, output_index=output.index, output=output.model_dump(mode="json")))
    session.flush()
    job.num_done += 1
    job.version += 1
    return True


def owed(session: Session, job: Job) -> list[int] | None:
    """The indices of the outputs that are not complete; None where none is."""
    query = select(JobOutput.output_index).where(JobOutput.job_id == job.id)
    done = set(session.scalars(query))
    return [index for index in range(job.num_outputs) if index not in done] if done else None


def partial(session: Session, job: Job) -> Result | None:
    """What a job has so far; None where no output is complete."""
    outputs = _kept(session, job)
    return Result.of(job.type, job.model, outputs, job.num_outputs) if outputs else None


def whole(session: Session, job: Job, last: Result) -> Result:
    """The job's result: what its last attempt brought, and what was kept of the ones before.

    Raises LookupError where outputs are missing, or are there that the job has not.
    """
    if job.num_outputs == 0:
        return last
    outputs = {output.index: output for output in (*_kept(session, job), *last.outputs)}
    if sorted(outputs) != list(range(job.num_outputs)):
        raise LookupError(
            f"{job.num_outputs} outputs are owed, and there are those of index {sorted(outputs)}"
        )
    session.execute(delete(JobOutput).where(JobOutput.job_id == job.id))
    job.num_done = job.num_outputs
    return Result.of(last.type, last.model, list(outputs.values()), job.num_outputs)


def _kept(session: Session, job: Job) -> list[Output]:
    query = select(JobOutput.output).where(JobOutput.job_id == job.id)
    return [Output.model_validate(output) for output in session.scalars(query)]
