"""A whole job through the engine: one output for each question, in order, whatever is written together."""

import pytest

from jobs import Ask, Prompt
from worker import tasks
from worker.engine.engine import Document
from worker.engine.report import Silent

NOTE = [Document("n", "The lighthouse was built in 1871 by the harbour board. Its keeper was Agnes Tull.")]


class Job:
    """A report of each output."""

    def __init__(self):
        self.texts = {}

    def output(self, index, num_outputs):
        self.texts[index, num_outputs] = []
        report = Silent()
        report.delta = self.texts[index, num_outputs].append
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
