"""Answers that are written together are those that are written one by one."""

import pytest

from tests.worker.engine.near_ties import num_near_ties, recording
from tests.worker.engine.tiny import load_tiny
from worker.engine import engine as engine_module
from worker.engine import window
from worker.engine.batch import decode_batch, row_bytes
from worker.engine.engine import Document, Engine, Request, Sampling, Stopped
from worker.engine.memory import require_memory
from worker.engine.report import Silent
from worker.engine.speculate import DraftPolicy

QUESTIONS = [
    "When was the lighthouse built?",
    "Who was the keeper?",
    "What was the name of the ship?",
    "How many of the crew were saved, and how? Tell the whole story.",
    "Who built it?",
]
NOTE = [Document("n", "The lighthouse was built in 1871 by the harbour board. Its keeper was Agnes Tull.")]
WORDS = "the tide rose and the keeper wrote the hour and the height of the water "
NO_DRAFTS = DraftPolicy(0)


class Recording(Silent):
    def __init__(self):
        self.text, self.seen = "", []

    def delta(self, text):
        self.text += text

    def progress(self, phase, num_done, num_total, cached_tokens):
        self.seen.append((phase, num_done))


def requests(questions=QUESTIONS, report=None, **options):
    options = {"max_output_tokens": 24} | options
    return [Request(question, Sampling(**options), report or Silent()) for question in questions]


def one_by_one(engine, documents, wanted):
    return [engine.answer(documents, [request])[0] for request in wanted]


def check_same_tokens(model, documents, wanted, **engine_options):
    """Write the answers both ways; returns the batch's outputs."""
    model, recorder = recording(model)
    alone = Engine(model, None, drafts=NO_DRAFTS)
    one_by_one(alone, documents, wanted)
    single = recorder.take()
    outputs = Engine(model, None, drafts=NO_DRAFTS, **engine_options).answer(documents, wanted)
    batched = recorder.take()
    prompts = [alone._prompts.build(documents, request.instruction) for request in wanted]
    assert num_near_ties(model, prompts, single, batched) <= 1
    assert len({tuple(tokens) for tokens in single}) > 1
    return outputs


def test_a_batch_over_a_compressed_prefix_gives_the_tokens_of_single_runs(model, document):
    outputs = check_same_tokens(model, [document(330)], requests())
    assert [o.usage.cached_tokens for o in outputs] == [0, 330, 330, 330, 330]
    for output in outputs:
        usage = output.usage
        assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens


def test_a_batch_over_a_short_document_gives_the_tokens_of_single_runs(model):
    outputs = check_same_tokens(model, NOTE, requests())
    assert "1871" in outputs[0].text


def test_tails_that_outgrow_their_room_give_the_tokens_of_single_runs(tmp_path, smollm2):
    tiny = load_tiny(tmp_path, smollm2)
    outputs = check_same_tokens(tiny, [Document("d", WORDS * 11)], requests(max_output_tokens=90))
    num_tokens = [o.usage.prompt_tokens + o.usage.output_tokens for o in outputs]
    assert outputs[0].prefix == "none"
    assert outputs[0].usage.prompt_tokens < 256 < max(num_tokens)


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [
        ("llama", None),
        ("llama", {"type": "linear", "factor": 2.0}),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}),
        ("llama", {"type": "dynamic", "factor": 2.0}),
        (
            "phi3",
            {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [1 + i / 12 for i in range(24)]},
        ),
        ("qwen3", None),
        ("mixtral", None),
        ("smollm3", None),
    ],
)
def test_every_rotation_takes_rows_at_different_places(tmp_path, smollm2, model_type, scaling):
    changes = {"rope_scaling": scaling} if scaling else {}
    if model_type == "phi3":
        changes["original_max_position_embeddings"] = 2048
    tiny = load_tiny(tmp_path, smollm2, model_type, **changes)
    check_same_tokens(tiny, [Document("d", WORDS * 20)], requests(max_output_tokens=12))


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text", "gpt_oss", "mistral", "qwen2"])
@pytest.mark.parametrize("num_words", [1, 20], ids=["no blocks", "blocks"])
def test_windows_and_borrowed_layers_have_rows(tmp_path, smollm2, monkeypatch, model_type, num_words):
    """Of 48 tokens: shorter than the longest question with its answer, so that each row's moves."""
    monkeypatch.setattr(window, "SPARE_TOKENS", 16)
    tiny = load_tiny(tmp_path, smollm2, model_type)
    together = []
    monkeypatch.setattr(
        engine_module, "decode_batch", lambda *args: together.append(1) or decode_batch(*args)
    )
    check_same_tokens(tiny, [Document("d", WORDS * num_words)], requests(max_output_tokens=60))
    assert together == [1]


def test_a_seed_gives_one_text_alone_and_in_any_company(engine):
    def wanted(seeds):
        return [Request(QUESTIONS[3], Sampling(16, temperature=1.0, seed=s), Silent()) for s in seeds]

    alone = [output.text for output in one_by_one(engine, NOTE, wanted([1, 2, 3]))]
    assert [output.text for output in engine.answer(NOTE, wanted([1, 2, 3]))] == alone
    assert [output.text for output in engine.answer(NOTE, wanted([3, 9, 1]))][::2] == alone[::-2]
    assert len(set(alone)) == 3


def test_each_answer_has_its_own_length_stop_and_sampler(engine):
    wanted = [
        Request(QUESTIONS[0], Sampling(3), Silent()),
        Request(QUESTIONS[0], Sampling(40), Silent()),
        Request(QUESTIONS[0], Sampling(40, stop=("1871",)), Silent()),
        Request(QUESTIONS[0], Sampling(40, temperature=2.0, seed=4), Silent()),
    ]
    short, whole, stopped, wild = engine.answer(NOTE, wanted)
    assert (short.finish_reason, short.usage.output_tokens) == ("length", 3)
    assert whole.finish_reason == "stop"
    assert whole.text.startswith(short.text)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text.split("1871")[0].strip()
    assert wild.text != whole.text


def test_deltas_and_progress_belong_to_their_answer(engine):
    reports = [Recording() for _ in QUESTIONS]
    wanted = [Request(q, Sampling(24), r) for q, r in zip(QUESTIONS, reports, strict=True)]
    outputs = engine.answer(NOTE, wanted)
    assert [report.text.strip() for report in reports] == [output.text for output in outputs]
    for report, output in zip(reports, outputs, strict=True):
        assert ("prefill", output.usage.prompt_tokens) in report.seen
    decoding = [num_done for phase, num_done in reports[0].seen if phase == "decode"]
    assert decoding == sorted(decoding)
    assert set(decoding) == set(range(1, outputs[0].usage.output_tokens + 1))


def test_more_questions_than_the_memory_holds_wait_for_a_row(model, document):
    """Two rows fit: the third question is read when an answer has ended, and not before."""
    documents, order = [document(330)], []

    class Ordered(Silent):
        def __init__(self, index):
            self.index = index

        def progress(self, phase, num_done, num_total, cached_tokens):
            order.append((phase, self.index))

    def wanted():
        order.clear()
        return [Request(q, Sampling(12), Ordered(i)) for i, q in enumerate(QUESTIONS)]

    prompts = [Engine(model, None)._prompts.build(documents, q) for q in QUESTIONS]
    num_suffix = max(len(p.tokens) for p in prompts) - 320
    limit = 10**12
    needed = limit - require_memory("m", model.config, 320 + num_suffix + 12, limit, num_suffix, 12)
    row = row_bytes(model.new_cache(), 256)
    few = Engine(model, None, memory_bytes=needed + 2 * row).answer(documents, wanted())
    num_steps = order[: order.index(("prefill", 2))].count(("decode", 0))
    assert num_steps >= min(output.usage.output_tokens for output in few[:2]) > 3
    many = Engine(model, None).answer(documents, wanted())
    assert order[: order.index(("prefill", 4))].count(("decode", 0)) == 1
    assert [o.text for o in few] == [o.text for o in many]


def test_answers_too_long_for_the_dense_tail_are_written_one_by_one(engine):
    wanted = requests(max_output_tokens=2040)
    assert [o.text for o in engine.answer(NOTE, wanted)] == [o.text for o in one_by_one(engine, NOTE, wanted)]


def test_a_batch_stops_within_a_step(engine, document):
    documents = [document(330)]
    calls = []

    class Stopping(Silent):
        def check(self):
            calls.append("check")
            if decoded:
                raise Stopped("cancel")

        def progress(self, phase, num_done, num_total, cached_tokens):
            if phase == "decode" and num_done == 3:
                decoded.append(len(calls))

    decoded = []
    expected = [o.text for o in engine.answer(documents, requests())]
    with pytest.raises(Stopped):
        engine.answer(documents, requests(report=Stopping()))
    assert len(calls) == decoded[0] + 1
    assert [o.text for o in engine.answer(documents, requests())] == expected


def test_the_times_of_a_batch_add_up_to_the_clock(engine):
    outputs = engine.answer(NOTE, requests())
    assert all(o.timing.decode_s > 0 and o.timing.prefill_s > 0 for o in outputs)
    assert all(o.timing.time_to_first_token_s >= o.timing.prefill_s for o in outputs)
