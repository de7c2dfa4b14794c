"""What a device may use; of a Mac by what MLX says of one, since none is here."""

import mlx.core as mx
import pytest

from worker.engine import memory
from worker.engine.errors import EngineError

MAC = {"memory_size": 64 << 30, "max_recommended_working_set_size": 48 << 30}


@pytest.fixture
def wired(monkeypatch):
    """What MLX was told to keep."""
    told = []
    monkeypatch.setattr(mx, "set_wired_limit", told.append)
    return told


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (MAC, 48 << 30),
        ({"memory_size": 64 << 30}, 64 << 30),
        ({"total_memory": 80 << 30}, 80 << 30),
        ({}, memory.machine_bytes()),
    ],
    ids=["mac", "cpu", "cuda", "unknown"],
)
def test_a_device_has_what_its_gpu_may_keep(monkeypatch, info, expected):
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory.device_bytes() == expected


def test_nothing_is_kept_from_being_paged_out_unless_asked_for(monkeypatch, wired):
    monkeypatch.setattr(mx, "device_info", lambda: MAC)
    memory.keep_resident(None)
    assert wired == []
    memory.keep_resident(48 << 30)
    assert wired == [48 << 30]


def test_more_than_macos_allows_is_refused(monkeypatch, wired):
    monkeypatch.setattr(mx, "device_info", lambda: MAC)
    with pytest.raises(EngineError, match=r"is 51\.55 GB, but .* keep 51\.54 GB; .*sysctl"):
        memory.keep_resident((48 << 30) + 10_000_000)
    assert wired == []


def test_where_nothing_is_paged_out_it_is_said_and_left(monkeypatch, wired, caplog):
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 64 << 30})
    memory.keep_resident(1 << 30)
    assert wired == []
    assert "LONGLEAF_WIRED_BYTES has no effect here" in caplog.text
