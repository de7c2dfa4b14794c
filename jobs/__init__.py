"""What the API, the workers and the clients all must mean by a job: request, states, events, result.

Pydantic models and names only. It knows no database, no queue library and no model.
"""

from jobs.events import Event, EventType, Progress
from jobs.models import ModelCard
from jobs.result import Output, Problem, Result, Timing, Usage
from jobs.spec import Ask, JobSpec, Prompt, Summarize, Warm, num_outputs, parse_spec
from jobs.states import TERMINAL, State, can_move
from jobs.wire import (
    CONTROL_KEY,
    EVENT_GROUP,
    EVENT_STREAM,
    PROTOCOL,
    RUN_FUNCTION,
    VERSION,
    WORKER_KEY,
    Control,
    DocumentRef,
    RunRequest,
    WorkerStatus,
    control_key,
    meeting_key,
    queue_name,
    run_id,
    worker_key,
)

__all__ = [
    "CONTROL_KEY",
    "EVENT_GROUP",
    "EVENT_STREAM",
    "PROTOCOL",
    "RUN_FUNCTION",
    "TERMINAL",
    "VERSION",
    "WORKER_KEY",
    "Ask",
    "Control",
    "DocumentRef",
    "Event",
    "EventType",
    "JobSpec",
    "ModelCard",
    "Output",
    "Problem",
    "Progress",
    "Prompt",
    "Result",
    "RunRequest",
    "State",
    "Summarize",
    "Timing",
    "Usage",
    "Warm",
    "WorkerStatus",
    "can_move",
    "control_key",
    "meeting_key",
    "num_outputs",
    "parse_spec",
    "queue_name",
    "run_id",
    "worker_key",
]
