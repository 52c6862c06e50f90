"""Jobs of a store from which several processes get the same blocks."""

import time


def run(store, verb, keys, blocks, options):
    """Runs a job of a shared store, and waits for it. `blocks(start, end)` returns the blocks of these keys.

    Several processes get the same blocks. So a get first copies the blocks to the store's memory tier, if it has one,
    and the drive reads each block once. A part of the keys takes at most half of the tier. Otherwise a block could leave
    the tier before the get reads it.

    Returns for each key whether it succeeded, and the first error or None.
    """
    tiers = store.snapshot()["tiers"]
    slots = tiers[0]["group_slots"][options["group"]] if verb == "get" and len(tiers) > 1 else 0
    if slots == 0:
        outcome = (store.put if verb == "put" else store.get)(keys, blocks(0, len(keys)), **options).wait()
        return outcome.done, outcome.error
    done, error = [], None
    part = max(1, slots // 2)
    end = time.monotonic() + options["timeout"]
    # If the memory tier is full, the gets read the disk, and need time for it.
    copying = options["timeout"] / 2
    for start in range(0, len(keys), part):
        some = keys[start : start + part]
        if copying > 0:
            before = time.monotonic()
            store.promote(some, **{**options, "timeout": copying}).wait()
            copying -= time.monotonic() - before
        left = max(end - time.monotonic(), 0.0)
        outcome = store.get(some, blocks(start, start + len(some)), **{**options, "timeout": left}).wait()
        done += outcome.done
        error = error or outcome.error
    return done, error
