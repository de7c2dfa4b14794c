from __future__ import annotations

import numpy as np
import pytest

from cache_store import BlockKey, chain_keys
from cache_store.key import attached_key, checkpoint_part_key


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


BLOCKS = [ids(1, 2, 3), ids(4, 5), ids(6)]


def test_the_same_prefix_has_the_same_leading_keys() -> None:
    short = chain_keys("m", b"t", BLOCKS[:2])
    longer = chain_keys("m", b"t", BLOCKS)
    edited = chain_keys("m", b"t", [*BLOCKS[:2], ids(7)])
    assert longer[:2] == short == edited[:2]
    assert longer[2] != edited[2]


@pytest.mark.parametrize(
    ("fingerprint", "salt", "blocks"),
    [
        ("n", b"t", BLOCKS),
        ("m", b"u", BLOCKS),
        ("mt", b"", BLOCKS),
        ("", b"mt", BLOCKS),
        ("m", b"t", [BLOCKS[1], BLOCKS[0], BLOCKS[2]]),
        ("m", b"t", [ids(1, 2), ids(3, 4, 5), ids(6)]),
        ("m", b"t", [ids(1, 2, 3, 4), ids(5), ids(6)]),
        ("m", b"t", [ids(0, 1, 2, 3), *BLOCKS[1:]]),
    ],
    ids=[
        "fingerprint",
        "salt",
        "salt joined",
        "name joined",
        "order",
        "boundary left",
        "boundary right",
        "leading",
    ],
)
def test_another_identity_order_or_boundary_shares_no_key(
    fingerprint: str, salt: bytes, blocks: list[np.ndarray[tuple[int], np.dtype[np.uint32]]]
) -> None:
    assert not set(chain_keys(fingerprint, salt, blocks)) & set(chain_keys("m", b"t", BLOCKS))


def test_equal_blocks_have_different_keys_at_different_places() -> None:
    assert len(set(chain_keys("m", b"", [ids(1), ids(1), ids(1)]))) == 3


def test_no_blocks_have_no_keys() -> None:
    assert chain_keys("m", b"", []) == []


def test_keys_are_the_ones_of_format_version_1() -> None:
    assert [key.hex for key in chain_keys("model", b"tenant", BLOCKS)] == [
        "07a98d2c2bbc1b63aa2e234216a7f1b0",
        "1065a5e273ac3edc8d96dc1989cd3663",
        "bc50fd6122172659b17496e53912cce4",
    ]


def test_keys_of_attachments_and_checkpoints_are_the_ones_of_format_version_1() -> None:
    key = BlockKey(bytes(range(16)))
    assert attached_key(key, "windows").hex == "0e4020df76b5dce178149d4bce189fa1"
    assert checkpoint_part_key(key, "layer-00007").hex == "6b5974a4df4a0914e7411386f1a48038"


def test_integer_width_does_not_change_a_key() -> None:
    wide = [block.astype(np.int64) for block in BLOCKS]
    assert chain_keys("m", b"", wide) == chain_keys("m", b"", BLOCKS)


@pytest.mark.parametrize("block", [np.array([-1]), np.array([1 << 32]), np.array([1.0]), np.array([[1]])])
def test_what_is_not_a_row_of_token_ids_is_refused(block: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain_keys("m", b"", [block])


def test_a_key_survives_hex_and_refuses_another_length() -> None:
    key = BlockKey(bytes(range(16)))
    assert BlockKey.from_hex(key.hex) == key
    assert str(key) == key.hex
    with pytest.raises(ValueError, match="16 bytes"):
        BlockKey(b"short")
