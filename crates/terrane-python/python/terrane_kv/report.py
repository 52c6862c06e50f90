"""Reports the problems of this process's stores, as sentences with a remedy."""

import weakref

from terrane_kv import _native

_stores: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def note_store(store, engine, directory, seed) -> None:
    """Records the store of an adapter for the report."""
    _stores[store] = (engine, directory, seed)


def doctor() -> dict:
    """Reports the package version, and each store that an adapter has opened in this process.

    Returns a dictionary with `version`, `python_hash_seed`, and `stores`. Each store has its engine, folder and
    namespace, whether it survives a restart, `problems` (a list of sentences with the remedy), the counters of
    `Store.snapshot()`, and the results of its recovery.
    """
    import os

    stores = []
    for store, (engine, directory, seed) in list(_stores.items()):
        problems = [] if seed.is_reproducible else [seed.remedy]
        found = {"engine": engine, "directory": directory, "persistent": seed.is_reproducible}
        try:
            found |= {"namespace": store.namespace, "recovery": store.recovery}
            found["snapshot"] = snapshot = store.snapshot()
            if snapshot["disk_read_only"]:
                problems.append(f"the disk tier is read-only: {snapshot['disk_read_only']}")
            if snapshot["corrupt"]:
                problems.append(f"{snapshot['corrupt']} blocks were damaged on disk; check the drive")
        except _native.StoreError as error:
            problems.append(str(error))
        stores.append(found | {"problems": problems})
    return {
        "version": _native.__version__,
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "stores": stores,
    }


def why(store, key, group: int = 0) -> str:
    """Explains why a key is, or is not, in a store, also if keys change with each process."""
    text = store.why(key, group=group)
    noted = _stores.get(store)
    if noted is not None and not noted[2].is_reproducible:
        text += f"; {noted[2].remedy}"
    return text
