"""The adapters with the calls of their engines, for the three newest releases of each engine."""

import importlib.metadata
import io
import logging
import sys

import numpy
import pytest

import adapters
import terrane_kv
from adapters import BLOCK, Lmcache, Vllm
from engines import RELEASES, installed, releases, tables


@pytest.fixture(params=RELEASES, ids=lambda release: "-".join(release))
def adapter(request, directory):
    engine, version = request.param
    with installed(engine, version) as module:
        made = adapters.ADAPTERS[engine](module, directory)
        made.module = module
        yield made
        made.close()


def test_blocks_are_loaded_unchanged(adapter):
    assert adapter.load([1, 2]) == [None, None]
    assert adapter.store([1, 2, 3])
    assert adapter.store([2, 3, 4]), "blocks that are stored are no failure"
    assert adapter.load([4, 3, 9, 1]) == [True, True, None, True]


@pytest.fixture(params=releases("vllm"))
def vllm(request, directory):
    with installed("vllm", request.param) as module:
        made = Vllm(module, directory, enable_kv_events=True)
        made.module = module
        yield made
        made.close()


def test_vllm_s_lookup_and_events(vllm):
    result = vllm.base.LookupResult
    key = vllm.key(1)
    assert vllm.tier.lookup(key, vllm.context()) is result.MISS
    vllm.store([1])
    assert vllm.tier.lookup(key, vllm.context()) is result.HIT
    (event,) = vllm.tier.take_events()
    assert event.keys == [key] and not event.removed and event.medium is vllm.base.Medium.STORAGE
    assert event.removal_expected, "vLLM keeps the hashes of the chunk until its removal"
    assert list(vllm.tier.take_events()) == []
    vllm.tier._store.remove([key]).wait(10)
    (event,) = vllm.tier.take_events()
    assert event.keys == [key] and event.removed
    assert isinstance(vllm.tier.on_new_request(vllm.context()), vllm.base.RequestOffloadingContext)


def test_a_removal_is_an_event_of_vllm_while_the_key_is_written_again(vllm, monkeypatch):
    key = vllm.key(1)
    vllm.store([1])
    assert [event.removed for event in vllm.tier.take_events()] == [False]
    store = vllm.tier._store
    store.remove([key]).wait(10)

    class Writing:
        """The store during a write, which may still fail."""

        def presence(self, key):
            return vllm.module.tier.WRITING

    monkeypatch.setattr(vllm.tier, "_store", Writing())
    assert [(event.keys, event.removed) for event in vllm.tier.take_events()] == [([key], True)]
    monkeypatch.setattr(vllm.tier, "_store", store)
    vllm.store([1])
    assert [event.removed for event in vllm.tier.take_events()] == [False]


def test_a_reset_that_empties_the_tier_of_vllm_is_an_event_for_each_key(vllm):
    keys = [vllm.key(number) for number in (1, 2, 3)]
    manager = vllm.module.WaitingTieringManager(Primary(room=1), [vllm.tier], room_wait_s=5.0, clear_on_reset=True)
    vllm.store([1, 2])
    assert [event.removed for event in vllm.tier.take_events()] == [False]
    vllm.store([3])
    manager.reset_cache()
    assert vllm.store([2])
    taken = [(event.removed, sorted(event.keys)) for event in vllm.tier.take_events()]
    assert taken == [(False, keys[2:]), (False, keys[1:2]), (True, [keys[0], keys[2]])]
    assert list(vllm.tier.take_events()) == [] and vllm.tier._announced == {keys[1]}
    manager.reset_cache()
    assert [(event.removed, event.keys) for event in vllm.tier.take_events()] == [(True, keys[1:2])]


def test_removals_are_events_of_vllm_although_the_store_dropped_some_of_its_events(vllm):
    keys = [vllm.key(number) for number in range(6)]
    vllm.store(range(6))
    assert [event.removed for event in vllm.tier.take_events()] == [False]
    vllm.tier._events = vllm.tier._store.events(2)
    vllm.tier._store.remove(keys[:5]).wait(10)
    assert vllm.tier._events.lost == 3
    assert [(event.removed, sorted(event.keys)) for event in vllm.tier.take_events()] == [(True, keys[:5])]
    assert vllm.tier._announced == {keys[5]}
    # A number of lost events that stays the same has no new removal.
    assert list(vllm.tier.take_events()) == []


def test_a_store_of_vllm_reports_only_bytes_that_were_written(vllm):
    keys = [vllm.key(1), vllm.key(2)]
    assert vllm.run("store", keys[:1], [0]).transfer_bytes == BLOCK
    assert vllm.run("store", keys, [0, 1]).transfer_bytes == BLOCK
    again = vllm.run("store", keys, [0, 1])
    assert again.success and again.transfer_bytes == 0


def test_a_failed_key_of_vllm_is_a_miss_for_that_request(vllm):
    vllm.store([1])
    vllm.tier.on_new_request(vllm.context())
    result = vllm.run("load", [vllm.key(1), vllm.key(2)], [0, 1])
    assert not result.success and result.successful_keys == (vllm.key(1),)
    assert result.transfer_bytes == BLOCK and result.transfer_time > 0
    vllm.store([2])
    lookup = lambda request: vllm.tier.lookup(vllm.key(2), vllm.context(request)).name
    assert (lookup("r"), lookup("other")) == ("MISS", "HIT")
    vllm.tier.on_request_finished(vllm.context("r"))
    assert lookup("r") == "HIT"


def test_a_load_of_vllm_that_fails_after_its_request_leaves_nothing(vllm):
    vllm.tier.on_new_request(vllm.context())
    vllm.submit("load", [vllm.key(2)], [0])
    vllm.tier.on_request_finished(vllm.context())
    vllm.tier.drain_jobs()
    (result,) = vllm.tier.get_finished_jobs()
    assert not result.success
    assert vllm.tier._failed_keys == {} and vllm.tier._active_requests == set() and vllm.tier._jobs == {}


def test_a_job_of_vllm_that_cannot_be_submitted_fails_by_itself(vllm):
    for key, chunk in ((vllm.key(1), 99), (None, 0), (vllm.key(1), -1)):
        vllm.submit("store", [key], [chunk])
    vllm.tier.drain_jobs()
    assert [result.success for result in vllm.tier.get_finished_jobs()] == [False] * 3 and vllm.tier._jobs == {}


def test_a_drain_of_vllm_s_jobs_ends_if_the_store_knows_none_of_them(vllm):
    vllm.tier._jobs[77] = ([vllm.key(1)], True, "r")
    vllm.tier.drain_jobs()
    (result,) = vllm.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (77, False)


def test_a_shutdown_of_vllm_finishes_the_jobs_in_flight(vllm):
    for number in range(8):
        vllm.submit("store", [vllm.key(number)], [number])
    vllm.tier.shutdown()
    assert sorted(result.job_id for result in vllm.tier.get_finished_jobs()) == list(range(1, 9))
    assert vllm.tier._jobs == {}


def test_vllm_s_jobs_are_reported_after_a_shutdown_as_failed(vllm):
    vllm.tier._store.close()
    result = vllm.run("store", [vllm.key(1)], [0])
    assert not result.success


def test_a_tier_of_vllm_gives_its_region_back(directory):
    with installed("vllm", adapters.newest("vllm")) as module:
        made = Vllm(module, directory)
        made.store([1])
        view = made.tier._primary_kv_view
        made.close()
        # vLLM releases the view afterwards, which fails while the view is exported.
        view.release()


def test_vllm_s_engines_have_folders_of_their_own_and_share_the_capacity(directory):
    with installed("vllm", adapters.newest("vllm")) as module:
        # vLLM tells an engine of a dense model that it is the only engine.
        both = [Vllm(module, directory, dp=(0, 2)), Vllm(module, directory, dp=(1, 1), engines=2)]
        both[0].store([1])
        assert both[1].load([1]) == [None]
        for each in both:
            (disk,) = each.tier._store.snapshot()["tiers"]
            assert disk["capacity"] <= 32 * BLOCK
            each.close()
        with pytest.raises(ValueError, match="set the tier's `engines`"):
            Vllm(module, directory, dp=(1, 1))
        for wrong in (0, 1.5, "two", True):
            with pytest.raises(ValueError, match=f"engines is {wrong!r}; set a whole number"):
                Vllm(module, directory, engines=wrong)


@pytest.mark.parametrize(("rank", "ranks"), [(1, 1), (-1, 1), (0, 0)])
def test_a_rank_that_is_not_below_the_ranks_is_refused(directory, rank, ranks):
    with installed("lmcache", adapters.newest("lmcache")) as module:
        with pytest.raises(ValueError, match=f"of {ranks} that share"):
            Lmcache(module, directory, rank=rank, ranks=ranks)


def test_a_random_seed_of_vllm_that_was_not_stated_empties_the_store(vllm, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    vllm.store([1])
    utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    monkeypatch.setattr(utils, "get_none_hash_seed", lambda: "ab" * 32)
    with caplog.at_level(logging.WARNING):
        vllm.tier.on_new_request(vllm.context())
        vllm.tier.on_new_request(vllm.context("second"))
    assert caplog.text.count("will not survive a restart") == 1
    assert vllm.load([1]) == [None] and vllm.store([2]) and vllm.load([2]) == [True]
    (report,) = [it for it in terrane_kv.doctor()["stores"] if it["directory"] == vllm.tier._root_dir]
    assert not report["persistent"] and "PYTHONHASHSEED" in report["problems"][0]


@pytest.mark.parametrize("stated", ["random", ""])
def test_a_random_seed_of_python_is_none_for_lmcache(stated, monkeypatch):
    from terrane_kv import keys

    monkeypatch.setenv("PYTHONHASHSEED", stated)
    assert not keys.lmcache("builtin").is_reproducible and keys.lmcache().is_reproducible
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    # Older versions hash None by its address.
    assert keys.lmcache("builtin").seed == ("7" if sys.version_info >= (3, 12) else "random")
    assert keys.lmcache("sha256_cbor").seed == "7"


class Primary:
    """Host memory with free space for some chunks."""

    _num_chunks, _num_evictable_cache_chunks = 100, 0

    def __init__(self, room):
        self.room, self.chunks = room, set()

    def _get_num_free_chunks(self):
        return self.room

    def holds(self, key):
        return key in self.chunks

    def is_loading(self, key):
        return False

    def take_room(self, key):
        if self.room <= 0:
            return False
        self.room -= 1
        self.chunks.add(key)
        return True


@pytest.mark.parametrize("version", releases("vllm"))
def test_the_manager_answers_retry_until_its_deadline(version, directory, monkeypatch):
    with installed("vllm", version) as module:
        made = Vllm(module, directory)
        made.store([1, 2])
        now = [100.0]
        monkeypatch.setattr(module.manager.time, "monotonic", lambda: now[0])
        primary = Primary(room=0)
        manager = module.WaitingTieringManager(primary, [made.tier], room_wait_s=5.0)
        lookup = lambda number, request="r": manager.lookup(made.key(number), made.context(request)).name
        assert lookup(9) == "MISS", "a block that no tier has is a miss at once"
        assert [lookup(1), lookup(1)] == ["RETRY", "RETRY"]
        primary.room = 1
        assert [lookup(1), lookup(1)] == ["HIT_PENDING", "HIT"]
        assert lookup(2) == "RETRY"
        now[0] += 5.0
        assert [lookup(2), lookup(1), lookup(2, "later")] == ["MISS", "HIT", "RETRY"]
        primary.room = 1
        assert lookup(2) == "MISS", "no promotion for a request after its deadline"
        manager.on_request_finished(made.context())
        assert lookup(2) == "HIT_PENDING"
        made.close()


@pytest.mark.parametrize("version", releases("vllm"))
@pytest.mark.parametrize("step", ["new_req_ids", "preempted_req_ids"])
def test_a_request_that_was_scheduled_or_preempted_waits_for_room_again(version, step, directory, monkeypatch):
    with installed("vllm", version) as module:
        made = Vllm(module, directory)
        made.store([1])
        now = [100.0]
        monkeypatch.setattr(module.manager.time, "monotonic", lambda: now[0])
        primary = Primary(room=0)
        manager = module.WaitingTieringManager(primary, [made.tier], room_wait_s=5.0)
        lookup = lambda: manager.lookup(made.key(1), made.context()).name
        assert lookup() == "RETRY"
        now[0] += 5.0
        assert lookup() == "MISS"
        steps = {"new_req_ids": (), "preempted_req_ids": ()}
        manager.on_schedule_end(made.base.ScheduleEndContext(**{**steps, step: ("other",)}))
        assert lookup() == "MISS"
        manager.on_schedule_end(made.base.ScheduleEndContext(**{**steps, step: ("r",)}))
        assert lookup() == "RETRY"
        primary.room = 1
        assert lookup() == "HIT_PENDING"
        made.close()


class Evicting:
    """Host memory that evicts the chunk which was used least recently, as vLLM's does."""

    def __init__(self, chunks):
        self._num_chunks, self.ready, self.loading, self.loads = chunks, {}, [], 0

    @property
    def _num_evictable_cache_chunks(self):
        return len(self.ready)

    def _get_num_free_chunks(self):
        return self._num_chunks - len(self.ready) - len(self.loading)

    def holds(self, key):
        return key in self.ready

    def is_loading(self, key):
        return key in self.loading

    def take_room(self, key):
        if self._get_num_free_chunks() == 0:
            if not self.ready:
                return False
            self.ready.pop(next(iter(self.ready)))
        self.loading.append(key)
        self.loads += 1
        return True

    def end_step(self):
        self.ready.update(dict.fromkeys(self.loading))
        self.loading = []


@pytest.mark.parametrize("version", releases("vllm"))
@pytest.mark.parametrize("requests", [1, 2])
def test_the_beginning_of_a_prefix_longer_than_host_memory_is_used(version, requests, directory):
    with installed("vllm", version) as module:
        made = Vllm(module, directory)
        assert made.store(range(16)) and made.store(range(16, 20))
        primary = Evicting(8)
        manager = module.WaitingTieringManager(primary, [made.tier], room_wait_s=60.0)
        waiting = {f"r{number}": range(number * 10, number * 10 + 10) for number in range(requests)}
        hits = {}
        for _ in range(10):
            for request, numbers in list(waiting.items()):
                results = [manager.lookup(made.key(number), made.context(request)).name for number in numbers]
                leading = results.index("MISS") if "MISS" in results else len(results)
                if not {"RETRY", "HIT_PENDING"} & set(results[:leading]):
                    hits[request] = leading
                    del waiting[request]
            scheduled = tuple(request for request in hits if request not in waiting)
            manager.on_schedule_end(made.base.ScheduleEndContext(new_req_ids=scheduled, preempted_req_ids=()))
            primary.end_step()
        assert hits == dict.fromkeys(hits, 8) and len(hits) == requests and primary.loads == 8 * requests
        made.close()


@pytest.mark.parametrize("version", releases("vllm"))
@pytest.mark.parametrize("clears", [False, True])
def test_a_reset_of_the_caches_empties_the_tier_if_it_is_asked_to(version, clears, directory):
    with installed("vllm", version) as module:
        made = Vllm(module, directory)
        made.store([1])
        tiers = [object(), made.tier]
        manager = module.WaitingTieringManager(Primary(room=1), tiers, room_wait_s=5.0, clear_on_reset=clears)
        manager.reset_cache()
        assert made.tier.lookup(made.key(1), made.context()).name == ("MISS" if clears else "HIT")
        made.close()


@pytest.mark.parametrize("version", releases("vllm"))
def test_vllm_s_host_memory_has_the_attributes_that_the_manager_reads(version):
    described = tables("vllm")[version]["interfaces"]["vllm.v1.kv_offload.cpu.manager"]["CPUOffloadingManager"]["class"]
    assert {"_num_chunks", "_num_evictable_cache_chunks"} <= set(described["attributes"])
    assert [name for name, *_ in described["methods"]["_get_num_free_chunks"]["parameters"]] == ["self"]


def test_messages_reach_the_handlers_of_an_engine_that_configures_only_its_own_logger(monkeypatch):
    from terrane_kv import folders

    theirs, ours = logging.getLogger("engine-of-a-test"), logging.Logger("terrane_kv")
    theirs.setLevel(logging.INFO)
    theirs.addHandler(handler := logging.StreamHandler(text := io.StringIO()))
    monkeypatch.setattr(folders, "logger", ours)
    folders.log_like("engine-of-a-test")
    ours.info("opened")
    assert text.getvalue() == "opened\n"
    folders.log_like("engine-of-a-test")
    assert ours.handlers == [handler], "a logger with handlers keeps them"


@pytest.mark.parametrize("version", releases("vllm"))
def test_the_spec_makes_our_manager_over_vllm_s_tiers(version):
    with installed("vllm", version) as module:
        config = type("Config", (), {"extra_config": {"room_wait_s": 2}})
        spec = module.TerraneOffloadingSpec(config)
        manager = spec.get_manager()
        assert type(manager) is module.WaitingTieringManager and spec.get_manager() is manager
        assert (manager.primary_tier, manager.secondary_tiers) == ("primary", ["tier"])
        assert manager.options == {"tier_poll_interval_s": 0.001} and manager._room_wait_s == 2


def test_options_of_the_spec_are_checked_before_the_tiers_are_opened(caplog):
    with installed("vllm", adapters.newest("vllm")) as module:
        def manager(**options):
            return module.TerraneOffloadingSpec(type("Config", (), {"extra_config": options})).get_manager()

        for options in ({"clear_on_reset": "false"}, {"clear_on_reset": 0}, {"room_wait_s": 0}):
            spec = module.TerraneOffloadingSpec(type("Config", (), {"extra_config": options}))
            (name,) = options
            for _ in range(2):
                with pytest.raises(ValueError, match=f"{name} is"):
                    spec.get_manager()
            assert spec._manager is None
        assert manager(clear_on_reset=True)._clears_on_reset
        assert not caplog.records
        assert not manager(clear_on_resets=True, cpu_bytes_to_use=1, spec_name="S")._clears_on_reset
        assert [record.getMessage() for record in caplog.records] == [
            "kv_connector_extra_config has 'clear_on_resets', which is not an option; did you mean 'clear_on_reset'?"
        ]


def test_the_entry_points_of_the_installed_wheel_name_functions_that_exist():
    ours = importlib.metadata.distribution("terrane-kv").entry_points
    assert {point.group for point in ours} == {"console_scripts", "vllm.general_plugins"}
    (registered,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="terrane")
    from terrane_kv.plugins import register_vllm

    assert registered.load() is register_vllm


def test_the_entry_point_registers_with_vllm_s_factories_and_may_be_called_again():
    from terrane_kv.plugins import register_vllm

    with installed("vllm", adapters.newest("vllm")):
        seen = []
        def register(*arguments):
            if arguments in seen:
                raise ValueError("already registered")
            seen.append(arguments)

        modules = sys.modules
        modules["vllm.v1.kv_offload.tiering.factory"].SecondaryTierFactory.register_tier = register
        modules["vllm.v1.kv_offload.factory"].OffloadingSpecFactory.register_spec = register
        register_vllm()
        register_vllm()
    assert seen == [
        ("terrane", "terrane_kv.vllm", "TerraneTier"),
        ("TerraneOffloadingSpec", "terrane_kv.vllm", "TerraneOffloadingSpec"),
    ]
    register_vllm()


@pytest.fixture(params=releases("lmcache"))
def lmcache(request, directory):
    with installed("lmcache", request.param) as module:
        made = Lmcache(module, directory)
        yield made
        made.close()


def test_lmcache_gets_a_result_for_each_key(lmcache):
    connector = lmcache.connector
    assert lmcache.store([1, 2, 3])
    keys = [lmcache.key(number) for number in (1, 7, 3)]
    assert lmcache.wait(connector.submit_batch_exists(keys)) [1:] == (True, "", [True, False, True])
    assert lmcache.load([3, 7, 1, 2]) == [True, None, True, True]
    assert lmcache.wait(connector.submit_batch_delete(keys))[3] == [True, False, True]
    assert lmcache.load([1, 2, 3]) == [None, True, None]
    wrong = numpy.zeros(5, dtype=numpy.uint8)
    number, ok, error, done = lmcache.wait(connector.submit_batch_get([lmcache.key(2)], [memoryview(wrong)]))
    assert (ok, done) == (False, [False])


def test_lmcache_s_batches_that_are_refused_complete_with_an_error(lmcache):
    connector = lmcache.connector
    large = memoryview(bytearray(BLOCK + 1))
    number = connector.submit_batch_set([lmcache.key(1), lmcache.key(2)], [large, memoryview(bytearray(8))])
    _, ok, error, done = lmcache.wait(number)
    assert (ok, done) == (False, [False, True]) and f"set chunk_bytes to {BLOCK + 1}" in error
    assert connector.drain_completions() == []


def test_lmcache_s_empty_batches_complete(lmcache):
    connector = lmcache.connector
    for submit, arguments in (
        (connector.submit_batch_set, ([], [])), (connector.submit_batch_get, ([], [])),
        (connector.submit_batch_exists, ([],)), (connector.submit_batch_delete, ([],)),
    ):
        assert lmcache.wait(submit(*arguments))[1:] == (True, "", [])


def test_lmcache_s_batches_with_wrong_memory_complete_and_leave_nothing(lmcache):
    connector = lmcache.connector
    assert lmcache.store([1])
    gaps, read_only = memoryview(bytearray(8192))[::2], memoryview(bytes(8))
    good = memoryview(bytearray(8))
    for submit, keys, buffers in (
        (connector.submit_batch_set, ["a", "b"], [gaps, good]),
        (connector.submit_batch_get, ["b"], [read_only]),
        (connector.submit_batch_set, [7], [good]),
    ):
        _, ok, error, done = lmcache.wait(submit(keys, buffers))
        assert not ok and error and not done[0]
    with pytest.raises(TypeError):
        connector.submit_batch_set(["a"], [object()])
    assert connector._batches == {} and connector.drain_completions() == []


@pytest.mark.parametrize("size", ["32MiB", 4096.0, None, 0, [], [4096, "8192"], True])
def test_chunk_bytes_of_lmcache_that_are_no_sizes_are_an_error_with_a_remedy(directory, size):
    with installed("lmcache", adapters.newest("lmcache")) as module:
        with pytest.raises(ValueError, match="pass a positive number of bytes"):
            Lmcache(module, directory, chunk_bytes=size)


@pytest.mark.parametrize("field", ["kv_dtype", "layout", "rope_scaling"])
def test_lmcache_s_blocks_of_another_format_are_refused(directory, field):
    with installed("lmcache", adapters.newest("lmcache")) as module:
        first = Lmcache(module, directory, **{field: "one"})
        assert first.store([1])
        first.close()
        with pytest.raises(terrane_kv.NamespaceError, match=field):
            Lmcache(module, directory, **{field: "another"})
        with pytest.raises(TypeError, match="kv_dtype"):
            module.Connector(directory=directory, capacity=64 * BLOCK, chunk_bytes=BLOCK)


def test_lmcache_s_key_algorithm_decides_whether_blocks_survive(directory, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with installed("lmcache", adapters.newest("lmcache")) as module, caplog.at_level(logging.WARNING):
        Lmcache(module, directory).close()
        assert not caplog.records
        random = Lmcache(module, directory + "/random", hash_algorithm="builtin")
        assert len(caplog.records) == 1 and "blake3" in caplog.text
        (report,) = [it for it in terrane_kv.doctor()["stores"] if not it["persistent"]]
        assert report["engine"] == "lmcache" and "blake3" in report["problems"][0]
        from terrane_kv.report import why

        assert "blake3" in why(random.connector._store, "key")
        random.close()


def test_models_of_many_layers_and_long_paths_are_opened_and_told_apart(directory):
    model = "/mnt/models/" + "checkpoint-" * 18
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(80)]
    scaling = {f"factor-{at}": at for at in range(100)}
    with installed("vllm", adapters.newest("vllm")) as module:
        def opened(**changes):
            return Vllm(module, directory, **{"model": model, "layers": layers, "rope_scaling": scaling, **changes})

        first = opened()
        assert first.store([1])
        first.close()
        again = opened()
        assert again.load([1]) == [True]
        again.close()
        # Each differs only beyond the beginning that is kept.
        for field, changes in (
            ("groups", {"layers": [*layers[:79], "model.layers.79.other"]}),
            ("rope_scaling", {"rope_scaling": {**scaling, "factor-99": 1}}),
        ):
            with pytest.raises(terrane_kv.NamespaceError, match=field):
                opened(**changes)
        other = opened(model=model + "x")
        assert other.load([1]) == [None]
        other.close()


def test_sizes_are_numbers_or_text():
    from terrane_kv.folders import capacity_bytes

    assert [capacity_bytes(it) for it in (5, "7", "2KiB", "1.5 MiB", "3Gi", "500GB", "1.1 tb")] == [
        5, 7, 2048, 1_572_864, 3 << 30, 500_000_000_000, 1_100_000_000_000,
    ]
    for wrong in ("much", "", -1, 0, "5 EiB", "3g", "1.GB", "٣GiB", 5e11, 0.5, None, True, [1]):
        with pytest.raises(ValueError):
            capacity_bytes(wrong)
