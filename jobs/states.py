"""The life of a job: its states and the moves between them."""

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED})

_MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.CANCELLED, State.FAILED, State.EXPIRED}),
    # A worker that dies or drains gives its job back: running → queued.
    State.RUNNING: frozenset(
        {State.QUEUED, State.CANCELLING, State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED}
    ),
    # A job that ends in the moment in which it is cancelled keeps its real end.
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED}),
    # A failed or cancelled job may be retried on request.
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
    State.EXPIRED: frozenset({State.QUEUED}),
    State.SUCCEEDED: frozenset(),
}


def can_move(old: State, new: State) -> bool:
    """Whether a job in state `old` may become `new`."""
    return new in _MOVES[old]
