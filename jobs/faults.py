"""What is wrong with a value that was given, in our words: API, command, settings and worker say it alike.

pydantic finds the fault; what it says of it is written for programmers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOOK = "/docs lists the fields"

_NETWORKS = "networks such as 10.0.0.0/8 or fd00::/8 are wanted"
_WANTED = {
    "string_type": "text is wanted",
    "int_type": "a whole number is wanted",
    "int_parsing": "a whole number is wanted",
    "int_parsing_size": "a whole number of fewer digits is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "float_parsing": "a number is wanted",
    "finite_number": "a finite number is wanted",
    "bool_type": "true or false is wanted",
    "bool_parsing": "true or false is wanted",
    "list_type": "a list is wanted",
    "dict_type": "an object with fields is wanted",
    "model_type": "an object with fields is wanted",
    "model_attributes_type": "an object with fields is wanted",
    "greater_than": "a number over {gt} is wanted",
    "greater_than_equal": "{ge} is the least",
    "less_than": "a number below {lt} is wanted",
    "less_than_equal": "{le} is the most",
    "literal_error": "{expected} is wanted",
    "enum": "{expected} is wanted",
    "union_tag_invalid": "one of {expected_tags} is wanted",
    "string_pattern_mismatch": "an id is wanted, as the API gives it",
    "byte_size": "a number of bytes is wanted, or one with a unit such as 20GB",
    "byte_size_unit": "a number of bytes is wanted, or one with a unit such as 20GB",
    "ip_any_network": _NETWORKS,
    "ip_v4_network": _NETWORKS,
    "ip_v6_network": _NETWORKS,
    "path_type": "a path is wanted",
}
"""By pydantic's kind of fault: what is accepted. What was given follows it."""
_SENTENCES = {
    "missing": "it is required and was not given",
    "extra_forbidden": f"there is no such field here: leave it out ({LOOK})",
    "union_tag_not_found": "the field type is required: it says what kind of job this is",
    "string_too_long": "at most {max_length:,} characters are accepted, and it has {length:,}",
    "string_unicode": "it holds half of a character (a lone surrogate), which is no text",
    "too_long": "at most {max_length:,} are accepted, and there are {actual_length:,}",
    "too_short": "at least {min_length:,} is wanted, and there are {actual_length:,}",
}
"""The same where what was given is not repeated."""

SHOWN_CHARS = 80


def told(error: Mapping[str, Any]) -> str:
    """One of the errors of a pydantic.ValidationError, as a sentence that names limit and value."""
    kind, value = error["type"], error.get("input")
    context = {name: _plain(limit) for name, limit in (error.get("ctx") or {}).items()}
    if kind == "string_too_short":
        return (
            "it is empty"
            if not str(value).strip()
            else f"at least {context['min_length']} characters are wanted"
        )
    if kind in _SENTENCES:
        length = len(value) if isinstance(value, str) else 0
        context["actual_length"] = context.get("actual_length") or length
        return _SENTENCES[kind].format(length=length, **context)
    if kind == "union_tag_invalid":
        value = context["tag"]
    if kind in _WANTED:
        return f"{_WANTED[kind].format(**context)}, not {shown(value)}"
    if kind == "value_error":  # of our own validators
        return f"{shown(value)} is not accepted: {context.get('error', error['msg'])}"
    return f"{shown(value)} is not accepted here"


def expected(error: Mapping[str, Any]) -> str:
    """The same without the value, for who shows that otherwise."""
    kind = error["type"]
    context = {name: _plain(limit) for name, limit in (error.get("ctx") or {}).items()}
    if kind in _WANTED:
        return _WANTED[kind].format(**context)
    return str(context.get("error", error["msg"])) if kind == "value_error" else told(error)


def shown(value: Any) -> str:
    """A value as part of a sentence: as JSON has it, and cut where it is long."""
    if isinstance(value, str):
        if len(value) > SHOWN_CHARS:
            return f"{value[:SHOWN_CHARS]!r}… ({len(value)} characters)"
        return repr(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, int | float):
        return str(_plain(value))
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, dict) else type(value).__name__


def _plain(value: Any) -> Any:
    """2 and not 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def field_path(loc: Sequence[str | int]) -> str:
    """`("questions", 0)` → `questions[0]`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
