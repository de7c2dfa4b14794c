"""What a caller asks for: one model per job type, every field bounded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
)

from jobs.languages import language_code


def _whole(value: object) -> object:
    # JSON has one kind of number, and JSON Schema's `integer` includes 1.0: some clients write it so.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number in a model that is strict: 1 and 1.0, but neither true nor "1"."""
Text = Annotated[str, Field(min_length=1, max_length=20_000)]
StopString = Annotated[str, StringConstraints(strip_whitespace=False, min_length=1, max_length=64)]
"""White space counts: a line end is a useful stop."""


def _http_url(url: str) -> str:
    # Printable ASCII: it goes into the head of a request.
    parts = urlsplit(url)
    if not url.isascii() or not url.isprintable() or " " in url or parts.scheme not in ("http", "https"):
        raise ValueError("http://host/path or https://host/path is accepted, in printable ASCII")
    if not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError("the URL needs a host, a port over 0 where it has one, and no user name")
    return url


Language = Annotated[str, Field(max_length=40), AfterValidator(language_code)]
CallbackUrl = Annotated[str, Field(max_length=2048), AfterValidator(_http_url)]


class _Reading(BaseModel):
    """What every job says."""

    # Strict: `true` is no number, and "0.7" is text.
    model_config = ConfigDict(
        extra="forbid", strict=True, str_strip_whitespace=True, use_attribute_docstrings=True
    )

    documents: list[str] = Field(min_length=1, max_length=64)
    """Document ids, in the order in which the model reads them."""
    model: str | None = None
    """Model id; the server's default where it is absent."""
    thinking: bool = False
    """Whether a model that can think is asked to. What it thinks is kept apart from the answer."""
    priority: Literal["high", "normal", "low"] = "normal"
    """A job is passed by a higher one that comes within 10 minutes after it, a low one within an hour."""
    callback_url: CallbackUrl | None = None
    """Where the end of the job is told, with a POST that is signed."""
    expires_after: Whole | None = Field(default=None, ge=1, le=2_592_000)
    """Seconds from acceptance after which an unfinished job expires; never where it is absent."""


class _Answering(_Reading):
    """What a job says that has answers."""

    max_output_tokens: Whole = Field(default=512, ge=1, le=32_768)
    """For each answer of the job, not for all of them together; thinking counts."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """0 takes the likeliest token each time; the filters and the seed then change nothing."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Whole = Field(default=0, ge=0, le=1000)
    """Only the k likeliest tokens; 0 for no limit."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Only tokens at least this likely in proportion to the likeliest."""
    repetition_penalty: float | None = Field(default=None, ge=1.0, le=2.0)
    """Makes tokens of the last 64 less likely; 1 is none. Absent: 1.1 for a summary, none elsewhere."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken once from the logit of every token that the answer holds."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from a token's logit for each time that the answer holds it."""
    seed: Whole | None = Field(default=None, ge=0, lt=2**32)
    """The same seed gives the same answer; the n-th question of a job counts from `seed` + n."""
    stop: list[StopString] = Field(default=[], max_length=8)
    """Strings that end an answer and are not part of it. Thinking is not searched."""
    reuse: bool = True
    """Whether stored prefixes may be read and written for this job."""


class Summarize(_Answering):
    """A summary of the documents, optionally with a focus ("the financial risks")."""

    type: Literal["summarize"] = "summarize"
    focus: Text | None = None
    """What to pay attention to above all."""
    language: Language | None = None
    """Of the summary, by its English name or its code; the model chooses where it is absent."""
    length: Literal["short", "medium", "long"] = "medium"
    """Some sentences, a paragraph, or several; `max_output_tokens` bounds it whatever is asked for."""


class Ask(_Answering):
    """One or many questions over the same documents; each is answered on its own."""

    type: Literal["ask"] = "ask"
    questions: list[Text] = Field(min_length=1, max_length=256)
    language: Language | None = None
    """Of the answers, by its English name or its code; the model chooses where it is absent."""


class Prompt(_Answering):
    """The caller's own instruction, placed after the documents."""

    type: Literal["prompt"] = "prompt"
    instruction: Text


class Warm(_Reading):
    """Only reads the documents and stores their prefix, so that a later job needn't."""

    type: Literal["warm"] = "warm"
    max_output_tokens: ClassVar[int] = 0
    reuse: ClassVar[bool] = True


JobSpec = Annotated[Summarize | Ask | Prompt | Warm, Field(discriminator="type")]

_adapter: TypeAdapter[Summarize | Ask | Prompt | Warm] = TypeAdapter(JobSpec)


def parse_spec(data: Any) -> Summarize | Ask | Prompt | Warm:
    """Validate a JSON-like object as a job.

    Raises:
        pydantic.ValidationError: with the path of each field that is wrong.
    """
    return _adapter.validate_python(data)


def num_outputs(spec: JobSpec) -> int:
    """How many answers a job has."""
    if isinstance(spec, Ask):
        return len(spec.questions)
    return 0 if isinstance(spec, Warm) else 1
