"""A whole job through the engine: one output for each question, in order, whatever is written together."""

from typing import Any

import pytest

from cache_store import SnapshotStore, stored_prefixes
from jobs import Ask, Prompt, Summarize, Warm
from worker import tasks
from worker.engine.engine import Document, Engine, EngineError
from worker.engine.report import Silent
from worker.tasks.run import instructions

NOTE = [Document("n", "The lighthouse was built in 1871 by the harbour board. Its keeper was Agnes Tull.")]


class Job:
    """A report of each output."""

    def __init__(self):
        self.texts, self.done = {}, []

    def output(self, index, num_outputs, question):
        self.texts[index, num_outputs] = []
        report = Silent()
        report.delta = self.texts[index, num_outputs].append
        report.done = lambda output: self.done.append((index, question, output))
        return report


def ask(engine, questions, **options):
    job = Job()
    spec = Ask(documents=["d"], questions=questions, **{"max_output_tokens": 16} | options)
    return tasks.run(engine, spec, NOTE, job), job


def test_outputs_follow_the_questions(engine):
    questions = ["When was it built?", "Who kept the light?", "Who built it?"]
    result, job = ask(engine, questions)
    assert [output.question for output in result.outputs] == questions
    assert list(job.texts) == [(0, 3), (1, 3), (2, 3)]
    for said, output in zip(job.texts.values(), result.outputs, strict=True):
        assert "".join(said).strip() == output.text
    assert "1871" in result.outputs[0].text
    usages = [output.usage for output in result.outputs]
    assert result.usage.output_tokens == sum(u.output_tokens for u in usages)
    assert result.usage.prompt_tokens == sum(u.prompt_tokens for u in usages)
    assert result.timing.decode_s == pytest.approx(sum(o.timing.decode_s for o in result.outputs))


def test_each_question_draws_with_the_next_seed(engine):
    many, _ = ask(engine, ["Write a poem."] * 3, temperature=1.0, seed=5)
    texts = [output.text for output in many.outputs]
    assert len(set(texts)) == 3
    third, _ = ask(engine, ["Write a poem."], temperature=1.0, seed=7)
    assert third.outputs[0].text == texts[2]


def test_an_answer_is_told_as_soon_as_it_is_complete(engine: Engine) -> None:
    """The others of its batch go on: the shortest is told first."""
    questions = ["Tell the whole story.", "When was it built?"]
    result, job = ask(engine, questions, max_output_tokens=40)
    assert [index for index, _, _ in job.done] == sorted(
        range(2), key=lambda index: result.outputs[index].usage.output_tokens
    )
    for index, question, output in job.done:
        assert question == questions[index]
        whole = result.outputs[index]
        assert (output.text, output.usage, output.timing) == (whole.text, whole.usage, whole.timing)


def test_the_answers_that_are_owed_are_those_that_they_would_be_among_all(engine: Engine) -> None:
    questions = ["Write a poem.", "Who kept the light?", "Write a poem."]
    many, _ = ask(engine, questions, temperature=1.0, seed=5)
    job = Job()
    spec = Ask(documents=["d"], questions=questions, max_output_tokens=16, temperature=1.0, seed=5)
    some = tasks.run(engine, spec, NOTE, job, owed=[2])
    assert [(output.index, output.question) for output in some.outputs] == [(2, questions[2])]
    assert some.outputs[0].text == many.outputs[2].text
    assert list(job.texts) == [(2, 3)]
    assert (some.num_outputs, some.complete) == (3, False)
    nothing = tasks.run(engine, spec, NOTE, Job(), owed=[])
    assert (nothing.outputs, nothing.usage.prompt_tokens) == ([], 0)


def test_the_fields_of_a_job_reach_the_answer(engine):
    spec = Prompt(
        documents=["d"],
        instruction="When was the lighthouse built?",
        max_output_tokens=40,
        stop=["187"],
        temperature=1.0,
        top_k=1,
    )
    output = tasks.run(engine, spec, NOTE, Job()).outputs[0]
    assert output.finish_reason == "stop"
    assert "built" in output.text
    assert "187" not in output.text
    assert output.thinking is None


def test_a_warm_job_leaves_a_prefix_that_the_first_question_is_answered_from(model, store, document, answer):
    text, job = document(460), Job()
    result = tasks.run(Engine(model, store), Warm(documents=["d"]), [text], job)
    assert (result.type, result.outputs, list(job.texts)) == ("warm", [], [(0, 1)])
    usage = result.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens, usage.output_tokens) == (
        448, 0, 448, 0,
    )  # fmt: skip
    (stored,) = stored_prefixes(store)
    assert (stored.key.hex, stored.num_tokens) == (result.prefix_id, 448)
    first = answer(Engine(model, store), text)
    assert first.usage.cached_tokens == 448
    assert first.text == answer(Engine(model, None), text).text


def test_what_was_read_before_is_not_read_again_to_warm_it(model, store, document, answer):
    engine, text = Engine(model, store), document(460)
    answer(engine, text)
    for warmed in (engine.warm([text], Silent()), Engine(model, store).warm([text], Silent())):
        assert (warmed.usage.cached_tokens, warmed.usage.prefilled_tokens) == (448, 0)
        assert warmed.prefix_id == stored_prefixes(store)[0].key.hex


def test_what_is_not_stored_has_no_prefix_id(model, store, tmp_path, document):
    no_room = SnapshotStore(tmp_path / "tiny", budget_bytes=10_000, min_free_bytes=0)
    for engine, num_tokens in (
        (Engine(model, store), 190), (Engine(model, no_room), 330), (Engine(model, None), 330),
    ):  # fmt: skip
        assert engine.warm([document(num_tokens)], Silent()).prefix_id is None


def test_documents_over_the_context_are_not_warmed(engine, document):
    with pytest.raises(EngineError, match="context of 8,192"):
        engine.warm([document(8200)], Silent())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "Summarize the document above in one paragraph."),
        ({"language": "de"}, "Summarize the document above in German in one paragraph."),
        ({"length": "short"}, "Summarize the document above in one or two sentences."),
        ({"length": "long", "documents": ["d", "e"]}, "Summarize the documents above in several paragraphs."),
        (
            {"focus": "{costs}"},
            "Summarize the document above in one paragraph.\nPay attention above all to: {costs}",
        ),
    ],
)
def test_a_summary_is_asked_for_as_the_job_says(options: dict[str, Any], wanted: str) -> None:
    assert instructions(Summarize(**{"documents": ["d"]} | options)) == [(None, wanted)]


def test_a_question_is_asked_in_the_language_of_the_job() -> None:
    spec = Ask(documents=["d", "e"], questions=["Why {x}?"], language="French")
    asked = "Question: Why {x}?\nAnswer in French in one sentence, from the documents above."
    assert instructions(spec) == [("Why {x}?", asked)]
