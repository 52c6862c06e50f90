"""A pytest plugin that runs LMCache's own tests of its native adapter with Terrane's connector instead of the mock."""

import shutil
import tempfile

import pytest

# Test classes that use no connector, or a mock that records its arguments.
NOT_APPLICABLE = {
    "TestObjectKeySerialization": "keys, not a connector",
    "TestObjectKeyModelNameValidation": "keys, not a connector",
    "TestObjectKeyCacheSaltValidation": "keys, not a connector",
    "TestObjectKeyIsolation": "keys, not a connector",
    "TestRESPL2AdapterConfig": "another adapter's configuration",
    "TestNativePluginL2AdapterConfig": "configuration, not a connector",
    "TestFSNativeL2AdapterConfig": "another adapter's configuration",
    "TestDeleteBackwardCompatibility": "a connector without removals",
    "TestPadBuffersToAlignment": "a mock that records lengths",
}


def replace(module):
    from terrane_kv.lmcache import Connector

    class Ours(Connector):
        def __init__(self):
            self.folder = tempfile.mkdtemp()
            super().__init__(directory=self.folder, capacity="16MiB", chunk_bytes=65_536, kv_dtype="uint8")

        def close(self):
            super().close()
            shutil.rmtree(self.folder, ignore_errors=True)

    module.MockNativeConnector = Ours


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        replace(module)
    for item in items:
        reason = NOT_APPLICABLE.get(item.cls.__name__)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
