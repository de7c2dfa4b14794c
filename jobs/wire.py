"""What passes between the API and the workers through Redis: names of keys and the payloads.

The queue carries a `RunRequest` (one attempt at one job) as the only argument of `RUN_FUNCTION`.
Events come back on `EVENT_STREAM`. A stop travels as the state of `control_key(job_id)`, which
the worker polls: a message that nobody heard would be lost, a key is not.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field

from jobs.models import ModelCard
from jobs.spec import JobSpec

VERSION = "0.1.0"
"""Which Longleaf this is, for people; programs compare `PROTOCOL`."""
PROTOCOL = 3
"""Grows with every change of what passes that the other side, a version older or newer, would misread."""
RUN_FUNCTION = "worker.run.run_job"
EVENT_STREAM = "longleaf:events"
EVENT_GROUP = "recorder"
CONTROL_KEY = "longleaf:control:"
WORKER_KEY = "longleaf:worker:"
MEETING_KEY = "longleaf:meeting:"


class DocumentRef(BaseModel):
    """A document that a job reads; the worker fetches the text over HTTP and checks the digest."""

    id: str = Field(pattern=r"^[0-9A-Za-z_-]+$")
    """It becomes part of a path: nothing in it leads elsewhere."""
    name: str
    text_sha256: str
    num_chars: int


class RunRequest(BaseModel):
    """One attempt at one job."""

    job_id: str
    attempt: int = Field(ge=1)
    """Grows by one whenever the job is handed out again; events of older attempts are ignored."""
    spec: JobSpec
    documents: list[DocumentRef]
    owed: list[int] | None = None
    """The outputs that are wanted, by index; None for all. What earlier attempts have answered is not asked
    again."""
    prefix_salt: str = Field(default="", pattern=r"^(?:[0-9a-f]{2})*$")
    """Hexadecimal; the tenant's own, with which chains of block keys begin: tenants share no prefixes."""


class Control(BaseModel):
    """What a worker that runs the job must obey."""

    cancel: bool = False
    """Attempt `min_attempt` is to end as cancelled."""
    min_attempt: int = 1
    """A worker on an older attempt stops at once and reports nothing."""


class WorkerStatus(BaseModel):
    """A worker's presence, stored as JSON with an expiry of `lease_s`, renewed while it lives."""

    name: str
    pid: int
    host: str
    state: Literal["loading", "idle", "busy", "draining"]
    model: str
    card: ModelCard | None = None
    """None until the model is loaded."""
    store: str = ""
    """Name of its snapshot store, the same after a restart."""
    job_id: str | None = None
    attempt: int | None = None
    lead: str | None = None
    """Of the job in hand: what its documents are, as a digest (`jobs.dispatch`)."""
    phase: Literal["load", "restore", "prefill", "decode"] | None = None
    """Of the job in hand, as it was within some seconds, like `eta_s`."""
    eta_s: float | None = None
    """Seconds to the end of that phase; None while unknown."""
    prefill_tokens_per_s: float | None = None
    """Of the last long prefill; None before the first."""
    started_at: float
    lease_s: float


def queue_name(model: str) -> str:
    """The RQ queue that serves `model`."""
    return "longleaf." + re.sub(r"[^A-Za-z0-9._-]", "--", model)


def run_id(job_id: str, attempt: int) -> str:
    """The RQ job id of one attempt: the same attempt is never queued twice under two names.

    RQ takes letters, digits, underscores and dashes only.
    """
    return f"{job_id}-{attempt}"


def control_key(job_id: str) -> str:
    return CONTROL_KEY + job_id


def worker_key(name: str) -> str:
    return WORKER_KEY + name


def meeting_key(mark: str) -> str:
    """What the API leaves in its Redis for a worker that joins: who sees it is at the same one."""
    return MEETING_KEY + mark
