"""Fixtures of the tests."""

import os
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from report import pytest_addoption, pytest_configure  # noqa: E402, F401

BLOCK = 64 * 1024


@pytest.fixture
def directory():
    """A folder for stores. It is removed after the test, because stores reserve their space on disk."""
    folder = tempfile.mkdtemp(prefix="terrane-")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def opened(directory):
    """A function that opens a store in the folder. Each store is closed at the end."""
    import terrane_kv

    stores = []

    def open_store(**changes):
        options = {
            "groups": [("kv", BLOCK)],
            "namespace": "test",
            "fields": {"model": "test"},
            "keep_keys": True,
        }
        store = terrane_kv.Store(directory, changes.pop("capacity", 64 * BLOCK), **{**options, **changes})
        stores.append(store)
        return store

    open_store.stores = stores
    yield open_store
    for store in stores:
        store.close()


def damage(directory, content):
    """Flips a bit of these bytes in the files below a folder."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "r+b") as file:
                at = file.read().find(content)
                if at >= 0:
                    file.seek(at)
                    file.write(bytes([content[0] ^ 1]))
                    return
    raise AssertionError("the block was not found")
