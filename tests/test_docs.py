"""The pages name files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("[!.]*/*.md")])  # pytest puts one into .pytest_cache
NAMED = re.compile(r"`([\w.]+(?:/[\w.]+)+\.(?:py|md|json|h|cpp|cuh?|metal|toml))`")
LINKED = re.compile(r"\]\((?!https?:)([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    missing = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    missing += [link for link in LINKED.findall(text) if not (page.parent / link).exists()]
    assert missing == []


def test_the_life_of_a_job_has_ten_steps_that_name_files():
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.split(r"^\d+\. ", text.split("## When something dies")[0], flags=re.M)[1:]
    assert len(steps) == 10
    assert all("`" in step for step in steps)
