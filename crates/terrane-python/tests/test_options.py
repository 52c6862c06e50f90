"""Invalid options and keys: each causes an error with a remedy."""

import pytest

import terrane_kv

from conftest import BLOCK


def block(number):
    return bytes([number]) * BLOCK


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"capacity": 0}, "has 0 B for group 0"),
        ({"capacity": 1000}, "1 to 2\\^32 - 1 blocks of each group"),
        ({"capacity": -1}, "-1 is not a number of bytes"),
        ({"capacity": "64GiB"}, "'64GiB' is not a number of bytes"),
        ({"host_bytes": 1000}, 'tier "host" has 1000 B'),
        ({"groups": []}, "a store needs 1 to 64 groups"),
        ({"groups": [("kv", 0)]}, "0 bytes"),
        ({"groups": [("kv", -5)]}, "blocks of -5 in the group"),
        ({"groups": [("kv", 8 << 30)]}, "less than 2\\^32"),
        ({"groups": ["kv"]}, "pass a name, the bytes"),
        ({"namespace": "a/b"}, "contains '/'"),
        ({"capacity": 1 << 50}, "1 to 2\\^32 - 1 blocks of each group"),
    ],
)
def test_options_that_cannot_be_are_errors_with_a_remedy(opened, changes, text):
    with pytest.raises((ValueError, TypeError, terrane_kv.StoreError), match=text):
        opened(**changes)


def test_keys_that_are_none_are_type_errors(opened):
    store = opened()
    for keys in ("abc", b"abc"):
        with pytest.raises(TypeError, match="pass a list"):
            store.put(keys, [b"x"] * 3)
    with pytest.raises(TypeError, match="the key 1 is neither bytes nor a str"):
        store.put([1], [b"x"])
    assert store.put([bytearray(b"ab")], [b"x"]).wait(10).ok and store.presence(b"ab") == 2


def test_a_promotion_copies_blocks_to_memory(opened):
    store = opened(host_bytes=4 * BLOCK)
    assert store.put(["a", "b"], [block(1), block(2)]).wait(10).ok
    store.close()
    store = opened(host_bytes=4 * BLOCK)
    assert store.promote(["a", "b", "absent"]).wait(10).done == [True, True, False]
    before = disk_reads(store)
    assert store.get(["a"], [bytearray(BLOCK)]).wait(10).ok and disk_reads(store) == before == 2 * BLOCK
    store.close()
    with pytest.raises(terrane_kv.StoreError, match="promote blocks to a memory tier"):
        opened().promote(["a"])


def disk_reads(store):
    return store.snapshot()["tiers"][-1]["read_bytes"]
