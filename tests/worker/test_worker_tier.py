"""Workers with folders of their own and one shared tier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.engine.tiny import load_tiny
from worker.child import load_engine
from worker.engine.engine import Document, Sampling
from worker.engine.report import Silent
from worker.settings import Settings

DOCUMENT = [Document("log", "The keeper wrote the hour and the height of the water in the book. " * 40)]


@pytest.fixture(scope="module")
def models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    load_tiny(folder, smollm2)
    return folder.parent


def test_one_worker_answers_from_what_another_read(models: Path, tmp_path: Path) -> None:
    tier = tmp_path / "share"
    tier.mkdir()
    outputs = []
    for name in ("a", "b"):
        settings = Settings(data=tmp_path / name, models=models, model="tiny", shared_tier=tier.as_uri())
        engine = load_engine(settings)
        outputs.append(engine.generate(DOCUMENT, "What was written?", Sampling(8), Silent()))
        assert engine._store is not None
        assert engine._store.wait_pushed(30)
        engine._store.close()
    first, second = outputs
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens > 300
    assert second.text == first.text


def test_with_a_folder_of_keys_what_a_worker_reads_is_encrypted(models: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    settings = Settings(data=tmp_path / "data", models=models, model="tiny", snapshot_keys=keys)
    engine = load_engine(settings)
    engine.generate(DOCUMENT, "What was written?", Sampling(8), Silent())
    assert [path.name for path in keys.glob("*.key")] == ["default.key"]
    stored = [path.read_bytes() for path in settings.snapshots.rglob("*.llkv")]
    assert len(stored) > 1
    assert {raw[8:12] for raw in stored} == {b"\2\0\0\0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("LONGLEAF_SHARED_TIER", "nowhere://share/longleaf"), ("LONGLEAF_SNAPSHOT_KEYS", "/nowhere/keys")],
)
def test_a_worker_with_no_such_tier_or_keys_does_not_start(tmp_path: Path, name: str, value: str) -> None:
    environment = os.environ | {"LONGLEAF_DATA": str(tmp_path), name: value}
    done = subprocess.run(
        [sys.executable, "-m", "worker"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert name in done.stderr
