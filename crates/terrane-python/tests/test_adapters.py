"""The adapters as their engines use them, for the three newest releases of each."""

import dataclasses
import logging
import sys

import numpy
import pytest

import adapters
import terrane_kv
from adapters import BLOCK, Lmcache, Pool, Sglang, Vllm
from engines import RELEASES, installed, releases, tables


@pytest.fixture(params=RELEASES, ids=lambda release: "-".join(release))
def adapter(request, directory):
    engine, version = request.param
    with installed(engine, version) as module:
        made = adapters.ADAPTERS[engine](module, directory)
        made.module = module
        yield made
        made.close()


def test_blocks_come_back(adapter):
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
    assert list(vllm.tier.take_events()) == []
    vllm.tier._store.remove([key]).wait(10)
    (event,) = vllm.tier.take_events()
    assert event.keys == [key] and event.removed
    assert isinstance(vllm.tier.on_new_request(vllm.context()), vllm.base.RequestOffloadingContext)


def test_a_failed_key_of_vllm_is_a_miss_for_that_request(vllm):
    vllm.store([1])
    result = vllm.run("load", [vllm.key(1), vllm.key(2)], [0, 1])
    assert not result.success and result.successful_keys == (vllm.key(1),)
    assert result.transfer_bytes == BLOCK and result.transfer_time > 0
    vllm.store([2])
    lookup = lambda request: vllm.tier.lookup(vllm.key(2), vllm.context(request)).name
    assert (lookup("r"), lookup("other")) == ("MISS", "HIT")
    vllm.tier.on_request_finished(vllm.context("r"))
    assert lookup("r") == "HIT"


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
        # vLLM releases the view afterwards, which fails while it is exported.
        view.release()


def test_vllm_s_engines_have_folders_of_their_own_and_share_the_capacity(directory):
    with installed("vllm", adapters.newest("vllm")) as module:
        both = [Vllm(module, directory, dp=(index, 2)) for index in (0, 1)]
        both[0].store([1])
        assert both[1].load([1]) == [None]
        for each in both:
            (disk,) = each.tier._store.snapshot()["tiers"]
            assert disk["capacity"] <= 32 * BLOCK
            each.close()


class Primary:
    """Host memory with room for some chunks."""

    def __init__(self, room):
        self.room, self.chunks = room, set()

    def holds(self, key):
        return key in self.chunks

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
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
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
        assert lookup(2) == "MISS", "no promotion for a request whose time is over"
        manager.on_request_finished(made.context())
        assert lookup(2) == "HIT_PENDING"
        made.close()


@pytest.mark.parametrize("version", releases("vllm"))
def test_the_spec_makes_our_manager_over_vllm_s_tiers(version):
    with installed("vllm", version) as module:
        config = type("Config", (), {"extra_config": {"room_wait_s": 2}})
        spec = module.TerraneOffloadingSpec(config)
        manager = spec.get_manager()
        assert type(manager) is module.WaitingTieringManager and spec.get_manager() is manager
        assert (manager.primary_tier, manager.secondary_tiers) == ("primary", ["tier"])
        assert manager.options == {"tier_poll_interval_s": 0.001} and manager._room_wait_s == 2


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


@pytest.fixture(params=releases("sglang"))
def sglang(request, directory):
    with installed("sglang", request.param) as module:
        made = Sglang(module, directory)
        made.module = module
        yield made
        made.close()


def test_sglang_s_longest_prefix(sglang):
    sglang.store([1, 2, 3])
    keys = [sglang.key(number) for number in (1, 2, 9, 3)]
    assert sglang.storage.batch_exists(keys) == 2
    assert sglang.storage.batch_exists(keys, sglang.types.HiCacheStorageExtraInfo()) == 2
    assert sglang.storage.exists(keys[0]) and not sglang.storage.exists(keys[2])
    sglang.storage.clear()
    assert sglang.storage.batch_exists(keys) == 0


class Tensor:
    """What the older interface asks of a tensor."""

    def __init__(self, array):
        self.array = array
        self.device = type("Device", (), {"type": "cpu"})

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return bool(self.array.flags.c_contiguous)

    def contiguous(self):
        return Tensor(numpy.ascontiguousarray(self.array))


def test_sglang_s_older_interface(sglang):
    pages = [Tensor(adapters.content(number).view(numpy.uint16)) for number in (1, 2)]
    keys = [sglang.key(1), sglang.key(2)]
    assert sglang.storage.batch_set(keys, pages)
    assert sglang.storage.set(sglang.key(3), pages[0])
    targets = [Tensor(numpy.zeros_like(pages[0].array)) for _ in range(3)]
    found = sglang.storage.batch_get([*keys, sglang.key(9)], targets)
    assert found == [targets[0], targets[1], None]
    assert all((page.array == target.array).all() for page, target in zip(pages, targets))
    assert sglang.storage.get(sglang.key(3), targets[2]) is targets[2]


def test_sglang_s_pools_of_hybrid_models_are_apart(sglang):
    types, storage = sglang.types, sglang.storage
    mamba = Pool(size=8192)
    storage.register_mem_host_pool_v2(mamba, types.PoolName.MAMBA)
    if hasattr(types.HiCacheStorage, "on_host_pools_registered"):
        storage.on_host_pools_registered()
    sglang.store([1, 2, 3, 4])
    keys = [sglang.key(number) for number in (1, 2, 3, 4)]
    for page in (0, 1):
        mamba.write(page, 50 + page)

    def transfer(keys, pages=None, policy="ALL_PAGES"):
        indices = None if pages is None else mamba.indices(pages)
        policy = getattr(types.PoolHitPolicy, policy)
        return types.PoolTransfer(name=types.PoolName.MAMBA, keys=keys, host_indices=indices, hit_policy=policy)

    assert storage.batch_set_v2([transfer([keys[0], keys[2]], [0, 1])]) == {types.PoolName.MAMBA: [True, True]}
    mamba.kv_buffer[:] = 0
    assert storage.batch_get_v2([transfer([keys[2], keys[1]], [3, 4])]) == {types.PoolName.MAMBA: [True, False]}
    assert mamba.holds(3, 51)
    whole = storage.batch_exists_v2(keys, [transfer(keys)])
    assert (whole.kv_hit_pages, whole.extra_pool_hit_pages[types.PoolName.MAMBA]) == (1, 1)
    last = storage.batch_exists_v2(keys, [transfer(keys[:1], policy="TRAILING_PAGES")])
    assert (last.kv_hit_pages, last.restorable_prefix_pages) == (3, [1, 3])
    assert last.extra_pool_hit_pages == {types.PoolName.KV: 4, types.PoolName.MAMBA: 3}


def test_sglang_s_ranks_do_not_see_each_other(directory):
    with installed("sglang", adapters.newest("sglang")) as module:
        ranks = [Sglang(module, directory, tp=(rank, 2)) for rank in (0, 1)]
        ranks[0].store([1])
        assert ranks[1].load([1]) == [None] and ranks[0].load([1]) == [True]
        for rank in ranks:
            rank.close()
        with pytest.raises(ValueError, match="rank 0 alone"):
            Sglang(module, directory, tp=(0, 2), mla=True)


def test_sglang_s_calls_return_false_after_a_failure(sglang):
    assert sglang.store([1])
    sglang.storage.close()
    assert sglang.load([1]) == [None] and not sglang.store([2])


def test_sizes_are_numbers_or_text():
    from terrane_kv.folders import capacity_bytes

    assert [capacity_bytes(it) for it in (5, "7", "2KiB", "1.5 MiB", "3g", "1TB")] == [
        5, 7, 2048, 1_572_864, 3 << 30, 1 << 40,
    ]
    for wrong in ("much", "", -1, 0, "5 PiB"):
        with pytest.raises(ValueError):
            capacity_bytes(wrong)
