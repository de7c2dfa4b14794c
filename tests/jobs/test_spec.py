"""What a job may say of its answers."""

import pytest
from pydantic import ValidationError

from jobs import Ask, Warm, parse_spec

ASK = {"type": "ask", "documents": ["doc_1"], "questions": ["Who?"]}


def test_what_is_not_said_changes_nothing():
    spec = parse_spec(ASK)
    assert isinstance(spec, Ask)
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0, 1, 0, 0)
    assert (spec.presence_penalty, spec.frequency_penalty, spec.repetition_penalty) == (0, 0, None)
    assert (spec.stop, spec.thinking, spec.seed) == ([], False, None)


def test_white_space_in_a_stop_string_counts():
    assert parse_spec(ASK | {"stop": ["\n\n", " END "]}).stop == ["\n\n", " END "]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", -0.1, "0"),
        ("temperature", 2.1, "2"),
        ("top_p", 0.0, "0"),
        ("top_k", -1, "0"),
        ("top_k", 1001, "1000"),
        ("min_p", 1.1, "1"),
        ("presence_penalty", 2.5, "2"),
        ("frequency_penalty", -2.5, "-2"),
        ("repetition_penalty", 0.9, "1"),
        ("seed", 2**32, "4294967296"),
        ("stop", ["x"] * 9, "8"),
        ("stop", [""], "1"),
        ("stop", ["x" * 65], "64"),
        ("thinking", "perhaps", "bool"),
        ("thinking", "true", "bool"),
        ("thinking", 1, "bool"),
        ("temperature", True, "number"),
        ("temperature", "0.7", "number"),
        ("top_p", True, "number"),
        ("max_output_tokens", True, "integer"),
        ("max_output_tokens", "512", "integer"),
        ("max_output_tokens", 1.5, "integer"),
        ("seed", False, "integer"),
        ("expires_after", "60", "integer"),
        ("language", "", "German or de"),
        ("language", "Klingon", "no language of that name"),
        ("language", "germn", "is German"),
        ("language", "x" * 41, "40"),
        ("best_of", 2, "not permitted"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_the_field_and_the_bound(field, value, named):
    with pytest.raises(ValidationError) as caught:
        parse_spec(ASK | {field: value})
    first = caught.value.errors()[0]
    assert first["loc"][1] == field
    assert named in first["msg"]


def test_a_whole_number_may_be_written_as_a_fraction() -> None:
    spec = parse_spec(ASK | {"max_output_tokens": 64.0, "temperature": 1})
    assert (spec.max_output_tokens, spec.temperature) == (64, 1.0)
    assert isinstance(spec.max_output_tokens, int)


@pytest.mark.parametrize("given", ["de", "DE", "German", " german "])
def test_a_language_is_kept_as_its_code(given: str) -> None:
    assert parse_spec(ASK | {"language": given}).language == "de"
    assert parse_spec(ASK | {"language": "pt_br"}).language == "pt-BR"


@pytest.mark.parametrize("length", ["", "huge", 100, None])
def test_a_length_that_is_not_known_is_refused(length: object) -> None:
    with pytest.raises(ValidationError, match="length"):
        parse_spec({"type": "summarize", "documents": ["doc_1"], "length": length})


def test_a_warm_job_has_no_answer_to_say_anything_of():
    spec = parse_spec({"type": "warm", "documents": ["doc_1"], "priority": "low"})
    assert isinstance(spec, Warm)
    assert spec.model_dump(exclude_none=True) == {
        "type": "warm", "documents": ["doc_1"], "priority": "low", "thinking": False,
    }  # fmt: skip
    for field in ("max_output_tokens", "temperature", "reuse"):
        with pytest.raises(ValidationError, match="not permitted"):
            parse_spec({"type": "warm", "documents": ["doc_1"], field: 1})
