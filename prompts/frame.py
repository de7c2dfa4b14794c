"""What a chat template writes around the user's message, where the documents and the instruction go.

A mark is rendered in the message's place and looked for in the text. So it doesn't matter what the template
does with white space, system messages, parts or dates, and no document can take one of its branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prompts.errors import PromptError
from prompts.template import ChatTemplate, Message, RenderError
from prompts.thinking import Stage, ThinkingTags, tags_of

SYSTEM = "You answer from the document that the user gives you. You are brief and exact."
MARK = "LongleafUserMessage"
"""Letters alone: nothing that a template would trim, split at or escape."""


@dataclass(frozen=True)
class Frame:
    before: str
    after: str
    stage: Stage
    """Where the answer's text begins: in or before thinking, or in the answer of a model that knows none."""


def find_frame(template: ChatTemplate, thinking: bool, tags: ThinkingTags | None = None) -> Frame:
    """Find the place of the user's message.

    Args:
        tags: the model's tags of thinking; those that the template names where None.

    Raises:
        PromptError: `no_chat_template` if the template carries no user's message, and why.
    """
    why: list[str] = []
    for messages, variables in _attempts():
        try:
            text = template.render(messages, thinking, **variables)
        except RenderError as error:
            why.append(f"it fails with «{error}»")
            continue
        num_marks = text.count(MARK)
        if num_marks == 1 and SYSTEM in text:
            before, after = text.split(MARK)
            return _staged(before, after, thinking, tags or tags_of(template.source))
        if num_marks != 1:
            why.append(f"it shows the user's message {num_marks} times")
    raise PromptError(
        "no_chat_template",
        f"the model's chat template can't carry a question about a document: {why[0]}; "
        "put its makers' template into the model folder as chat_template.jinja, or choose another model",
    )


def _attempts() -> Iterator[tuple[Sequence[Message], dict[str, Any]]]:
    """Messages and variables, the usual ones first.

    The system's words open the user's message where a template refuses or drops a system message. Some
    templates take parts alone, some fail without tools.
    """
    variables: tuple[dict[str, Any], ...] = (
        {"tools": None, "documents": None},
        {"tools": [], "documents": [], "functions": "[]"},
    )
    for more in variables:
        for content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            yield (
                [{"role": "system", "content": content(SYSTEM)}, {"role": "user", "content": content(MARK)}],
                more,
            )
            system = {"role": "system", "content": content(SYSTEM)}
            yield [system, {"role": "user", "content": content(MARK)}], more
            yield [{"role": "user", "content": content(f"{SYSTEM}\n\n{MARK}")}], more


def _staged(before: str, after: str, thinking: bool, tags: ThinkingTags | None) -> Frame:
    if tags is None:
        return Frame(before, after, "answer")
    if tags.answer and not thinking:
        return Frame(before, after + tags.answer, "answer")
    is_open = after.rfind(tags.open) > after.rfind(tags.close)
    return Frame(before, after, "thinking" if is_open else "before")
