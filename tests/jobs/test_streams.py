"""Programs that are started with closed standard streams, or a locale without the letters of a path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_OPENS_A_FILE = """
import os, sys
from jobs import streams
streams.prepare()
with open(sys.argv[1], "w") as file:
    print("to the output")
    print("to the errors", file=sys.stderr)
    sys.stdin.read()
    os.write(2, b"a library's warning")
    file.write(str(file.fileno() > 2))
"""


def run(code: str, *words: str, close: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """The code in a shell that closes some of the standard streams first."""
    command = ["/bin/sh", "-c", f'exec "$0" -c "$@" {close}', sys.executable, code, *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, cwd=ROOT, capture_output=True, check=True
    )


@pytest.mark.parametrize("close", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path, close: str) -> None:
    run(_OPENS_A_FILE, str(tmp_path / "file"), close=close)
    assert (tmp_path / "file").read_text() == "True"


def test_a_letter_that_the_locale_does_not_have_stops_no_line() -> None:
    code = "from jobs import streams; streams.prepare(); print('é日 \\udcff, done')"
    done = run(code, PYTHONIOENCODING="ascii")
    assert done.stdout == b"\\xe9\\u65e5 \\udcff, done\n"
