"""A pytest plugin that runs vLLM's own tests with Terrane's tier and manager instead of vLLM's.

`FS_TIER` lists each test of the file tier: it runs unchanged or with an adapted fixture, or the reason why it does not
apply. A test of that file that is not listed fails the run. `TIERING` lists only the manager's tests that do not apply.
"""

import pytest

FILES = "vLLM's files of one block each, which this test reads or damages"
POOL = "vLLM's thread pool or C extension, not a tier"
LOOKUPS = "asynchronous lookups; Terrane's lookups return at once"
TOPOLOGY = "Terrane stores blocks of another parallel size in another namespace"
PER_KEY = "vLLM stops at the first bad block; Terrane returns a result for each key"

RUN, ADAPTED = "run", "adapted fixture"

FS_TIER = {
    "test_lookup_empty_tier": ADAPTED,
    "test_store_creates_file_and_lookup_succeeds": FILES,
    "test_store_accepts_block_published_by_another_writer": FILES,
    "test_store_then_load_roundtrip": ADAPTED,
    "test_invalid_path_raises_at_construction": RUN,
    "test_invalid_locality_raises_at_construction": RUN,
    "test_factory_forwards_locality_to_fs_tier": POOL,
    "test_failed_load_missing_file": RUN,
    "test_multiple_jobs_tracked_independently": ADAPTED,
    "test_multi_block_job_partial_failure": RUN,
    "test_shutdown_discards_pending_tasks": POOL,
    "test_store_load_data_integrity": ADAPTED,
    "test_store_load_roundtrip_without_o_direct": POOL,
    "test_wait_idle_blocks_until_tasks_complete": POOL,
    "test_batch_lookup_c_extension": POOL,
    "test_batch_lookup_dispatch": POOL,
    "test_out_of_bounds_block_id_smoke": RUN,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": FILES,
    "test_failed_load_after_abort_does_not_break_newer_probe": LOOKUPS,
    "test_batched_partial_load_failure_keeps_loaded_blocks": FILES,
    "test_batched_load_first_block_fails_marks_whole_batch": PER_KEY,
    "test_transient_load_failure_leaves_file": FILES,
    "test_successful_store_emits_stored_event": RUN,
    "test_store_event_uses_configured_locality": RUN,
    "test_load_job_emits_no_event": RUN,
    "test_mixed_job_results_emit_event_only_for_successful_job": FILES,
    "test_partially_failed_store_emits_no_event": FILES,
    "test_events_disabled_by_default": ADAPTED,
    "test_events_require_global_kv_events_flag": ADAPTED,
    "test_cascade_store_emits_fs_event_through_tiering_manager": RUN,
    "test_fs_tier_cross_tp_round_trip": TOPOLOGY,
}

# All tests of the tiering manager run, except these.
TIERING = {}


class FileMapper:
    """Returns a path that exists to the fixtures, which ask vLLM's tier for a file."""

    def get_file_name(self, key):
        return __file__


def replace_tier(module):
    from terrane_kv.vllm import TerraneTier

    class Tier(TerraneTier):
        """Terrane's tier with the arguments of vLLM's."""

        file_mapper = FileMapper()
        _store_job_keys = {}

        def __init__(self, *arguments, n_read_threads=0, n_write_threads=0, **options):
            super().__init__(*arguments, capacity="48MiB", **options)

        @property
        def events(self):
            return self._events

    module.FileSystemTierManager = Tier
    module.lookup_and_wait = lambda tier, keys, ctx=module._CTX, timeout=1.0: [
        tier.lookup(key, ctx) for key in keys
    ]


def replace_manager(module):
    from terrane_kv.vllm import WaitingTieringManager

    class Manager(WaitingTieringManager):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, room_wait_s=5.0, **options)

    module.TieringOffloadingManager = Manager


def pytest_collection_modifyitems(config, items):
    replaced = set()
    for item in items:
        module, name = item.module, item.originalname or item.name
        path = module.__name__.rpartition(".")[2]
        if module not in replaced:
            replaced.add(module)
            (replace_tier if path == "test_fs_tier" else replace_manager)(module)
        table = FS_TIER if path == "test_fs_tier" else TIERING
        verdict = table.get(name) if path == "test_fs_tier" else table.get(name, RUN)
        if verdict is None:
            raise pytest.UsageError(f"{path}::{name} is not in the table of this plugin")
        if verdict not in (RUN, ADAPTED):
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {verdict}"))
