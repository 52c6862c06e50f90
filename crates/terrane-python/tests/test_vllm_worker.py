"""vLLM's worker by Terrane's copy engines, over tensors in host memory. All bytes of both ends are compared."""

import gc
import logging
import sys
import types
import weakref

import numpy
import pytest

from engines import installed, releases

PAGE, PADDED = 96, 128


class Tensor:
    """The part of a two-dimensional PyTorch tensor that the worker uses."""

    device = types.SimpleNamespace(type="cpu", index=None)

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self, dimension):
        return self.array.strides[dimension]

    def is_pinned(self):
        return False

    def __len__(self):
        return len(self.array)


class Arrays:
    """Memory of NumPy, also in place of a GPU's."""

    is_pinned = False

    @staticmethod
    def on_gpu(array):
        return Tensor(array)

    on_host = on_gpu

    @staticmethod
    def array(tensor):
        return tensor.array

    @staticmethod
    def assign(tensor, places, other, other_places):
        tensor.array[places] = other.array[other_places]


@pytest.fixture
def memory():
    return Arrays()


class OwnWorker:
    """vLLM's worker: its tensors, its host rows, and its copies, as plain loops."""

    def __init__(self, memory, *, groups, pages, per_chunk, blocks=24, chunks=10, is_canonical=False):
        random = numpy.random.default_rng(0)
        byte = lambda *shape: random.integers(-128, 128, shape, dtype=numpy.int8)
        # A row has the cells of two ranks, of which this is the second, and each cell has the chunk of each tensor.
        cell = sum(pages) * per_chunk
        ends = cell + numpy.cumsum([page * per_chunk for page in pages])
        self.memory, self.rows = memory, byte(chunks, 2 * cell + 32)
        ref = sys.modules["vllm.v1.kv_offload.base"].CanonicalKVCacheRef
        self._store_handler = types.SimpleNamespace(
            src_tensors=[memory.on_gpu(byte(blocks, page)) for page in pages],
            dst_tensors=[
                memory.on_host(self.rows[:, end - page * per_chunk : end]) for end, page in zip(ends, pages)
            ],
            layer_refs_per_group=[[ref(tensor_idx=at, page_size_bytes=size) for at, size in group] for group in groups],
            dst_blocks_per_chunk=per_chunk,
            _canonical_copy_plans=[] if is_canonical else None,
        )
        self._mmap_region = types.SimpleNamespace(is_pinned=memory.is_pinned)
        self.repeated, self.waited, self.is_shut_down = [], [], False

    def bytes(self):
        on_gpu = [self.memory.array(tensor) for tensor in self._store_handler.src_tensors]
        return on_gpu + [self.rows.copy()]

    def copy(self, gpu_spec, chunk_ids, is_store):
        handler, per_chunk = self._store_handler, self._store_handler.dst_blocks_per_chunk
        block_at = chunk_at = 0
        for refs, size, index in zip(handler.layer_refs_per_group, gpu_spec.group_sizes, gpu_spec.block_indices):
            for number in range(size):
                place = index % per_chunk + number
                chunk, inside = chunk_ids[chunk_at + place // per_chunk], place % per_chunk
                block = gpu_spec.block_ids[block_at + number]
                for ref in refs:
                    device, host = (tensors[ref.tensor_idx] for tensors in (handler.src_tensors, handler.dst_tensors))
                    begin, page = inside * (host.shape[1] // per_chunk), ref.page_size_bytes
                    on_gpu = device, (int(block), slice(page))
                    on_host = host, (int(chunk), slice(begin, begin + page))
                    self.memory.assign(*((*on_host, *on_gpu) if is_store else (*on_gpu, *on_host)))
            block_at += size
            chunk_at += -(-(index % per_chunk + size) // per_chunk) if size else 0

    def submit_store(self, job_id, src_spec, dst_spec):
        self.copy(src_spec, dst_spec.block_ids, True)
        self.repeated.append(job_id)
        return True

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        self.copy(dst_spec, src_spec.block_ids, False)
        self.repeated.append(job_id)
        return True

    def get_finished(self):
        finished, self.repeated = self.repeated, []
        return [("own", job_id) for job_id in finished]

    def wait(self, job_ids):
        self.waited.append(set(job_ids))

    def shutdown(self):
        self.is_shut_down = True


ONE_GROUP = {"groups": [[(0, PADDED), (1, PADDED), (2, PADDED)]], "pages": [PADDED] * 3}
# The groups of a hybrid model share tensors, and one group uses only a part of each page.
HYBRID = {"groups": [[(0, PADDED), (1, PADDED)], [(0, PAGE), (1, PAGE)], []], "pages": [PADDED] * 2}
# The layers of one group have pages of two sizes, such as a latent and an indexer.
TWO_SIZES = {"groups": [[(0, PAGE), (1, 32), (2, PAGE), (3, 32)]], "pages": [PAGE, 32, PAGE, 32]}


@pytest.fixture(params=releases("vllm"))
def module(request):
    with installed("vllm", request.param) as adapter:
        yield adapter


def gpu(blocks, sizes, indices):
    ids = numpy.array(blocks, dtype=numpy.int32)
    return types.SimpleNamespace(block_ids=ids, group_sizes=sizes, block_indices=indices)


def host(chunks):
    return types.SimpleNamespace(block_ids=numpy.array(chunks, dtype=numpy.int64))


@pytest.fixture
def pair(module, memory):
    """Makes a worker of Terrane over vLLM's, and an equal worker of vLLM for the expected bytes."""

    def make(**options):
        own, expected = OwnWorker(memory, **options), OwnWorker(Arrays(), **options)
        return module.TerraneOffloadingWorker(own), own, expected

    return make


def finished(worker, count):
    results = []
    while len(results) < count:
        results += worker.get_finished()
    assert worker.get_finished() == []
    return results


def same(own, expected):
    return all((one == other).all() for one, other in zip(own.bytes(), expected.bytes(), strict=True))


@pytest.mark.parametrize("form", [ONE_GROUP, HYBRID, TWO_SIZES], ids=["one group", "hybrid", "two sizes"])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_stores_and_loads_copy_the_bytes_that_vllm_copies(pair, form, per_chunk):
    worker, own, expected = pair(per_chunk=per_chunk, **form)
    groups = len(form["groups"])
    # The first group begins inside a chunk and ends inside another one.
    sizes, indices = [5, 4, 0][:groups], [7, 3, 0][:groups]
    counts = [-(-(index % per_chunk + size) // per_chunk) for size, index in zip(sizes, indices)]
    store = gpu([11, 3, 20, 5, 9, 2, 17, 8, 0][: sum(sizes)], sizes, indices)
    chunks = host([6, 1, 9, 0, 4, 2, 7, 3, 8][: sum(counts)])
    load = gpu([1, 23, 4, 6, 12, 10, 21, 7, 13][: sum(sizes)], sizes, indices)
    assert worker.submit_store(1, store, chunks)
    worker.wait({1})
    assert worker.submit_load(2, chunks, load)
    first, second = finished(worker, 2)
    moved = sum(size * sum(page for _, page in group) for size, group in zip(sizes, form["groups"]))
    for result, job_id in ((first, 1), (second, 2)):
        assert (result.job_id, result.success, result.transfer_size) == (job_id, True, moved)
        assert result.transfer_time >= 0
    expected.copy(store, chunks.block_ids, True)
    expected.copy(load, chunks.block_ids, False)
    assert same(own, expected)


def test_jobs_on_the_same_blocks_run_in_order(pair):
    worker, own, expected = pair(per_chunk=1, **ONE_GROUP)
    for turn in range(20):
        store, load = gpu([turn], [1], [0]), gpu([turn + 1], [1], [0])
        worker.submit_store(2 * turn, store, host([5]))
        worker.submit_load(2 * turn + 1, host([5]), load)
        expected.copy(store, [5], True)
        expected.copy(load, [5], False)
    assert sorted(result.job_id for result in finished(worker, 40)) == list(range(40))
    assert same(own, expected)


def test_a_job_without_blocks_ends(pair):
    worker, _, _ = pair(per_chunk=3, **HYBRID)
    worker.submit_store(4, gpu([], [0, 0, 0], [0, 0, 0]), host([]))
    (result,) = finished(worker, 1)
    assert (result.job_id, result.success, result.transfer_size, result.transfer_time) == (4, True, 0, 0.0)


@pytest.mark.parametrize("sizes", [[3, 2, 0], [1, 1, 0], [1, 1]], ids=["too few blocks", "too many blocks", "no group"])
def test_a_job_that_terrane_refuses_is_repeated_by_vllm(pair, sizes, caplog):
    worker, own, _ = pair(per_chunk=1, **HYBRID)
    own.copy = lambda *_: None
    with caplog.at_level(logging.WARNING, logger="terrane_kv"):
        worker.submit_store(9, gpu([1, 2, 3, 4], sizes, [0] * len(sizes)), host([0, 1, 2, 3]))
        assert finished(worker, 1) == [("own", 9)]
    assert "job 9 is repeated by vLLM's own worker" in caplog.text


def test_a_block_that_is_not_there_is_left_to_vllm(pair):
    worker, own, _ = pair(per_chunk=1, **ONE_GROUP)
    own.copy = lambda *_: None
    worker.submit_load(3, host([0]), gpu([24], [1], [0]), expedited=True)
    worker.wait({3, 77})
    assert own.waited == [{3, 77}] and finished(worker, 1) == [("own", 3)]


def test_a_copy_that_fails_is_repeated_by_vllm_before_wait_returns(pair, module, monkeypatch):
    worker, own, expected = pair(per_chunk=1, **ONE_GROUP)
    failed = types.SimpleNamespace(has_ended=lambda: True, wait=lambda _: error())

    def error():
        raise module.worker.StoreError("the device is lost")

    monkeypatch.setattr(worker, "_copy", lambda source, destination: failed)
    store = gpu([7], [1], [0])
    worker.submit_store(1, store, host([2]))
    worker.wait({1})
    expected.copy(store, [2], True)
    assert same(own, expected) and finished(worker, 1) == [("own", 1)]


def test_a_chunk_that_a_failed_copy_wrote_in_part_is_read_after_vllm_has_written_it(pair, module, monkeypatch):
    worker, own, _ = pair(per_chunk=1, **ONE_GROUP)
    marked = []
    cache = types.SimpleNamespace(blocks=lambda ids: None, mark_written=lambda ids: marked.extend(ids))
    monkeypatch.setattr(worker, "_groups", [(cache, cache)])

    def wait(timeout):
        raise module.worker.StoreError("the device is lost")

    failed = types.SimpleNamespace(has_ended=lambda: True, wait=wait)
    monkeypatch.setattr(worker, "_copy", lambda source, destination: failed)
    worker.submit_store(1, gpu([7], [1], [0]), host([2]))
    worker.submit_load(2, host([2]), gpu([9], [1], [0]))
    assert finished(worker, 2) == [("own", 1), ("own", 2)] and marked == [2, 9]


def test_a_cache_on_another_kind_of_device_is_left_to_vllm(module, memory):
    own = OwnWorker(memory, per_chunk=1, **ONE_GROUP)
    tensors = own._store_handler.src_tensors
    other = types.SimpleNamespace(device=types.SimpleNamespace(type="xpu", index=0))
    own._store_handler.src_tensors = [other, *tensors[1:]]
    with pytest.raises(ValueError, match="CUDA devices"):
        module.TerraneOffloadingWorker(own)


def test_nothing_of_vllm_is_kept_when_its_worker_unmaps_its_memory(pair):
    worker, own, _ = pair(per_chunk=3, **ONE_GROUP)
    worker.submit_store(1, gpu([7], [1], [0]), host([2]))
    tensors = [weakref.ref(tensor) for tensor in own._store_handler.src_tensors + own._store_handler.dst_tensors]
    own._store_handler = None
    kept = []

    def shutdown():
        gc.collect()
        kept.extend(tensor for tensor in tensors if tensor() is not None)
        own.is_shut_down = True

    own.shutdown = shutdown
    worker.shutdown()
    assert own.is_shut_down and kept == []


class Config:
    def __init__(self, **extra_config):
        self.extra_config = extra_config


def test_the_spec_selects_the_worker(module, memory, monkeypatch, caplog):
    base = module.TerraneOffloadingSpec.__mro__[1]
    made = []

    def create_worker(self, kv_caches):
        made.append(OwnWorker(memory, per_chunk=1, is_canonical=kv_caches == "canonical", **ONE_GROUP))
        return made[-1]

    monkeypatch.setattr(base, "create_worker", create_worker)
    spec = module.TerraneOffloadingSpec(Config(copy_engine="terrane"))
    assert isinstance(spec.create_worker("kv"), module.TerraneOffloadingWorker)
    with caplog.at_level(logging.WARNING, logger="terrane_kv"):
        assert spec.create_worker("canonical") is made[-1]
    assert "canonical_layout" in caplog.text
    assert module.TerraneOffloadingSpec(Config(copy_engine="vllm")).create_worker("kv") is made[-1]
    with pytest.raises(ValueError, match="copy_engine is 'cuda'"):
        module.TerraneOffloadingSpec(Config(copy_engine="cuda")).create_worker("kv")
