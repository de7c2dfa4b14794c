"""What a caller asks for: one model per job type, every field bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Text = Annotated[str, Field(min_length=1, max_length=20_000)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    documents: list[str] = Field(min_length=1, max_length=64)
    """Document ids, in the order in which the model reads them."""
    model: str | None = None
    """Model id; the server's default where it is absent."""
    max_output_tokens: int = Field(default=512, ge=1, le=32_768)
    """For each answer of the job, not for all of them together."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, ge=1.0, le=2.0)
    """Makes tokens of the last 64 less likely; 1 is none. Absent: 1.1 for a summary, none elsewhere."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    reuse: bool = True
    """Whether stored prefixes may be read and written for this job."""
    expires_after: int | None = Field(default=None, ge=1, le=2_592_000)
    """Seconds from acceptance after which an unfinished job expires; never where it is absent."""


class Summarize(_Spec):
    """A summary of the documents, optionally with a focus ("the financial risks")."""

    type: Literal["summarize"] = "summarize"
    focus: Text | None = None


class Ask(_Spec):
    """One or many questions over the same documents; each is answered on its own."""

    type: Literal["ask"] = "ask"
    questions: list[Text] = Field(min_length=1, max_length=256)


class Prompt(_Spec):
    """The caller's own instruction, placed after the documents."""

    type: Literal["prompt"] = "prompt"
    instruction: Text


JobSpec = Annotated[Summarize | Ask | Prompt, Field(discriminator="type")]

_adapter: TypeAdapter[Summarize | Ask | Prompt] = TypeAdapter(JobSpec)


def parse_spec(data: Any) -> Summarize | Ask | Prompt:
    """Validate a JSON-like object as a job.

    Raises:
        pydantic.ValidationError: with the path of each field that is wrong.
    """
    return _adapter.validate_python(data)
