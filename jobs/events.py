"""What happens to a job, in the words that the stream, the database and SSE all use."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, Field


class EventType(StrEnum):
    QUEUED = "job.queued"
    STARTED = "job.started"
    PROGRESS = "job.progress"
    CHECKPOINT = "job.checkpoint"
    DELTA = "output.delta"
    OUTPUT = "output.done"
    """An answer is complete: it is kept whatever becomes of the job."""
    CANCELLING = "job.cancelling"
    SUCCEEDED = "job.succeeded"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    EXPIRED = "job.expired"
    # Worker to recorder only: the attempt ended without an end of the job.
    RELEASED = "attempt.released"
    """The worker drained (SIGTERM): the job goes back to the front of its queue."""
    LOST = "attempt.lost"
    """The engine process died under the job: it is tried again, up to a limit."""


class Progress(BaseModel):
    """The data of `job.progress`. Sent by the clock, not by the chunk."""

    phase: Literal["load", "restore", "prefill", "decode"]
    num_done: int
    """Tokens done in this phase. Layer-major prefill counts token-layers divided by layers."""
    num_total: int
    tokens_per_s: float
    eta_s: float | None
    """Seconds to the end of this phase; None while unknown."""
    cached_tokens: int
    output_index: int = 0
    """Which answer of the job, from 0."""
    num_outputs: int = 1


class Event(BaseModel):
    """One event as a worker puts it on the stream, fenced by `(job_id, attempt)`."""

    job_id: str
    attempt: int = Field(ge=1)
    type: EventType
    worker: str
    at: float
    """Seconds since the epoch, by the worker's clock; informative only, never used to order."""
    data: dict[str, Any] = Field(default_factory=dict)
    """progress: Progress · output.delta: {output_index, text} · output.done: Output · succeeded: Result ·
    failed and attempt.lost: Problem · started: {store} · checkpoint: {num_tokens, exact}."""
