"""The checks notice small changes to correct kernels: a sample; all: `python -m tests.metal.mutants`."""

from tests.metal.mutants import ORIGINALS, all_mutants, killed_by

SAMPLE = all_mutants()[::11]


def test_the_originals_pass():
    for source, differs in ORIGINALS.values():
        assert not differs(source)


def test_a_sample_of_mutants_is_noticed():
    survivors = [m for m in SAMPLE if killed_by(m) is None]
    assert [(m.kernel, m.what) for m in survivors if not m.is_equivalent] == []
