"""What `longleaf up` writes to may end, stop, or be full; the parts' lines are lost then and nothing else."""

from __future__ import annotations

import os
import sys
from datetime import datetime

import pytest
from honcho.printer import Message

from cli.output import KeepingPrinter, Output


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb"):
        Output(write).write("a line\n")


def test_a_reader_that_has_stopped_reading_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.output._PATIENCE_S", 0.01)
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
        out = Output(write)
        for _ in range(100):
            out.write("x" * 10_000 + "\n")  # more than any pipe holds
        os.read(read, 1 << 20)
        out.write("it reads again\n")
        assert os.read(read, 1 << 20).endswith(b"it reads again\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_no_error() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(fd, "wb"):
        Output(fd).write("a line\n")


def test_letters_that_are_no_text_are_written_all_the_same() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
        Output(write).write("é \udcff\n")
        assert os.read(read, 100) == "é \\udcff\n".encode()


def test_a_part_steers_no_terminal_with_its_lines(capfd: pytest.CaptureFixture[str]) -> None:
    printer = KeepingPrinter()
    line = "answer \x1b[2J\x1b]0;title\x07 \u202ekcatta".encode()
    printer.write(Message("line", line, datetime(2026, 11, 30), "worker", None))
    printed = capfd.readouterr().out
    assert "kcatta" in printed
    assert printed.removesuffix("\n").isprintable()
    assert all(kept.isprintable() for kept in printer.last_lines("worker"))
