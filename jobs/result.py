"""What a finished job holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field


class Usage(BaseModel):
    """Token counts. prompt_tokens = cached_tokens + prefilled_tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens whose KV was there: from a stored prefix, or from the job's first question."""
    prefilled_tokens: int = 0
    output_tokens: int = 0
    """Thinking's included."""
    drafted_tokens: int = 0
    """Tokens guessed from the prompt and the answer so far, and checked several at a time."""
    accepted_tokens: int = 0
    """Guesses that were right; they are among the output tokens."""


class Timing(BaseModel):
    """Seconds, measured by the worker."""

    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Answers that are written together share the time of each step evenly, so sums are true."""
    time_to_first_token_s: float = 0.0
    """From the start of the work on this output to its first token."""


class Output(BaseModel):
    """One answer."""

    index: int = 0
    """Which answer of the job, from 0: that to its question of the same index."""
    text: str
    question: str | None = None
    thinking: str | None = None
    """What the model thought before it answered; None if it didn't."""
    finish_reason: Literal["stop", "length", "repetition"]
    """`stop` by the model or a stop string, `length` at max_output_tokens, `repetition` in a loop."""
    usage: Usage
    timing: Timing
    prefix: Literal["none", "exact", "continued"]
    """How the document's KV was made: `exact` (each layer saw exact keys and values),
    `continued` (newer blocks attended to decoded older ones), `none` (too short to store)."""


class Result(BaseModel):
    """The result of a job: one output for summarize and prompt, one per question for ask, none for warm.

    From a worker it holds what its attempt was asked for; a job's own holds all that is complete.
    """

    type: str
    model: str
    outputs: list[Output]
    usage: Usage
    """Of a warm job: the tokens of the prefix."""
    timing: Timing
    num_outputs: int = 0
    """How many the job was asked for."""
    complete: bool = True
    """Whether all of them are there. A job that ended otherwise than well may have a part."""
    prefix_id: str | None = None
    """Of a warm job: the prefix that is stored; None where none is, too short or without room."""

    @classmethod
    def of(cls, type: str, model: str, outputs: Sequence[Output], num_outputs: int) -> Result:
        """The result that these outputs make, in their order: counts and times add up."""
        ordered = sorted(outputs, key=lambda output: output.index)
        timing = _total(Timing, [output.timing for output in ordered])
        if ordered:
            # The first token of the job is that of its first output.
            timing.time_to_first_token_s = ordered[0].timing.time_to_first_token_s
        return cls(
            type=type,
            model=model,
            outputs=ordered,
            usage=_total(Usage, [output.usage for output in ordered]),
            timing=timing,
            num_outputs=num_outputs,
            complete=len(ordered) == num_outputs,
        )


M = TypeVar("M", bound=BaseModel)


def _total(kind: type[M], parts: Sequence[M]) -> M:
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in kind.model_fields})


class Problem(BaseModel):
    """Why a job failed; the same words as in the API's problem+json."""

    code: str
    """Stable and machine-readable, such as `context_exceeded`."""
    detail: str
    """One sentence that names the limit, the value and the next step."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The numbers in `detail`, for programs."""
