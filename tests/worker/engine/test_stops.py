"""Stop strings, over every way in which a text may arrive in pieces."""

import itertools

import pytest

from worker.engine.stops import StopStrings


def pieces(text):
    """Every way to cut a text in up to four pieces, and letter by letter."""
    yield list(text)
    for num_cuts in range(4):
        for cuts in itertools.combinations(range(1, len(text)), num_cuts):
            bounds = [0, *cuts, len(text)]
            yield [text[a:b] for a, b in itertools.pairwise(bounds)]


CASES = [
    ("one two three", ("two",), "one "),
    ("one two three", ("four",), "one two three"),
    ("one two", (), "one two"),
    ("aab", ("ab",), "a"),
    ("ababac", ("abac",), "ab"),
    ("the end", ("endless",), "the end"),
    ("a\n\nb", ("\n\n",), "a"),
    ("xabcy", ("abc", "b"), "xa"),
    ("xabcy", ("bc", "abc"), "x"),
    ("stop", ("stop",), ""),
    ("größer → ü", ("→ ü",), "größer "),
]


@pytest.mark.parametrize(("text", "stops", "expected"), CASES)
def test_the_text_ends_before_the_stop_however_it_is_cut(text, stops, expected):
    for cut in pieces(text):
        splitter = StopStrings(stops)
        said = "".join(splitter.push(piece) for piece in cut) + splitter.finish()
        assert said == expected, cut
        assert splitter.found == (expected != text)


def test_only_what_may_begin_a_stop_is_held_back():
    splitter = StopStrings(("END", "E.O.F."))
    assert splitter.push("the E") == "the "
    assert splitter.push("N") == ""
    assert splitter.push("d") == "ENd"
    assert splitter.push("E.O.") == ""
    assert splitter.push("X") == "E.O.X"


def test_nothing_follows_a_stop():
    splitter = StopStrings(("END",))
    assert splitter.push("a END b") == "a "
    assert splitter.push("c") + splitter.finish() == ""
