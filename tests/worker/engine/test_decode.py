"""How an answer ends, and what is said while it is made."""

import pytest

from worker.engine.answer import is_loop
from worker.engine.engine import Document, EngineError, Sampling
from worker.engine.report import Silent

NOTE = [Document("n", "The lighthouse was built in 1871 by the harbour board.")]


class Recording(Silent):
    def __init__(self):
        self.text, self.seen = "", []

    def delta(self, text):
        self.text += text

    def progress(self, phase, num_done, num_total, cached_tokens):
        self.seen.append((phase, num_done, num_total, cached_tokens))


def test_the_deltas_are_the_text(engine):
    report = Recording()
    output = engine.generate(NOTE, "When was the lighthouse built?", Sampling(40), report)
    assert report.text.strip() == output.text
    assert "1871" in output.text
    assert output.finish_reason == "stop"


def test_the_limit_ends_an_answer(engine):
    output = engine.generate(NOTE, "Write a long poem.", Sampling(5), Silent())
    assert output.finish_reason == "length"
    assert output.usage.output_tokens == 5


def test_one_seed_gives_one_text(engine):
    def sample(seed):
        sampling = Sampling(12, temperature=1.0, top_p=0.95, seed=seed)
        return engine.generate(NOTE, "Write a poem.", sampling, Silent()).text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_penalty_changes_what_repeats(engine):
    repeat = "Repeat the word tide forever: tide tide tide tide tide tide"
    free = engine.generate(NOTE, repeat, Sampling(30), Silent())
    penalised = engine.generate(NOTE, repeat, Sampling(30, repetition_penalty=1.5), Silent())
    assert penalised.text != free.text


def test_progress_counts_up_to_the_whole_prompt(engine, document):
    report = Recording()
    first = engine.generate([document(330)], "When?", Sampling(3), report)
    prefill = [s for s in report.seen if s[0] == "prefill"]
    done = [num_done for _, num_done, _, _ in prefill]
    assert done == sorted(done)
    assert done[-1] == first.usage.prompt_tokens
    assert {cached for *_, cached in prefill} == {0}
    report = Recording()
    second = engine.generate([document(330)], "Who?", Sampling(3), report)
    assert {cached for phase, *_, cached in report.seen if phase == "prefill"} == {320}
    assert second.usage.cached_tokens == 320


def test_a_document_over_the_context_is_refused_with_both_counts(engine):
    long = [Document("n", "word " * 9000)]
    with pytest.raises(EngineError) as caught:
        engine.generate(long, "q", Sampling(16), Silent())
    problem = caught.value.problem
    assert problem.code == "context_exceeded"
    assert problem.params["context_tokens"] == 8192
    assert problem.params["prompt_tokens"] == engine.count_tokens(long, "q") > 9000
    assert f"{problem.params['prompt_tokens']:,}" in problem.detail
    assert "8,192" in problem.detail


@pytest.mark.parametrize("period", [1, 7, 32])
def test_a_text_that_repeats_is_a_loop(period):
    tokens = list(range(100, 150)) + list(range(period)) * (1 + 96 // period)
    assert is_loop(tokens)


def test_an_ordinary_text_is_none():
    assert not is_loop(list(range(500)))
    assert not is_loop([1, 2] * 20)
    assert not is_loop(list(range(40)) * 6)
