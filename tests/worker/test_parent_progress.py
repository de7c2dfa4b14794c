"""Which progress reaches the stream, by a clock that the test owns."""

from typing import Any

from worker.progress import ProgressGate


def report(phase: str, num_done: int, output_index: int = 0) -> dict[str, Any]:
    return {"phase": phase, "num_done": num_done, "output_index": output_index}


def test_first_progress_of_a_phase_passes_at_once() -> None:
    assert ProgressGate(0.0).offer(report("prefill", 1), 0.0) == [report("prefill", 1)]


def test_progress_passes_at_most_twice_a_second() -> None:
    gate = ProgressGate(0.0)
    sent = [data for i in range(1, 101) for data in gate.offer(report("prefill", i), i / 50)]
    assert len(sent) == 4


def test_last_progress_of_a_phase_always_passes() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("prefill", 1), 0.0)
    assert gate.offer(report("prefill", 9), 0.1) == []
    assert gate.offer(report("decode", 0), 0.2) == [report("prefill", 9), report("decode", 0)]


def test_next_output_is_a_new_stage() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("decode", 1), 0.0)
    gate.offer(report("decode", 5), 0.1)
    assert gate.offer(report("decode", 0, 1), 0.2) == [report("decode", 5), report("decode", 0, 1)]


def test_held_progress_passes_when_its_time_comes() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("prefill", 1), 0.0)
    gate.offer(report("prefill", 2), 0.1)
    assert gate.tick(0.4) == []
    assert gate.tick(0.5) == [report("prefill", 2)]
    assert gate.tick(1.0) == []


def test_held_progress_is_flushed_at_the_end() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("decode", 1), 0.0)
    gate.offer(report("decode", 2), 0.1)
    assert gate.flush() == [report("decode", 2)]
    assert gate.flush() == []


def test_silence_repeats_the_last_progress_every_fifteen_seconds() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("prefill", 1), 0.0)
    assert gate.tick(14.9) == []
    assert gate.tick(15.0) == [report("prefill", 1)]
    assert gate.tick(29.9) == []
    assert gate.tick(30.0) == [report("prefill", 1)]


def test_child_that_only_writes_text_is_not_silent() -> None:
    gate = ProgressGate(0.0)
    gate.offer(report("decode", 1), 0.0)
    gate.heard(10.0)
    assert gate.tick(15.0) == []


def test_silence_before_any_progress_is_reported_as_loading() -> None:
    assert [data["phase"] for data in ProgressGate(0.0).tick(15.0)] == ["load"]
