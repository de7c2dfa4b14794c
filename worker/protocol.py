"""What the worker parent and the engine child say to each other: one JSON object per line, over two pipes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from jobs import EventType, ModelCard, Problem, Result, RunRequest

CHILD_FDS = "LONGLEAF_CHILD_FDS"
"""Environment variable of the child: "r,w", the descriptors that it reads from and writes to."""


class Page(BaseModel):
    number: int
    start: int
    end: int
    """Character offsets into the document's text, end excluded."""


class DocumentText(BaseModel):
    id: str
    name: str
    text: str
    pages: list[Page] = Field(default_factory=list)


class Run(BaseModel):
    """Parent to child: do this attempt. A stop that came before it belongs to an earlier one."""

    op: Literal["run"] = "run"
    request: RunRequest
    documents: list[DocumentText]


class Stop(BaseModel):
    """Parent to child: end the attempt in hand; a child that has none ignores it."""

    op: Literal["stop"] = "stop"
    why: Literal["cancel", "release"]


class Ready(BaseModel):
    op: Literal["ready"] = "ready"
    card: ModelCard


class Refused(BaseModel):
    """The model cannot be loaded, and trying again would not help; the child exits with 3."""

    op: Literal["refused"] = "refused"
    problem: Problem


class ChildEvent(BaseModel):
    op: Literal["event"] = "event"
    type: Literal[EventType.PROGRESS, EventType.DELTA, EventType.OUTPUT, EventType.CHECKPOINT]
    data: dict[str, Any] = Field(default_factory=dict)


class End(BaseModel):
    """The attempt is over. `result` comes with succeeded, `problem` with failed."""

    op: Literal["end"] = "end"
    outcome: Literal["succeeded", "failed", "cancelled", "released"]
    result: Result | None = None
    problem: Problem | None = None


FromChild = Ready | Refused | ChildEvent | End
ToChild = Run | Stop

_from_child: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="op")])
_to_child: TypeAdapter[ToChild] = TypeAdapter(Annotated[ToChild, Field(discriminator="op")])


def encode(message: FromChild | ToChild) -> bytes:
    """One line, its end included."""
    return message.model_dump_json().encode() + b"\n"


def decode_from_child(line: bytes) -> FromChild:
    """Raises pydantic.ValidationError for a line that is not one of the child's messages."""
    return _from_child.validate_json(line)


def decode_to_child(line: bytes) -> ToChild:
    """Raises pydantic.ValidationError for a line that is not one of the parent's messages."""
    return _to_child.validate_json(line)
