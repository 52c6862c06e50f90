"""PyTorch's CUDA tensors: to pinned memory, to disk and back, ordered only by PyTorch's streams."""

import asyncio
import gc

import pytest

import terrane_kv

try:
    import torch

    REASON = "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"
except ImportError as missing:
    REASON = f"there is no PyTorch: {missing}"
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

BLOCKS, LAYERS, PAGE, HEADS, DIM = 256, 8, 16, 8, 128
FORMS = {
    "outer block token head dim": (2, BLOCKS, PAGE, HEADS, DIM),
    "block outer token head dim": (BLOCKS, 2, PAGE, HEADS, DIM),
    "block outer head token dim": (BLOCKS, 2, HEADS, PAGE, DIM),
    "slot head dim": (BLOCKS * PAGE, HEADS, DIM),
    "block token row": (BLOCKS, PAGE, 576),
}
VLLM, APART = "outer block token head dim", "slot head dim"


def random_tensors(form):
    count = LAYERS * (2 if form == APART else 1)
    return [
        torch.randint(-(1 << 15), 1 << 15, FORMS[form], dtype=torch.int16, device="cuda").view(torch.bfloat16)
        for _ in range(count)
    ]


def options(form):
    return {"page_size": PAGE, "apart": True} if form == APART else {}


def blocks_of(form, tensor, blocks):
    """A copy of these blocks as bits, because some random values are NaN."""
    if form == VLLM:
        chosen = tensor[:, blocks]
    elif form == APART:
        chosen = tensor.view(BLOCKS, PAGE, HEADS, DIM)[blocks]
    else:
        chosen = tensor[blocks]
    return chosen.clone().view(torch.int16)


@pytest.fixture(autouse=True)
def nothing_is_kept():
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    terrane_kv.CompletionQueue(1).drain()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before, "PyTorch's memory is kept"


def open_store(opened, cache, **changes):
    choices = {"tiers": [terrane_kv.Tier.pinned(64 * cache.block_bytes)], **changes}
    return opened(groups=[("kv", cache)], capacity=(BLOCKS + 16) * cache.block_bytes, **choices)


def in_parts(call, keys, cache, blocks, **options):
    """Splits keys into jobs of 32 blocks, because a job may have at most as many blocks as the pinned tier."""
    parts = range(0, len(keys), 32)
    jobs = [call(keys[at : at + 32], cache.blocks(blocks[at : at + 32]), **options) for at in parts]
    outcomes = [job.wait(60) for job in jobs]
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]


def permutations(form, count):
    generator = torch.Generator().manual_seed(len(form))
    return [torch.randperm(BLOCKS, generator=generator)[:count].tolist() for _ in range(2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_stated", [False, True])
def test_a_cache_goes_to_disk_and_comes_back_in_the_order_of_a_stream(opened, form, is_stated):
    """The test does not wait for the device before the last comparison."""
    chosen, back = permutations(form, BLOCKS // 2)
    keys = [f"{block}" for block in chosen]
    stream = torch.cuda.Stream()
    order = {"stream": stream.cuda_stream} if is_stated else {}
    with torch.cuda.stream(stream):
        tensors = random_tensors(form)
        before = [blocks_of(form, tensor, chosen) for tensor in tensors]
        cache = terrane_kv.KvCache(tensors, form, **options(form))
        assert (cache.device, len(cache)) == (0, BLOCKS)
        store = open_store(opened, cache)
        in_parts(store.put, keys, cache, chosen, **order)
        for tensor in tensors:
            tensor.zero_()
        in_parts(store.get, keys, cache, back, **order)
        after = [blocks_of(form, tensor, back) for tensor in tensors]
        for old, new in zip(before, after):
            assert torch.equal(old, new)
        store.close()


def test_a_cache_comes_back_from_disk_after_a_restart(opened):
    tensors = random_tensors(VLLM)
    before = [tensor.clone() for tensor in tensors]
    cache = terrane_kv.KvCache(tensors, VLLM)
    keys, everything = [f"{block}" for block in range(BLOCKS)], list(range(BLOCKS))
    store = open_store(opened, cache)
    in_parts(store.put, keys, cache, everything)
    store.close()
    for tensor in tensors:
        tensor.zero_()
    store = open_store(opened, cache)
    assert store.recovery["found"] == BLOCKS
    in_parts(store.get, keys, cache, everything)
    for old, new in zip(before, tensors):
        assert torch.equal(old.view(torch.int16), new.view(torch.int16))
    disk = [tier for tier in store.snapshot()["tiers"] if tier["name"] == "disk"]
    assert disk[0]["read_bytes"] >= BLOCKS * cache.block_bytes
    store.close()


def test_tensors_are_adopted_by_data_ptr(opened):
    tensors = random_tensors(VLLM)
    cache = terrane_kv.KvCache.at(
        [tensor.data_ptr() for tensor in tensors], VLLM, tensors[0].shape, strides=tensors[0].stride(),
        element_bytes=2, memory=0, keep=tensors,
    )
    before = [blocks_of(VLLM, tensor, [3, 200]) for tensor in tensors]
    store = open_store(opened, cache)
    handle = torch.cuda.current_stream().cuda_stream
    assert store.put(["a", "b"], cache.blocks([3, 200]), stream=handle).wait(60).ok
    assert store.get(["a", "b"], cache.blocks([7, 8]), stream=handle).wait(60).ok
    for old, tensor in zip(before, tensors):
        assert torch.equal(old, blocks_of(VLLM, tensor, [7, 8]))
    store.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", ["pinned", "system"])
def test_a_manager_copies_to_host_memory_and_back(form, memory):
    chosen, back = permutations(form, BLOCKS // 2)
    places = list(range(BLOCKS // 2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensors = random_tensors(form)
        before = [blocks_of(form, tensor, chosen) for tensor in tensors]
        cache = terrane_kv.KvCache(tensors, form, **options(form))
        tier, manager = cache.allocate_like(BLOCKS // 2, memory), terrane_kv.Manager([0])
        copied = manager.copy(cache.blocks(chosen), tier.blocks(places)).wait(60)
        assert copied.bytes == len(chosen) * cache.block_bytes
        assert (copied.engine == "cuda") == (memory == "pinned"), copied
        for tensor in tensors:
            tensor.zero_()
        manager.copy(tier.blocks(places), cache.blocks(back)).wait(60)
        for old, tensor in zip(before, tensors):
            assert torch.equal(old, blocks_of(form, tensor, back))


@pytest.mark.parametrize("count", [1, 64])
def test_tensors_of_a_device_that_is_not_current(opened, count):
    """PyTorch's current device stays the first one. The test does not wait for the second device before the
    comparison."""
    if torch.cuda.device_count() < 2:
        pytest.skip("PyTorch sees one CUDA device")
    there, stream = torch.device("cuda", 1), torch.cuda.Stream(device=1)
    chosen, back = list(range(count)), list(range(100, 100 + count))
    keys = [f"{block}" for block in chosen]
    with torch.cuda.device(there), torch.cuda.stream(stream):
        tensors = random_tensors(VLLM)
        before = [blocks_of(VLLM, tensor, chosen) for tensor in tensors]
        assert tensors[0].device == there
        # The stream stays the current stream of the second device.
        with torch.cuda.device(0):
            cache = terrane_kv.KvCache(tensors, VLLM)
            assert cache.device == 1
            store = open_store(opened, cache, tiers=[terrane_kv.Tier.pinned(64 * cache.block_bytes, device=1)])
            assert store.put(keys, cache.blocks(chosen)).wait(60).ok
            for tensor in tensors:
                tensor.zero_()
            assert store.get(keys, cache.blocks(back)).wait(60).ok
            store.close()
        for old, tensor in zip(before, tensors):
            assert torch.equal(old, blocks_of(VLLM, tensor, back))


def test_a_copy_between_two_devices_runs_after_the_work_on_both():
    if torch.cuda.device_count() < 2:
        pytest.skip("PyTorch sees one CUDA device")
    streams = [torch.cuda.Stream(device=number) for number in (0, 1)]
    chosen, back = list(range(64)), list(range(100, 164))
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        caches = []
        for number in (0, 1):
            with torch.cuda.device(number), torch.cuda.stream(streams[number]):
                caches.append(random_tensors(VLLM))
        source, destination = (terrane_kv.KvCache(tensors, VLLM) for tensors in caches)
        terrane_kv.Manager([0, 1]).copy(source.blocks(chosen), destination.blocks(back)).wait(60)
        for mine, theirs in zip(*caches):
            assert torch.equal(blocks_of(VLLM, mine, chosen).cpu(), blocks_of(VLLM, theirs, back).cpu())


def test_pinned_tensors_of_pytorch_are_adopted_by_data_ptr():
    tensors = random_tensors(VLLM)
    there = [torch.zeros(FORMS[VLLM], dtype=torch.bfloat16, pin_memory=True) for _ in tensors]
    cache = terrane_kv.KvCache(tensors, VLLM)
    pinned = terrane_kv.KvCache.at(
        [tensor.data_ptr() for tensor in there], VLLM, FORMS[VLLM], element_bytes=2, memory="pinned", keep=there
    )
    everything = list(range(BLOCKS))
    terrane_kv.Manager([0]).copy(cache.blocks(everything), pinned.blocks(everything)).wait(60)
    for old, new in zip(tensors, there):
        assert torch.equal(old.cpu().view(torch.int16), new.view(torch.int16))


def test_pinned_memory_of_ours_is_pytorch_s_on_the_processor():
    tensors = random_tensors(VLLM)
    cache = terrane_kv.KvCache(tensors, VLLM)
    pinned, manager = cache.allocate_like(4, "pinned"), terrane_kv.Manager([0])
    manager.copy(cache.blocks([9]), pinned.blocks([2])).wait(60)
    seen = [torch.from_dlpack(tensor) for tensor in pinned.tensors(VLLM, "bfloat16", writable=True)]
    for there, tensor in zip(seen, tensors):
        assert there.device == torch.device("cpu") and there.is_pinned()
        assert torch.equal(there[:, 2].view(torch.int16), tensor[:, 9].cpu().view(torch.int16))


def test_jobs_are_awaited(opened):
    tensors = random_tensors(VLLM)
    cache = terrane_kv.KvCache(tensors, VLLM)
    store, manager = open_store(opened, cache), terrane_kv.Manager([0])
    pinned = cache.allocate_like(8, "pinned")

    async def jobs():
        outcome = await store.put(["a"], cache.blocks([1]))
        copied = await manager.copy(cache.blocks([2]), pinned.blocks([0]))
        return outcome.ok, copied.bytes

    assert asyncio.run(jobs()) == (True, cache.block_bytes)
    store.close()


def test_ten_thousand_rounds_without_growth(opened):
    tensors = random_tensors(VLLM)
    cache = terrane_kv.KvCache(tensors, VLLM)
    manager, pinned = terrane_kv.Manager([0]), cache.allocate_like(8, "pinned")
    store = open_store(opened, cache)

    def rounds(count):
        for number in range(count):
            manager.copy(cache.blocks([number % BLOCKS]), pinned.blocks([number % 8])).wait(60)
            if number % 10 == 0:
                assert store.put([f"{number}"], cache.blocks([number % BLOCKS])).wait(60).ok

    rounds(500)
    free, _ = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    rounds(10_000)
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20
    assert torch.cuda.memory_allocated() == allocated
    store.close()
