"""How an answer ends, what is said while it is made, and that drafts change nothing of it."""

import mlx.core as mx
import pytest

from tests.worker.engine.conftest import BOOK
from tests.worker.engine.near_ties import num_near_ties, recording
from tests.worker.engine.tiny import load_tiny
from worker.engine.decode import forward
from worker.engine.engine import Document, Engine, EngineError, Request, Sampling
from worker.engine.report import Silent
from worker.engine.sampling import token_ids
from worker.engine.speculate import DraftPolicy

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


@pytest.mark.parametrize("window", [None, 48])
def test_reading_a_token_evaluates_all_that_its_step_wrote(tmp_path, smollm2, window):
    """Were a layer's keys left to be computed, each step would add to what is kept for that."""
    model = load_tiny(tmp_path, smollm2, "mistral" if window else "llama")
    cache = model.new_cache()
    held = []
    for token in range(3, 43):
        token_ids([mx.argmax(forward(model, cache, mx.array([[token]]))[:, -1], axis=-1)])
        held.append(mx.get_active_memory())
    assert held[-1] <= held[9]


def test_all_refusals_come_before_any_work(engine):
    report = Recording()
    wanted = [Request("q", Sampling(n), report) for n in (4, 8192)]
    with pytest.raises(EngineError, match="8,192"):
        engine.answer(NOTE, wanted)
    assert report.seen == []


def test_one_seed_gives_one_text(engine):
    def sample(seed):
        sampling = Sampling(12, temperature=1.0, top_p=0.95, seed=seed)
        return engine.generate(NOTE, "Write a poem.", sampling, Silent()).text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_seed_does_not_depend_on_the_jobs_before(engine):
    wanted = Sampling(8, temperature=1.0, seed=5)
    first = engine.generate(NOTE, "Write a poem.", wanted, Silent()).text
    engine.generate(NOTE, "Write a poem.", Sampling(3, temperature=1.0), Silent())
    assert engine.generate(NOTE, "Write a poem.", wanted, Silent()).text == first


def test_a_stop_string_ends_an_answer_and_is_not_said(engine):
    report = Recording()
    # Three tokens: digits come one by one.
    sampling = Sampling(40, stop=("871", "never"))
    output = engine.generate(NOTE, "When was the lighthouse built?", sampling, report)
    assert output.finish_reason == "stop"
    assert output.text.endswith("1")
    assert "871" not in output.text
    assert report.text.strip() == output.text
    whole = engine.generate(NOTE, "When was the lighthouse built?", Sampling(40), Silent())
    assert whole.text.startswith(output.text + "871")
    assert output.usage.output_tokens < whole.usage.output_tokens


QUOTE = "Repeat the text above word for word, from its first word to its last."
RETELL = "Tell what happened, in your own words."
ALWAYS = DraftPolicy(7)
NEVER = DraftPolicy(0)


@pytest.mark.parametrize(
    ("question", "options", "all_right"),
    [
        (QUOTE, {}, True),
        (QUOTE, {"temperature": 0.3, "seed": 11}, False),
        (RETELL, {"temperature": 0.7, "seed": 12, "top_p": 0.9, "frequency_penalty": 0.2}, False),
    ],
)
def test_drafts_change_no_token(model, question, options, all_right):
    model, recorder = recording(model)
    documents, sampling = [Document("d", BOOK * 2)], Sampling(40, **options)
    plain = Engine(model, None, drafts=NEVER).generate(documents, question, sampling, Silent())
    engine = Engine(model, None, drafts=ALWAYS)
    drafted = engine.generate(documents, question, sampling, Silent())
    without, with_drafts = recorder.take()
    if sampling.temperature == 0:
        prompt = engine._prompts.build(documents, question)
        assert num_near_ties(model, [prompt], [without], [with_drafts]) == 0
    assert with_drafts == without
    assert drafted.text == plain.text
    assert (plain.usage.drafted_tokens, plain.usage.accepted_tokens) == (0, 0)
    usage = drafted.usage
    assert 0 < usage.accepted_tokens < usage.output_tokens == plain.usage.output_tokens
    assert (usage.accepted_tokens == usage.drafted_tokens) == all_right


def test_an_answer_with_drafts_keeps_its_limit_and_its_stop(model):
    engine = Engine(model, None, drafts=ALWAYS)
    for limit in (1, 2, 9):
        output = engine.generate(NOTE, QUOTE, Sampling(limit), Silent())
        assert (output.usage.output_tokens, output.finish_reason) == (limit, "length")
    stopped = engine.generate(NOTE, QUOTE, Sampling(40, stop=("harbour",)), Silent())
    assert stopped.text.endswith("by the")


def test_a_cache_that_saw_drafts_answers_the_next_question_as_before(model, document):
    documents = [document(330)]
    engine = Engine(model, None, drafts=ALWAYS)
    first = engine.generate(documents, "Who?", Sampling(12), Silent()).text
    quoted = engine.generate(documents, QUOTE, Sampling(30), Silent())
    assert quoted.usage.drafted_tokens > 0
    again = engine.generate(documents, "Who?", Sampling(12), Silent())
    assert again.usage.cached_tokens == 320
    assert again.text == first


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
    assert problem.params["prompt_tokens"] == len(engine._prompts.build(long, "q").tokens) > 9000
    assert f"{problem.params['prompt_tokens']:,}" in problem.detail
    assert "8,192" in problem.detail
