"""What is told of a job where no terminal shows a bar."""

from __future__ import annotations

from cli.watch import Lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_comes_at_once_and_then_every_few_seconds_and_not_for_each_event() -> None:
    clock, told = Clock(), list[str]()
    lines = Lines(told.append, clock)
    for tenth in range(200):
        clock.now = tenth / 10
        lines.now(f"reading: {tenth}")
    assert told == ["reading: 0", "reading: 50", "reading: 100", "reading: 150"]


def test_a_job_that_waits_is_told_of_each_minute() -> None:
    clock, told = Clock(), list[str]()
    lines = Lines(told.append, clock)
    lines.now("waiting in the queue")
    for second in range(3600):
        clock.now = float(second)
        lines.tick()
    assert told[:2] == ["waiting in the queue", "waiting in the queue, for 1:00 so far"]
    assert len(told) == 60


def test_the_last_line_is_told_though_no_event_follows_it() -> None:
    clock, told = Clock(), list[str]()
    lines = Lines(told.append, clock)
    lines.now("waiting in the queue")
    clock.now = 1.0
    lines.now("started")
    clock.now = 6.0
    lines.tick()
    assert told == ["waiting in the queue", "started"]
