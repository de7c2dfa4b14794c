"""What the child says of a job whose outputs are written together."""

import io

import pytest

from jobs import EventType, Output, Timing, Usage
from worker import child, protocol
from worker.engine.errors import Stopped


@pytest.fixture
def channel():
    return child.Channel(io.BytesIO(), io.BytesIO())


def sent(channel, kind):
    lines = channel._writer.getvalue().splitlines()
    events = [protocol.decode_from_child(line) for line in lines]
    return [event.data for event in events if event.type == kind]


def test_text_of_alternating_outputs_carries_its_index(channel, monkeypatch):
    monkeypatch.setattr(child, "DELTA_INTERVAL_S", 0.0)
    job = child.JobReport(channel)
    first, second = (job.output(i, 2) for i in range(2))
    for a, b in (("one", "two"), (" more", " again")):
        first.delta(a)
        second.delta(b)
    assert [(d["output_index"], d["text"]) for d in sent(channel, EventType.DELTA)] == [
        (0, "one"),
        (1, "two"),
        (0, " more"),
        (1, " again"),
    ]


def test_text_is_gathered_by_output_and_sent_at_the_end(channel, monkeypatch):
    monkeypatch.setattr(child, "DELTA_INTERVAL_S", 1e6)
    job = child.JobReport(channel)
    first, second = (job.output(i, 2) for i in range(2))
    for text in ("a", "b"):
        first.delta(text)
        second.delta(text.upper())
    assert sent(channel, EventType.DELTA) == []
    job.flush()
    job.flush()
    assert [(d["output_index"], d["text"]) for d in sent(channel, EventType.DELTA)] == [(0, "ab"), (1, "AB")]


def test_what_an_ended_output_has_left_goes_out_with_anothers_text(channel, monkeypatch):
    monkeypatch.setattr(child, "DELTA_INTERVAL_S", 1e6)
    job = child.JobReport(channel)
    first, second = (job.output(i, 2) for i in range(2))
    first.delta("the end")
    monkeypatch.setattr(child, "DELTA_INTERVAL_S", 0.0)
    second.delta("going on")
    assert [d["output_index"] for d in sent(channel, EventType.DELTA)] == [0, 1]


def test_progress_names_its_output_and_counts_only_what_it_saw(channel):
    report = child.JobReport(channel).output(3, 5)
    report.progress("prefill", 320, 400, 320)
    report.progress("decode", 40, 64, 320)
    prefill, decode = sent(channel, EventType.PROGRESS)
    assert (prefill["output_index"], prefill["num_outputs"]) == (3, 5)
    # 40 tokens were written while another output was reported: nothing is known of their pace.
    assert (decode["num_done"], decode["tokens_per_s"], decode["eta_s"]) == (40, 0.0, None)


def test_a_complete_answer_goes_out_after_its_last_text(channel: child.Channel) -> None:
    job = child.JobReport(channel)
    first, second = (job.output(i, 2, f"Question {i}?") for i in range(2))
    first.delta("on it")
    second.delta("the end")
    usage = Usage(output_tokens=2)
    output = Output(text="the end", finish_reason="stop", usage=usage, timing=Timing(), prefix="none")
    second.done(output)
    # The delta of a batch's other answers stays held back.
    assert [d["text"] for d in sent(channel, EventType.DELTA)] == ["the end"]
    (data,) = sent(channel, EventType.OUTPUT)
    told = Output.model_validate(data)
    assert (told.index, told.question, told.text, told.usage) == (1, "Question 1?", "the end", usage)
    assert channel._writer.getvalue().splitlines()[-1].count(b"output.done") == 1


def test_a_stop_reaches_every_output(channel):
    job = child.JobReport(channel)
    reports = [job.output(i, 2) for i in range(2)]
    for report in reports:
        report.check()
    channel.stop = "cancel"
    for report in reports:
        with pytest.raises(Stopped):
            report.check()


def test_what_an_earlier_attempt_had_prefilled_is_not_this_ones_speed(channel, monkeypatch):
    now = 0.0
    monkeypatch.setattr(child.time, "monotonic", lambda: now)
    report = child.JobReport(channel).output(0, 1)
    report.progress("restore", 5000, 10000, 0)
    report.progress("prefill", 5000, 10000, 0)
    now = 10.0
    report.progress("prefill", 6000, 10000, 0)
    last = sent(channel, EventType.PROGRESS)[-1]
    assert last["tokens_per_s"] == 100.0
    assert last["eta_s"] == 40.0
