"""Each kind of fault that the fields can have is told in words that need no knowledge of pydantic."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from jobs import parse_spec
from jobs.faults import told

ASK = {"type": "ask", "documents": ["doc_1"], "questions": ["Who?"]}
MISSING = object()
LANGUAGE = "no language of that name is known here: give its English name or its code, as German or de"
URL = "http://host/path or https://host/path is accepted, in printable ASCII"


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("questions", MISSING, "it is required and was not given"),
        ("questions", "Who?", "a list is wanted, not 'Who?'"),
        ("questions", [], "at least 1 is wanted, and there are 0"),
        ("questions", ["a"] * 257, "at most 256 are accepted, and there are 257"),
        ("questions", [1], "text is wanted, not 1"),
        ("questions", [" "], "it is empty"),
        ("questions", ["a" * 20_001], "at most 20,000 characters are accepted, and it has 20,001"),
        ("questions", ["\ud800"], "it holds half of a character (a lone surrogate), which is no text"),
        ("model", {"id": "m"}, "text is wanted, not an object"),
        ("colour", 1, "there is no such field here: leave it out (/docs lists the fields)"),
        ("temperature", 3, "2 is the most, not 3"),
        ("temperature", True, "a number is wanted, not true"),
        ("temperature", float("nan"), "2 is the most, not nan"),
        ("top_p", 0, "a number over 0 is wanted, not 0"),
        ("seed", 2**32, "a number below 4294967296 is wanted, not 4294967296"),
        ("seed", 10**400, "a number below 4294967296 is wanted, not a number of more than 20 digits"),
        ("max_output_tokens", "512", "a whole number is wanted, not '512'"),
        ("max_output_tokens", 0, "1 is the least, not 0"),
        ("thinking", "yes", "true or false is wanted, not 'yes'"),
        ("priority", "now", "'high', 'normal' or 'low' is wanted, not 'now'"),
        ("language", "", "'' is not accepted: " + LANGUAGE),
        ("callback_url", "ftp://host/", "'ftp://host/' is not accepted: " + URL),
        ("type", MISSING, "the field type is required: it says what kind of job this is"),
        ("type", "dance", "one of 'summarize', 'ask', 'prompt', 'warm' is wanted, not 'dance'"),
    ],
)  # fmt: skip
def test_a_fault_is_told_in_our_words(field: str, value: Any, wanted: str) -> None:
    spec = {name: given for name, given in (ASK | {field: value}).items() if given is not MISSING}
    with pytest.raises(ValidationError) as caught:
        parse_spec(spec)
    assert told(caught.value.errors()[0]) == wanted


def test_a_body_that_is_no_object_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec([])
    sentence = told(caught.value.errors()[0])
    assert sentence == "an object with fields is wanted, not a list"
    assert not re.search("pydantic|Input|valid", sentence)
