"""The table of published templates: what is served, what is refused and why."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from bench.templates import row, templates

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ strftime_now('%Y') }}"


def test_templates_are_read_from_folders_files_and_packages(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.jinja").write_text("1")
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        for name in ("x/two.jinja", "x/other.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"2"))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("y/three.jinja", "3")
        wheel.writestr("y/other.txt", "3")
    paths = [tmp_path / "a", tmp_path / "a" / "one.jinja", tmp_path / "source.tar.gz", tmp_path / "a.whl"]
    assert list(templates(paths)) == [("one", "1"), ("one", "1"), ("two", "2"), ("three", "3")]


def test_a_row_says_what_is_found_or_why_it_is_refused() -> None:
    served = row("dated", CHATML)
    assert (served["served"], served["as_transformers"], served["after"]) == (True, True, "2024")
    refused = row("mute", "{{ raise_exception('Only images') }}")
    assert refused["served"] is False
    assert "Only images" in refused["why"]
