"""The store in Python: jobs, results, queues, errors, and memory that stays referenced."""

import asyncio
import gc
import os
import select
import sys
import threading
import weakref

import numpy
import pytest

import terrane_kv
from terrane_kv.report import why

from conftest import BLOCK


def block(number, size=BLOCK):
    return bytes([number % 251, number // 251 % 251]) * (size // 2)


def stored(store, count, **options):
    keys = [f"key {number}".encode() for number in range(count)]
    outcome = store.put(keys, [block(number) for number in range(count)], **options).wait(10)
    assert outcome.ok, outcome.error
    return keys


def test_blocks_are_loaded_by_key(opened):
    store = opened()
    keys = stored(store, 4)
    memory = [bytearray(BLOCK) for _ in keys]
    outcome = store.get(keys[::-1], memory).wait(10)
    assert outcome.results == ["done"] * 4 and outcome.bytes == 4 * BLOCK
    assert [bytes(it) for it in memory] == [block(number) for number in (3, 2, 1, 0)]
    assert store.prefix([*keys, b"other"]) == 4
    assert list(store.presences([keys[0], b"other"])) == [2, 0]
    assert store.put(keys, [block(9)] * 4).wait(10).results == ["already_stored"] * 4


def test_keys_are_bytes_or_text_of_any_length(opened):
    store = opened()
    names = ["model@00000000@0@" + "ab" * 32, b"\x00" * 36, "κλειδί", b"x" * 3000]
    assert store.put(names, [block(number) for number in range(4)]).wait(10).ok
    assert store.presence("κλειδί".encode()) == store.presence(b"x" * 3000) == 2
    with pytest.raises(terrane_kv.StoreError, match="no bytes"):
        store.put([b""], [block(0)])


def test_each_key_has_its_own_result(opened):
    store = opened()
    keys = stored(store, 1)
    memory = [bytearray(BLOCK), bytearray(BLOCK), bytearray(100)]
    outcome = store.get([keys[0], b"absent", keys[0]], memory).wait(10)
    assert outcome.results == ["done", "absent", "wrong_length"]
    assert outcome.done == [True, False, False] and not outcome.ok
    assert "100" in outcome.error
    assert store.get([b"absent"], [bytearray(8)]).wait(10).error is None


@pytest.mark.parametrize("size", [1, 511, 512, 4095, 4096, 4097, 3 * 4096 + 1, BLOCK])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_buffers_of_any_length_and_alignment_keep_their_surroundings(opened, size, shift):
    store = opened()
    source = numpy.random.default_rng(size).integers(0, 256, size + shift, dtype=numpy.uint8)
    assert store.put(["tail"], [source[shift:]]).wait(10).ok
    around = numpy.full(size + 2 * 4096 + shift, 0xA5, dtype=numpy.uint8)
    inside = slice(4096 + shift, 4096 + shift + size)
    assert store.get(["tail"], [around[inside]]).wait(10).ok
    assert (around[inside] == source[shift:]).all()
    around[inside] = 0xA5
    assert (around == 0xA5).all(), "bytes outside the block were written"


def test_a_block_of_several_buffers(opened):
    store = opened()
    parts = [block(1, 1000), block(2, 3000), block(3, 96)]
    assert store.put(["k"], [parts]).wait(10).ok
    memory = bytearray(4096)
    assert store.get(["k"], [memory]).wait(10).ok
    assert memory == b"".join(parts)


def test_rows_of_a_region_by_ids_of_numpy(opened):
    store = opened()
    rows = numpy.arange(8 * BLOCK, dtype=numpy.uint32).view(numpy.int8)[: 8 * BLOCK].reshape(8, BLOCK)
    region = terrane_kv.Region(memoryview(rows), BLOCK)
    before = rows.copy()
    for dtype in (numpy.int32, numpy.int64, numpy.uint32, numpy.uint64):
        ids = numpy.array([5, 2], dtype=dtype)
        keys = [f"{dtype.__name__} {at}" for at in ids]
        assert store.put(keys, region.rows(ids)).wait(10).ok
        rows[[5, 2]] = 0
        assert store.get(keys, region.rows(ids)).wait(10).ok
        assert (rows == before).all()
    for wrong, error in (([8], IndexError), (numpy.array([-1]), ValueError), (numpy.ones(1), TypeError)):
        with pytest.raises(error):
            region.rows(wrong)
    region.release()
    with pytest.raises(ValueError, match="released"):
        region.rows([0])


def test_pointers_with_sizes(opened):
    store = opened()
    array = numpy.arange(4096, dtype=numpy.uint8)
    pointers = [array.ctypes.data, array.ctypes.data + 3000]
    blocks = terrane_kv.Blocks.at(pointers, [3000, 1096], 1, keep=array)
    assert len(blocks) == 1 and store.put(["k"], blocks).wait(10).ok
    memory = bytearray(4096)
    assert store.get(["k"], [memory]).wait(10).ok and memory == array.tobytes()
    with pytest.raises(ValueError, match="pass the same number"):
        terrane_kv.Blocks.at(pointers, [1, 2], 3, keep=array)
    with pytest.raises(ValueError, match="a pointer is 0"):
        terrane_kv.Blocks.at([0], [1], 1, keep=array)


def test_memory_that_a_job_cannot_use_is_refused(opened):
    store = opened()
    keys = stored(store, 1)
    with pytest.raises(BufferError, match="read-only"):
        store.get(keys, [bytes(BLOCK)])
    with pytest.raises(BufferError, match="gaps"):
        store.put(["k"], [numpy.zeros((4, 4))[:, 1]])
    with pytest.raises(TypeError):
        store.put(["k"], [object()])
    with pytest.raises(terrane_kv.StoreError, match="1 keys and 2 blocks"):
        store.put(["k"], [b"a", b"b"])
    with pytest.raises(terrane_kv.StoreError, match="bytes"):
        store.put(["k"], [bytes(BLOCK + 1)])
    with pytest.raises(terrane_kv.StoreError, match="group 7"):
        store.put(["k"], [b"a"], group=7)
    with pytest.raises(TypeError, match="no option"):
        store.put(["k"], [b"a"], colour=1)


def test_a_buffer_stays_exported_until_its_job_ends(opened):
    store = opened()
    memory = bytearray(block(1))
    before = sys.getrefcount(memory)
    job = store.put(["k"], [memory])
    job.wait(10)
    store.drain()
    after = sys.getrefcount(memory)
    assert after == before
    memory.extend(b"x")
    blocks = terrane_kv.Blocks.of([memory])
    with pytest.raises(BufferError):
        memory.extend(b"x")
    del blocks
    store.drain()
    memory.extend(b"x")


def test_a_queue_delivers_each_job_once(opened):
    store = opened()
    queue = terrane_kv.CompletionQueue(8)
    for number in range(8):
        store.put([f"k{number}"], [block(number)], queue=queue, tag=number)
    with pytest.raises(terrane_kv.QueueFullError, match="capacity 8"):
        store.put(["more"], [block(0)], queue=queue)
    tags = []
    while len(tags) < 8:
        assert select.select([queue.fileno()], [], [], 10)[0], "nothing became readable"
        tags += [outcome.tag for outcome in queue.drain()]
    assert sorted(tags) == list(range(8))
    assert not select.select([queue.fileno()], [], [], 0)[0]
    assert queue.wait(timeout=0.01) is None and len(queue) == 0
    job = store.get(["k1"], [bytearray(BLOCK)], queue=queue)
    with pytest.raises(terrane_kv.StoreError, match="queue"):
        job.wait()
    assert queue.wait(timeout=10).ok


def test_jobs_are_awaited_in_asyncio(opened):
    store = opened()

    async def both_ways():
        puts = [store.put([f"k{number}"], [block(number)]) for number in range(20)]
        outcomes = await asyncio.gather(*map(asyncio.ensure_future, map(_awaited, puts)))
        assert all(outcome.ok for outcome in outcomes)
        memory = bytearray(BLOCK)
        outcome = await store.get(["k7"], [memory])
        assert outcome.ok and memory == block(7)

    async def _awaited(job):
        return await job

    asyncio.run(both_ways())


def test_several_tasks_await_one_job_and_some_are_cancelled(opened):
    store = opened()
    keys = [f"k{number}" for number in range(64)]
    blocks = [block(number) for number in range(64)]

    async def one(job):
        return await job

    async def all_of_them():
        job = store.put(keys, blocks)
        tasks = [asyncio.ensure_future(one(job)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert all(outcome.ok for at, outcome in enumerate(outcomes) if at not in (0, 3))
        job = store.get(keys, [bytearray(BLOCK) for _ in keys])
        alone = asyncio.ensure_future(one(job))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        assert (await asyncio.wait_for(one(job), 20)).ok

    asyncio.run(all_of_them())
    from terrane_kv import aio

    assert aio._watched == {}


class RunningJob:
    """A job whose end is not visible yet."""

    def __init__(self, job):
        self.job, self.event = job, os.eventfd(0)

    def __getattr__(self, name):
        return getattr(self.job, name)

    def has_ended(self):
        return False

    def fileno(self):
        return self.event


def test_a_cancelled_await_leaves_nothing_in_its_job(opened, monkeypatch):
    from terrane_kv import aio

    events = weakref.WeakSet()

    class Event(asyncio.Event):
        def __init__(self):
            super().__init__()
            events.add(self)

    monkeypatch.setattr(asyncio, "Event", Event)
    job = RunningJob(opened().put(["k"], [block(1)]))

    async def cancel_many():
        for _ in range(20):
            task = asyncio.ensure_future(aio.ended(job))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        gc.collect()
        return len(events)

    # The last task is still referenced.
    assert asyncio.run(cancel_many()) <= 1 and aio._watched == {}
    os.close(job.event)


def test_a_task_wakes_up_when_a_thread_takes_the_outcome_of_its_job(opened):
    store = opened()

    async def once(number):
        job = store.put([f"{number}"], [block(number % 7)])
        thread = threading.Thread(target=job.wait)
        thread.start()
        outcome = await asyncio.wait_for(job, 10)
        thread.join()
        # This also works for a job whose outcome was taken before.
        return outcome.ok and (await asyncio.wait_for(job, 10)).ok

    async def all_of_them():
        return [await once(number) for number in range(300)]

    assert all(asyncio.run(all_of_them()))


def test_a_removed_key_is_absent_and_why_has_the_reason(opened):
    store = opened()
    keys = stored(store, 3)
    assert store.remove(keys[:1]).wait(10).ok
    assert store.presence(keys[0]) == 0 and store.presence(keys[1]) == 2
    assert "present" in store.why(keys[1])
    assert "removed" in store.why(keys[0])
    assert "does not remember" in why(store, b"never")
    store.clear()
    assert store.prefix(keys[1:]) == 0


def test_events_have_the_keys_as_they_were_given(opened):
    store = opened(capacity=8 * BLOCK)
    events = store.events(1000)
    keys = stored(store, 1)
    for number in range(1, 24):
        assert store.put([f"key {number}"], [block(number)]).wait(10).ok
    store.remove([b"key 23"]).wait(10)
    taken = events.drain()
    assert ("stored", keys[0]) in taken and ("removed", b"key 23") in taken
    evicted = [key for kind, key in taken if kind == "evicted"]
    assert len(evicted) >= 23 - 8 and all(store.presence(key) == 0 for key in evicted)
    assert events.lost == 0


def test_the_capacity_is_kept(opened, directory):
    store = opened(capacity=8 * BLOCK)
    for number in range(40):
        assert store.put([f"key {number}"], [block(number)]).wait(10).ok
    snapshot = store.snapshot()
    (disk,) = snapshot["tiers"]
    assert disk["blocks"] <= disk["slots"] <= 8 and disk["evictions"] >= 32
    assert disk["capacity"] <= 8 * BLOCK


def test_blocks_are_there_after_a_restart(opened):
    store = opened()
    keys = stored(store, 10)
    store.close()
    store = opened()
    assert store.recovery["found"] == 10
    memory = [bytearray(BLOCK) for _ in keys]
    assert store.get(keys, memory).wait(10).ok
    assert [bytes(it) for it in memory] == [block(number) for number in range(10)]


def test_a_store_that_is_not_persistent_is_empty_after_a_restart(opened):
    store = opened(persistent=False)
    keys = stored(store, 3)
    store.close()
    store = opened(persistent=False)
    assert store.prefix(keys) == 0


def test_other_facts_of_the_namespace_are_refused(opened):
    opened().close()
    with pytest.raises(terrane_kv.NamespaceError, match="model"):
        opened(fields={"model": "another"})
    with pytest.raises(terrane_kv.NamespaceError):
        opened(namespace="../elsewhere")
    assert opened(namespace="other", fields={"model": "another"}).prefix([b"key 0"]) == 0


def test_a_directory_has_one_owner(opened):
    opened()
    with pytest.raises(terrane_kv.InUseError, match=str(os.getpid())):
        opened()


def test_a_closed_store_refuses(opened):
    store = opened()
    keys = stored(store, 1)
    store.close()
    store.close()
    with pytest.raises(terrane_kv.ClosedError):
        store.put(keys, [block(0)])


def test_a_flipped_bit_is_absent_and_counted(opened, directory):
    store = opened()
    keys = stored(store, 6)
    store.close()
    slabs = [os.path.join(where, name) for where, _, names in os.walk(directory) for name in names if "slab" in name]
    (slab,) = slabs
    with open(slab, "r+b") as file:
        content = file.read()
        at = content.index(block(3)) + 12_345
        file.seek(at)
        file.write(bytes([content[at] ^ 4]))
    store = opened()
    memory = [bytearray(BLOCK) for _ in keys]
    outcome = store.get(keys, memory).wait(10)
    assert outcome.results == ["done"] * 3 + ["corrupt"] + ["done"] * 2
    assert store.presence(keys[3]) == 0 and "damaged" in store.why(keys[3])
    assert store.snapshot()["corrupt"] == 1


def test_a_read_only_directory_is_an_error_with_a_remedy(tmp_path):
    if os.geteuid() == 0:
        # Permissions do not restrict root, but a file in the place of a folder does.
        (tmp_path / "file").write_text("")
        place = tmp_path / "file" / "kv"
    else:
        tmp_path.chmod(0o500)
        place = tmp_path / "kv"
    with pytest.raises(OSError, match="choose another directory"):
        terrane_kv.Store(str(place), 1 << 20, groups=[("kv", BLOCK)], namespace="n")


def test_a_store_opened_for_reading_serves_gets_and_refuses_puts(opened):
    store = opened()
    keys = stored(store, 2)
    store.close()
    store = opened(read_only=True)
    assert store.get(keys, [bytearray(BLOCK), bytearray(BLOCK)]).wait(10).ok
    try:
        outcome = store.put(["new"], [block(9)]).wait(10)
    except terrane_kv.StoreError as error:
        assert "read-only" in str(error)
    else:
        assert not outcome.ok and "read-only" in outcome.error


def test_sixty_four_threads(opened):
    store = opened(capacity=2048 * BLOCK)
    wrong = []

    def work(number):
        for turn in range(8):
            keys = [f"{number} {turn} {at}" for at in range(2)]
            blocks = [block(number + turn), block(number)]
            memory = [bytearray(BLOCK), bytearray(BLOCK)]
            if not store.put(keys, blocks).wait(60).ok or not store.get(keys, memory).wait(60).ok:
                wrong.append((number, turn))
            elif [bytes(it) for it in memory] != blocks:
                wrong.append((number, turn, "bytes"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_rounds_without_growth(opened):
    store = opened(capacity=16 * BLOCK)
    queue = terrane_kv.CompletionQueue(4)
    source, memory = block(1, 4096), bytearray(4096)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))

    def rounds(count):
        for number in range(count):
            store.put([f"k{number % 32}"], [source], queue=queue)
            queue.wait()
            store.get([f"k{number % 32}"], [memory]).wait()

    rounds(1000)
    growths = []
    for _ in range(3):
        gc.collect()
        before = resident_bytes()
        rounds(10_000 // 3)
        gc.collect()
        growths.append(resident_bytes() - before)
        if growths[-1] < 1 << 20:
            break
    assert growths[-1] < 1 << 20, f"the memory grew by {growths} bytes"
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    memory.extend(b"no longer exported")


def test_the_package_imports_without_numpy_and_torch_in_little_time():
    import subprocess

    # The time of this process alone, because other processes may have the processors.
    text = (
        "import sys, time; started = time.process_time(); import terrane_kv; "
        "print(time.process_time() - started); "
        "assert not {'numpy', 'torch', 'vllm', 'sglang'} & set(sys.modules)"
    )
    took = float("inf")
    for _ in range(10):
        run = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
        took = min(took, float(run.stdout))
        if took < 0.25:
            break
    assert took < 0.25, f"{took:.3f} s"
