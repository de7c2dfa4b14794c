"""What is said of an engine process that cannot be kept: no more than is known."""

from __future__ import annotations

import os
import sys

import pytest

from worker.resident import EngineUnavailable, Resident


@pytest.mark.parametrize(
    ("code", "told", "may_be_memory"),
    [
        ("raise SystemExit(1)", "exited with code 1. Its own messages are above and say why", False),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (signal 9; by hand, or by the", True),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM (signal 15)", False),
    ],
)
def test_only_a_death_that_memory_may_have_caused_leads_to_a_smaller_model(
    code: str, told: str, may_be_memory: bool
) -> None:
    resident = Resident([sys.executable, "-S", "-c", code], os.environ, "m", lambda card: card)
    try:
        with pytest.raises(EngineUnavailable) as caught:
            resident.wait_ready(lambda: True)
    finally:
        resident.close()
    assert told in str(caught.value)
    assert ("smaller model" in str(caught.value)) == may_be_memory
