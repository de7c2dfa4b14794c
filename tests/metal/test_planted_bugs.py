"""Every planted bug is caught, by the check that should."""

import pytest

from tests.metal.planted_bugs import BUGS, caught


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug(bug):
    kind, text = caught(bug)
    assert kind in bug.caught_by, text
