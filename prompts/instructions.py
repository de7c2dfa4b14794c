"""What a job asks of the model: for each of its outputs the words that follow the documents."""

from __future__ import annotations

from jobs import Ask, Prompt, Summarize
from jobs.languages import LANGUAGES

SUMMARIZE = "Summarize the {documents} above{language} in {length}."
LENGTHS = {"short": "one or two sentences", "medium": "one paragraph", "long": "several paragraphs"}
FOCUS = "Pay attention above all to: {focus}"
ASK = "Question: {question}\nAnswer{language} in one sentence, from the {documents} above."


def instructions(spec: Summarize | Ask | Prompt) -> list[tuple[str | None, str]]:
    """(question, instruction) for each output of a job."""
    if isinstance(spec, Prompt):
        return [(None, spec.instruction)]
    words = {
        "documents": "document" if len(spec.documents) == 1 else "documents",
        "language": f" in {LANGUAGES[spec.language]}" if spec.language else "",
    }
    if isinstance(spec, Ask):
        return [(q, ASK.format(question=q, **words)) for q in spec.questions]
    wanted = SUMMARIZE.format(length=LENGTHS[spec.length], **words)
    return [(None, wanted if spec.focus is None else f"{wanted}\n{FOCUS.format(focus=spec.focus)}")]
