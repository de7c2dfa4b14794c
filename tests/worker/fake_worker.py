"""The real worker parent with the fake child: `python fake_worker.py`."""

import sys
from pathlib import Path

import worker.__main__ as program

program.CHILD_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_child.py")))  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(program.main())
