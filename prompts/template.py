"""A model folder's chat template: where it is stored, and how it is rendered.

It is rendered as transformers does it (the same sandbox, filters, functions and variables), but always on one
day: a date that changed would give every day's prompt other tokens before the document.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prompts.errors import PromptError

THE_DAY = datetime.datetime(2024, 7, 26, 12)
"""Templates print it as today's date. Llama 3's own default is this day."""

Message = Mapping[str, Any]
"""`role` and `content`; the content is text or a list of parts."""


class RenderError(Exception):
    """The template refuses these messages or fails on them; the message says how."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model writes, for training; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": THE_DAY.strftime}
    return made


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Such as `bos_token`: what the template may write by name."""

    def render(self, messages: Sequence[Message], thinking: bool, **variables: Any) -> str:
        """The text of a conversation, up to where the model goes on.

        Args:
            thinking: told to the template under the names that templates ask for.
            variables: more of them, such as `tools`.

        Raises:
            RenderError: the template refuses the messages, or cannot be rendered at all.
        """
        given = {
            **self.special_tokens,
            "add_generation_prompt": True,
            "enable_thinking": thinking,
            "thinking": thinking,
            "date_string": f"{THE_DAY:%d %b %Y}",
            "datetime": f"{THE_DAY:%Y-%m-%d}",
            **variables,
        }
        try:
            return _environment().from_string(self.source).render(messages=messages, **given)
        except Exception as error:  # A template is a program from elsewhere: it may fail in any way.
            raise RenderError(str(error) or type(error).__name__) from error


def read_template(folder: Path) -> ChatTemplate:
    """The chat template of a model folder, from the places where transformers looks for it.

    Raises:
        PromptError: `no_chat_template` if there is none, `model_unreadable` if a file is damaged.
    """
    try:
        config = _read_object(folder / "tokenizer_config.json")
        special = _special_tokens(_read_object(folder / "special_tokens_map.json")) | _special_tokens(config)
        alone = folder / "chat_template.jinja"
        source = alone.read_text(encoding="utf-8") if alone.is_file() else None
        if source is None:
            source = _named_default(config.get("chat_template"))
        if source is None:
            source = _named_default(_read_object(folder / "chat_template.json").get("chat_template"))
    except (OSError, ValueError) as error:
        raise PromptError(
            "model_unreadable", f"the tokenizer's files in {folder} cannot be read: {error}"
        ) from error
    if source is None:
        raise PromptError(
            "no_chat_template",
            f"{folder} has no chat template (chat_template.jinja, or one in tokenizer_config.json), "
            "as base models have none: choose the model's instruct or chat version",
        )
    return ChatTemplate(source, special)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is stored as its text, or as an object that has it under `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _named_default(value: Any) -> str | None:
    """The template; of several with names the one called `default`, else the first."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    if isinstance(value, dict) and value:
        found = value.get("default", next(iter(value.values())))
        return found if isinstance(found, str) else None
    return None
