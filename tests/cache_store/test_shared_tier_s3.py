"""The shared tier on a real S3 server of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from moto import server
from stored_blocks import Chain, get, make_chain, put, sections_of, which

from cache_store import SnapshotStore, Tier, attach, attached, remove_prefix

# Of botocore, aiobotocore and moto, on whatever Python they run.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """One server for all tests: fsspec keeps a client for as long as the process lives."""
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def url(endpoint: str, tmp_path: Path) -> str:
    bucket = tmp_path.name.replace("_", "-").lower()[:50].strip("-")
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/longleaf"


@pytest.fixture
def stores(tmp_path: Path, url: str) -> Iterator[list[SnapshotStore]]:
    tiers = [Tier(url, answer_s=LIMIT_S, retry_s=0.1) for _ in "ab"]
    stores = [SnapshotStore(tmp_path / str(n), 64 << 20, 0, tier=tier) for n, tier in enumerate(tiers)]
    yield stores
    for store in stores:
        store.close()


def put_all(store: SnapshotStore, chain: Chain) -> None:
    for index in range(len(chain.keys)):
        assert put(store, chain, index, tenant="anna")
    assert attach(store, chain.keys[-1], "logits", sections_of([np.zeros(8, np.uint8)]), {})
    assert store.wait_pushed(LIMIT_S)


def test_s3_gives_another_machine_the_same_blocks_until_they_are_deleted(
    stores: list[SnapshotStore], tmp_path: Path, url: str
) -> None:
    a, b = stores
    chain = make_chain(6)
    put_all(a, chain)
    assert b.match(chain.keys, chain.blocks) == 6
    assert [which(get(b, key), key) for key in chain.keys] == ["exact"] * 6
    assert attached(b, chain.keys[-1], "logits") is not None
    assert remove_prefix(a, chain.keys[-1]) == 6
    assert Tier(url).blocks() == []
    c = SnapshotStore(tmp_path / "c", 64 << 20, 0, tier=Tier(url, push=False))
    assert c.match(chain.keys, chain.blocks) == 0


def test_a_tenant_is_deleted_from_s3(stores: list[SnapshotStore], url: str) -> None:
    a, b = stores
    chain = make_chain(3)
    put_all(a, chain)
    assert b.remove_tenant("anna") == 3
    assert Tier(url).blocks() == []


@pytest.mark.parametrize("change", ["cut", "flipped"])
def test_a_damaged_s3_object_is_a_miss(stores: list[SnapshotStore], url: str, change: str) -> None:
    a, b = stores
    chain = make_chain(3)
    put_all(a, chain)
    key = chain.keys[1]
    tier = Tier(url)
    raw = bytearray(tier.load(key, key))
    raw[len(raw) // 2] ^= 1
    tier.save(key, key, bytes(raw) if change == "flipped" else bytes(raw[:-1]))
    assert b.match(chain.keys, chain.blocks) == 1


def test_an_s3_bucket_that_is_not_there_fails_no_write_and_no_match(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, 64 << 20, 0, tier=Tier("s3://nosuch/longleaf", retry_s=0.1))
    chain = make_chain(2)
    for index in range(2):
        assert put(store, chain, index)
    assert not store.wait_pushed(2)
    longer = make_chain(3)
    assert store.match(longer.keys, longer.blocks) == 2
    store.close()
    assert sum("left alone" in record.message for record in caplog.records) == 1
