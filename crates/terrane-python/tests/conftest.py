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
