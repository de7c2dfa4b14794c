"""What the processes of one start mean by the model that was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.settings import Settings
from jobs.settings import SettingsError, SharedSettings, load, model_id


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("owner/name", "owner/name"),
        ("/models/Llama-3.1-70B-4bit", "Llama-3.1-70B-4bit"),
        ("/models/Llama-3.1-70B-4bit/", "Llama-3.1-70B-4bit"),
        ("~/My model (4 bit)", "My-model-4-bit-"),
        ("./below/model.Q4_1.gguf", "model.Q4_1"),
        ("below/model.gguf", "model"),
        ("/models/.hidden", "hidden"),
        ("/", "model"),
    ],
)
def test_a_path_is_served_under_its_last_part(model: str, expected: str) -> None:
    assert model_id(model) == expected


def test_all_look_for_a_model_in_one_folder(tmp_path: Path) -> None:
    named, placed = (SharedSettings(models=tmp_path, model=model) for model in ("owner/name", "/far/name"))
    assert (named.model_folder, placed.model_folder) == (tmp_path / "owner--name", tmp_path / "name")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://h:6379/0?foo=bar", "foo is no option of it; client_name, db,"),
        ("redis://h:6379/zero", "a number such as /0, not /zero"),
        ("redis://h:0/0", "an IPv6 address in brackets"),
        ("http://h:6379", "redis://host:port/0"),
    ],
)
def test_an_address_of_redis_that_would_fail_later_is_refused_at_once(
    url: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    with pytest.raises(SettingsError, match="REDIS_URL=") as caught:
        load(Settings)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://u:p@[::1]:6379/3?ssl_cert_reqs=none", "unix:///run/redis.sock?db=2"]
)
def test_an_address_of_redis_is_taken_as_it_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    assert load(Settings).redis_url == url


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a bare number: one sentence, and no traceback of a library."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "LONGLEAF_DATA", "LONGLEAF_MODELS", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(SettingsError, match="this user has no home folder: set LONGLEAF_DATA to a folder"):
        load(SharedSettings)
    monkeypatch.setenv("LONGLEAF_DATA", "/data")
    with pytest.raises(SettingsError, match="set LONGLEAF_MODELS to a folder"):
        load(SharedSettings)
    monkeypatch.setenv("LONGLEAF_MODELS", "/models")
    assert load(SharedSettings).data == Path("/data")
