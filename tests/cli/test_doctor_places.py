"""What `longleaf doctor` says of folders, the queue's server and the clock, on places that will not do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cli import doctor_places
from cli.doctor_places import clock, data_folder, models_folder, own_server, temporary_folder
from cli.settings import Settings

NASTY = "a b%20c#d?e'f\"g=é日本語;[x]$&"


def test_places_with_every_kind_of_letter_are_in_order_and_stay_as_they_were(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / NASTY / "data", models=tmp_path / NASTY / "models", model="none")
    for check in (data_folder, own_server, temporary_folder, models_folder, clock):
        found = check(settings)
        assert found.state == "ok", found
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_others_may_read_is_a_warning(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    for name in ("longleaf.db", "worker.token"):
        (data / name).touch()
        (data / name).chmod(0o644)
    found = data_folder(Settings(data=data))
    assert found.state == "warn"
    assert found.detail == f"{data}/longleaf.db and 1 more can be read by other users"
    assert found.mend.endswith(f"`chmod -R go= {data}`")


def test_a_disk_that_keeps_no_permissions_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_places, "try_out", lambda data: f"the file system of {data} keeps no permissions"
    )
    found = data_folder(Settings(data=tmp_path))
    assert (found.state, "set LONGLEAF_DATA" in found.mend) == ("warn", True)


def test_a_server_that_does_not_start_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_places, "find_program", lambda folder: "/bin/false")
    found = own_server(Settings(data=tmp_path))
    assert (found.state, found.detail) == ("bad", "/bin/false does not start: exit status 1")
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_is_not_there_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_places.tempfile, "tempdir", "/nowhere")
    found = temporary_folder(Settings())
    assert (found.state, "TMPDIR" in found.mend) == ("bad", True)


def test_models_need_a_folder_only_until_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = models_folder(Settings(models=tmp_path / "file" / "models", model="m"))
    assert (found.state, found.detail) == ("bad", f"{tmp_path / 'file'} is no folder")
    (tmp_path / "models" / "m").mkdir(parents=True)
    assert models_folder(Settings(models=tmp_path / "models", model="m")).state == "ok"


def test_a_clock_that_was_set_back_is_a_warning(tmp_path: Path) -> None:
    database = tmp_path / "longleaf.db"
    database.touch()
    later = time.time() + 400 * 86_400
    os.utime(database, (later, later))
    found = clock(Settings(data=tmp_path))
    assert (found.state, f"but {database} is of " in found.detail) == ("warn", True)
