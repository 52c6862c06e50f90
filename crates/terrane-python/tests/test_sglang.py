"""SGLang's backend with SGLang's calls, for its three newest releases."""

import os
import sys
import time
import types

import numpy
import pytest

import adapters
import terrane_kv
from adapters import BLOCK, Pool, Sglang
from engines import installed, releases


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
    """A tensor with the methods that the older interface uses."""

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


class CopiedPool(Pool):
    """A pool whose layout has no zero-copy form, like SGLang's Mamba pool with `layer_first`."""

    error = ValueError

    def get_page_buffer_meta(self, indices):
        raise self.error("zero-copy requires page_first")

    def get_data_page(self, index, flat=True):
        return Tensor(self.kv_buffer[:, index // self.page_size].ravel())

    def get_dummy_flat_data_page(self):
        return Tensor(numpy.zeros(2 * self.half, dtype=numpy.uint8))

    def set_from_flat_data_page(self, index, page):
        self.kv_buffer[:, index // self.page_size] = page.array.reshape(2, self.half)


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


def capacities(adapters):
    return [it.storage._rank.store.snapshot()["tiers"][0]["capacity"] for it in adapters]


def test_sglang_s_replicas_take_the_folders_that_no_other_process_owns(directory):
    with installed("sglang", adapters.newest("sglang")) as module:
        def opened(**options):
            made = Sglang(module, directory, **options)
            made.storage._rank.open()
            return made

        replicas = [opened(engines=2), opened(engines=2)]
        assert max(capacities(replicas)) <= 32 * BLOCK
        assert sorted(os.listdir(directory)) == ["rank-0-of-2", "rank-1-of-2"]
        for options in ({"engines": 2}, {"engines": 2, "engine": 1}):
            with pytest.raises(terrane_kv.InUseError):
                opened(**options)
        replicas[1].close()
        replicas.append(opened(engines=2, engine=1))
        replicas[0].close()
        replicas[2].close()


@pytest.mark.parametrize("is_stated", [False, True])
def test_sglang_s_groups_of_dp_attention_divide_the_capacity(directory, is_stated):
    options = {"dp_groups": 2} if is_stated else {}
    with installed("sglang", adapters.newest("sglang")) as module:
        with pytest.raises(ValueError, match="dp_groups"):
            Sglang(module, directory, changes={"dp_rank": 1}).storage._rank.open()
        if not is_stated:
            set_context(attn_dp_size=2, num_dp_ranks=2, dp_rank=None)
        groups = [Sglang(module, directory, changes={"dp_rank": rank}, **options) for rank in (1, 0)]
        assert groups[0].store([1]) and groups[1].load([1]) == [None]
        assert max(capacities(groups)) <= 32 * BLOCK
        assert sorted(os.listdir(directory)) == ["rank-0-of-2", "rank-1-of-2"]
        for group in groups:
            group.close()


def set_context(model=None, **numbers):
    """Makes SGLang's context of the process return these numbers, and these values of the model."""
    module = types.ModuleType("sglang.srt.runtime_context")
    module.get_parallel = lambda: types.SimpleNamespace(**numbers)
    module.get_model = lambda: types.SimpleNamespace(**model or {})
    sys.modules[module.__name__] = module
    sys.modules["sglang.srt"].runtime_context = module


def test_a_replica_of_sglang_prefers_its_own_number(directory):
    with installed("sglang", adapters.newest("sglang")) as module:
        set_context(attn_dp_size=1, num_dp_ranks=2, dp_rank=1)
        made = Sglang(module, directory)
        assert made.store([1])
        assert os.listdir(directory) == ["rank-1-of-2"] and max(capacities([made])) <= 32 * BLOCK
        made.close()


def test_sglang_s_calls_return_false_after_a_failure(sglang):
    assert sglang.store([1])
    sglang.storage.close()
    assert sglang.load([1]) == [None] and not sglang.store([2])


def test_no_call_of_sglang_raises(sglang, caplog):
    keys, storage = [sglang.key(1), sglang.key(2)], sglang.storage
    assert sglang.store([1, 2])
    device = Tensor(numpy.zeros(4, dtype=numpy.uint16))
    device.device = type("Device", (), {"type": "cuda"})
    assert storage.batch_get(keys, [device, device]) == [None, None] and not storage.batch_set(keys, [object()] * 2)
    assert storage.batch_get(keys, [object(), object()]) == [None, None]
    # One page too few, and a pool that fails.
    assert storage.batch_get_v1(keys, sglang.pool.indices([0])[:1]) == [False, False]
    sglang.pool.get_page_buffer_meta = lambda indices: 1 / 0
    # Each of these failures would be logged once a minute.
    assert caplog.text.count("was refused") == 1
    storage._moves.warnings.next = 0.0
    assert storage.batch_set_v1(keys, sglang.pool.indices([0, 1])) == [False, False]
    assert storage.batch_exists([1, 2]) == 0
    assert "ZeroDivisionError" in caplog.text


def test_an_sglang_whose_store_cannot_be_opened_misses(directory, caplog):
    with installed("sglang", adapters.newest("sglang")) as module:
        owner, other = Sglang(module, directory), Sglang(module, directory)
        assert owner.store([1])
        assert other.load([1]) == [None] and not other.store([1]) and not other.storage.exists(other.key(1))
        assert caplog.text.count("cannot be opened") == 1
        with pytest.raises(terrane_kv.InUseError):
            other.storage._rank.open()
        owner.close()
        other.close()


def test_options_of_sglang_that_cannot_be_are_errors_at_the_start(directory, caplog):
    with installed("sglang", adapters.newest("sglang")) as module:
        for options, text in (
            ({"capacity": 0}, "must be positive"),
            ({"capacity": "5 Gb!"}, "write for example 500GiB"),
            ({"memory": "much"}, "write for example 500GiB"),
            ({"capacity": 5e11}, "500000000000.0 is not a whole number"),
            ({"capacity": None}, "None is not a whole number"),
            ({"memory": 1.5}, "1.5 is not a whole number"),
            ({"engines": 0}, "engines is 0; set a whole number of 1"),
            ({"engines": "two"}, "'two'; set a whole number"),
            ({"engine": -1}, "engine is -1; set a whole number of 0"),
            ({"engine": 0.5}, "0.5; set a whole number"),
            ({"engine": None}, "None; set a whole number"),
            ({"timeout_s": "soon"}, "'soon'; set seconds above 0"),
            ({"timeout_s": None}, "set seconds above 0"),
            ({"timeout_s": 0}, "set seconds above 0"),
            ({"timeout_s": -1.0}, "set seconds above 0"),
            ({"timeout_s": float("nan")}, "set seconds above 0"),
            ({"timeout_s": float("inf")}, "set seconds above 0"),
            ({"timeout_s": "Infinity"}, "set seconds above 0"),
            ({"timeout_s": 10**400}, "set seconds above 0"),
        ):
            with pytest.raises(ValueError, match=text):
                Sglang(module, directory, **options)
        assert not caplog.records
        # SGLang's own keys are not options of the backend.
        Sglang(module, directory, timeouts=1, interface_v1=1, backend_name="terrane")
        assert [record.getMessage() for record in caplog.records] == [
            "the extra config has 'timeouts', which is not an option; did you mean 'timeout_s'?"
        ]


@pytest.mark.parametrize("mla", [False, True])
def test_pages_of_another_byte_order_are_refused(directory, mla):
    with installed("sglang", adapters.newest("sglang")) as module:
        def opened(**options):
            made = Sglang(module, directory, mla=mla, **options)
            made.pool.layout = "layer_first"
            return made

        first = opened()
        assert first.storage.batch_set([first.key(1)], [Tensor(adapters.content(1))])
        first.close()
        again = opened(interface_v1=1)
        if mla:
            assert again.storage.exists(again.key(1))
        else:
            with pytest.raises(terrane_kv.NamespaceError, match="page_order"):
                again.storage._rank.open()
        again.close()


@pytest.mark.parametrize("is_option", [False, True])
def test_types_of_8_bits_are_told_apart(directory, is_option):
    with installed("sglang", adapters.newest("sglang")) as module:
        def opened(dtype):
            options = {"kv_dtype": dtype} if is_option and dtype else {}
            if not is_option and dtype:
                set_context({"kv_cache_dtype": dtype})
            made = Sglang(module, directory, **options)
            # SGLang's pools have this type for each type of 8 bits.
            made.pool.dtype = "torch.uint8"
            return made

        with pytest.raises(ValueError, match="set `kv_dtype`"):
            opened(None).storage._rank.open()
        first = opened("fp8_e4m3")
        assert first.store([1])
        first.close()
        with pytest.raises(terrane_kv.NamespaceError, match="kv_dtype"):
            opened("fp8_e5m2").storage._rank.open()
        again = opened("fp8_e4m3")
        assert again.load([1]) == [True]
        again.close()


@pytest.mark.parametrize(("option", "field"), [("model_path", "model_path"), ("revision", "model_revision")])
def test_two_models_with_one_alias_are_told_apart(directory, option, field):
    with installed("sglang", adapters.newest("sglang")) as module:
        model = {"model_path": "org/chat-7b", "revision": "main"}
        set_context(model)
        first = Sglang(module, directory, model="chat")
        assert first.store([1])
        first.close()
        set_context({**model, option: "other"})
        with pytest.raises(terrane_kv.NamespaceError, match=field):
            Sglang(module, directory, model="chat").storage._rank.open()
        set_context(model)
        again = Sglang(module, directory, model="chat")
        assert again.load([1]) == [True]
        again.close()


def test_a_pool_that_sglang_registers_last_has_its_pages(directory):
    with installed("sglang", "0.5.23") as module:
        made = Sglang(module, directory)
        draft, name = Pool(size=8192), made.types.PoolName.DRAFT
        made.storage.on_host_pools_registered()
        made.storage.register_mem_host_pool_v2(draft, name)
        assert made.store([1, 2])
        keys = [made.key(1), made.key(2)]
        transfer = made.types.PoolTransfer(
            name=name, keys=keys, host_indices=draft.indices([0, 1]), hit_policy=made.types.PoolHitPolicy.ALL_PAGES
        )
        assert made.storage.batch_set_v2([transfer]) == {name: [True, True]}
        assert made.storage.batch_exists_v2(keys, [transfer]).kv_hit_pages == 2
        made.close()


def test_options_that_the_ranks_show_to_be_wrong_are_errors_once_all_pools_are_known(directory):
    with installed("sglang", "0.5.23") as module:
        for options, text in (
            ({"changes": {"dp_rank": 1}}, "dp_groups"),
            ({"engine": 1}, "this is engine 1 \\(from 0\\), and 1 share root_dir"),
            ({"engine": 2, "engines": 2, "mla": True, "tp": (1, 2)}, "and 2 share root_dir"),
        ):
            made = Sglang(module, directory, **options)
            with pytest.raises(ValueError, match=text):
                made.storage.on_host_pools_registered()


def test_a_store_that_is_freed_is_opened_after_a_pause(directory, monkeypatch, caplog):
    with installed("sglang", adapters.newest("sglang")) as module:
        owner, other = Sglang(module, directory), Sglang(module, directory)
        assert owner.store([1]) and other.load([1]) == [None]
        owner.close()
        assert other.load([1]) == [None], "the pause has not ended"
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 31)
        assert other.load([1]) == [True]
        assert caplog.text.count("opened again after 30 seconds") == 1
        other.close()


def test_a_backend_that_is_closed_before_its_first_page_opens_no_store(directory, caplog):
    with installed("sglang", adapters.newest("sglang")) as module:
        made = Sglang(module, directory)
        made.close()
        assert made.load([1]) == [None] and not made.store([1]) and not made.storage.exists(made.key(1))
        with pytest.raises(terrane_kv.ClosedError, match="attach it again"):
            made.storage.clear()
        assert os.listdir(directory) == [] and not caplog.records


def test_failures_of_the_drive_are_logged_once_a_minute(sglang, caplog):
    class Job:
        """A job that the drive has failed."""

        done, error = [False], "key 0: the drive failed"

        def wait(self):
            return self

    assert sglang.store([1])
    store = sglang.storage._rank.store
    sglang.storage._rank.store = types.SimpleNamespace(put=lambda *_, **__: Job(), get=lambda *_, **__: Job())
    for _ in range(3):
        assert not sglang.store([2]) and sglang.load([1]) == [None]
    assert caplog.text.count("the drive failed") == 1
    sglang.storage._moves.warnings.next = 0.0
    assert sglang.load([1]) == [None] and caplog.text.count("the drive failed") == 2
    sglang.storage._rank.store = store


def test_a_store_of_another_namespace_stays_refused(directory, monkeypatch, caplog):
    with installed("sglang", adapters.newest("sglang")) as module:
        first = Sglang(module, directory, revision="one")
        assert first.store([1])
        first.close()
        other = Sglang(module, directory, revision="two")
        assert other.load([1]) == [None]
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 31)
        assert other.load([1]) == [None] and caplog.text.count("cannot be opened") == 1
        other.close()


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_pages_of_a_pool_without_zero_copy_are_copied(sglang, error):
    storage, name = sglang.storage, sglang.types.PoolName.MAMBA
    pool = CopiedPool(size=8192)
    pool.error = error
    storage.register_mem_host_pool_v2(pool, name)
    assert sglang.store([1, 2])
    for page in (0, 1):
        pool.write(page, 50 + page)
    keys = [sglang.key(number) for number in (1, 2, 3)]

    def transfer(keys, pages):
        return sglang.types.PoolTransfer(
            name=name, keys=keys, host_indices=pool.indices(pages), hit_policy=sglang.types.PoolHitPolicy.ALL_PAGES
        )

    assert storage.batch_set_v2([transfer(keys[:2], [0, 1])]) == {name: [True, True]}
    assert storage.batch_exists_v2(keys, [transfer(keys, [0, 1, 2])]).kv_hit_pages == 2
    pool.kv_buffer[:] = 0
    assert storage.batch_get_v2([transfer(keys, [5, 3, 4])]) == {name: [True, True, False]}
    assert pool.holds(5, 50) and pool.holds(3, 51) and not pool.kv_buffer[:, 4].any()
    # Too few indices, and a pool that fails.
    assert storage.batch_set_v2([transfer(keys, [0, 1])]) == {name: [False] * 3}
    pool.set_from_flat_data_page = lambda index, page: 1 / 0
    assert storage.batch_get_v2([transfer(keys, [5, 3, 4])]) == {name: [False] * 3}


class UnifiedPool(CopiedPool):
    """A pool in a region that another pool has registered, like the SWA pool of SGLang's unified memory."""

    def __init__(self, size):
        super().__init__(size)
        self._host_page_buffer_view, self.kv_buffer = self.kv_buffer, None
        self.size_per_token = size // self.page_size
        self.allocated = set()

    def get_page_buffer_meta(self, indices):
        pages = [int(index) // self.page_size for index in list(indices)[:: self.page_size]]
        assert self.allocated.issuperset(pages), "a host page is not allocated"
        view = self._host_page_buffer_view
        return [view[part, page].ctypes.data for page in pages for part in (0, 1)], [self.half] * 2 * len(pages)


def test_a_pool_of_unified_memory_has_pages_of_its_own(sglang):
    storage, name = sglang.storage, sglang.types.PoolName.MAMBA
    pool = UnifiedPool(size=8192)
    storage.register_mem_host_pool_v2(pool, name)
    assert sglang.store([1, 2, 3])
    keys = [sglang.key(number) for number in (1, 2, 3)]

    def transfer(keys, pages):
        return sglang.types.PoolTransfer(
            name=name, keys=keys, host_indices=pool.indices(pages), hit_policy=sglang.types.PoolHitPolicy.ALL_PAGES
        )

    assert storage.batch_get_v2([transfer(keys, [4, 5, 6])]) == {name: [False] * 3}
    pool.allocated.update((4, 5, 6))
    for page in (4, 5):
        pool._host_page_buffer_view[:, page] = page
    assert storage.batch_set_v2([transfer(keys[:2], [4, 5])]) == {name: [True, True]}
    assert storage.batch_exists_v2(keys, [transfer(keys, [4, 5, 6])]).kv_hit_pages == 2
    pool._host_page_buffer_view[:] = 0
    assert storage.batch_get_v2([transfer(keys, [5, 4, 6])]) == {name: [True, True, False]}
    assert (pool._host_page_buffer_view[:, 5] == 4).all() and (pool._host_page_buffer_view[:, 4] == 5).all()
    # SGLang destroys its pools at the exit.
    pool._host_page_buffer_view = None
    assert storage.batch_get_v2([transfer(keys, [5, 4, 6])]) == {name: [False] * 3}


def test_a_side_pool_whose_memory_another_rank_has_has_each_page(sglang):
    storage, name = sglang.storage, sglang.types.PoolName.MAMBA
    pool = Pool(size=8192)
    indices, pool._is_dummy = pool.indices([0, 1]), True
    del pool.kv_buffer
    storage.register_mem_host_pool_v2(pool, name)
    assert sglang.store([1, 2])
    keys = [sglang.key(number) for number in (1, 2, 3)]
    transfer = sglang.types.PoolTransfer(
        name=name, keys=keys[:2], host_indices=indices, hit_policy=sglang.types.PoolHitPolicy.ALL_PAGES
    )
    assert storage.batch_set_v2([transfer]) == storage.batch_get_v2([transfer]) == {name: [True, True]}
    assert storage.batch_exists_v2(keys, [transfer]).kv_hit_pages == 2


def test_the_older_interface_has_each_page_of_a_pool_without_memory(sglang):
    sglang.pool.kv_buffer, sglang.pool.size_per_token = None, 0
    keys, page = [sglang.key(1), sglang.key(2)], Tensor(numpy.zeros(0, dtype=numpy.uint8))
    assert sglang.storage.batch_set(keys, [page, page]) and sglang.storage.set(keys[0], page)
    assert sglang.storage.batch_exists(keys) == 2 and sglang.storage.exists(keys[0])
    assert sglang.storage.batch_get(keys, [page, page]) == [page, page]
    assert sglang.storage.get(keys[0], page) is page
