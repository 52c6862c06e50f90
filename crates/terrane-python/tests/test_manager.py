"""Copies between caches in host memory, tiers, plans and the command."""

import asyncio
import json
import os
import subprocess
import sys
import time
import weakref

import numpy
import pytest

import terrane_kv

BLOCKS, LAYERS, PAGE, HEADS, DIM = 6, 3, 4, 2, 8
AXES = "outer block token head dim"


def caches():
    random = numpy.random.default_rng(0)
    shape = (2, BLOCKS, PAGE, HEADS, DIM)
    arrays = [random.integers(0, 1 << 16, shape, dtype=numpy.uint16) for _ in range(LAYERS)]
    return arrays, terrane_kv.KvCache(arrays, AXES)


def test_a_manager_copies_between_layouts_of_one_shape():
    arrays, cache = caches()
    there = [numpy.zeros((BLOCKS, 2, HEADS, PAGE, DIM), dtype=numpy.uint16) for _ in range(LAYERS)]
    other = terrane_kv.KvCache(there, "block outer head token dim")
    manager = terrane_kv.Manager()
    transfer = manager.copy(cache.blocks([2, 5]), other.blocks([1, 0]), timeout=30)
    copied = transfer.wait(30)
    assert transfer.has_ended() and transfer.wait().bytes == copied.bytes == 2 * cache.block_bytes
    assert copied.seconds >= 0 and copied.engine == "host"
    for array, found in zip(arrays, there):
        for block, place in ((2, 1), (5, 0)):
            assert (array[:, block].transpose(0, 2, 1, 3) == found[place]).all()


def test_a_cache_of_the_same_shape_is_allocated():
    arrays, cache = caches()
    other, manager = cache.allocate_like(20), terrane_kv.Manager()
    assert (len(other), other.block_bytes, other.device) == (20, cache.block_bytes, None)
    manager.copy(cache.blocks([3]), other.blocks([19])).wait(30)
    before = [array[:, 3].copy() for array in arrays]
    for array in arrays:
        array[:] = 0
    manager.copy(other.blocks([19]), cache.blocks([0])).wait(30)
    assert all((array[:, 0] == old).all() for array, old in zip(arrays, before))
    with pytest.raises(ValueError, match="pinned"):
        cache.allocate_like(4, "paper")


def test_a_copy_is_awaited():
    _, cache = caches()
    other, manager = cache.allocate_like(6), terrane_kv.Manager()

    async def copies():
        transfers = [manager.copy(cache.blocks([at]), other.blocks([at])) for at in range(BLOCKS)]
        return await asyncio.gather(*transfers)

    assert [copied.bytes for copied in asyncio.run(copies())] == [cache.block_bytes] * BLOCKS


def test_copies_that_cannot_be_are_refused():
    _, cache = caches()
    other, manager = cache.allocate_like(6), terrane_kv.Manager()
    with pytest.raises(terrane_kv.StoreError):
        manager.copy(cache.blocks([1, 2]), other.blocks([1]))
    with pytest.raises(terrane_kv.StoreError):
        manager.copy(cache.blocks([77]), other.blocks([1]))
    with pytest.raises(ValueError, match="whole blocks"):
        manager.copy(cache.blocks([1], tokens=[2]), other.blocks([1]))
    with pytest.raises(ValueError, match="KvCache"):
        manager.copy(terrane_kv.Blocks.of([bytes(8)]), other.blocks([1]))
    with pytest.raises(ValueError, match="no stream orders"):
        manager.copy(cache.blocks([1]), other.blocks([1]), stream=0)


def test_arrays_are_adopted_by_their_addresses(opened):
    (arrays, _), (_, shape) = caches(), caches()
    at = terrane_kv.KvCache.at(
        [array.ctypes.data for array in arrays], AXES, arrays[0].shape, element_bytes=2, keep=arrays
    )
    assert (len(at), at.block_bytes) == (len(shape), shape.block_bytes)
    store = opened(groups=[("kv", shape)])
    store.put(["k"], at.blocks([4])).wait(10)
    before = [array[:, 4].copy() for array in arrays]
    assert store.get(["k"], at.blocks([0])).wait(10).ok
    assert all((array[:, 0] == old).all() for array, old in zip(arrays, before))
    with pytest.raises(ValueError, match="no stream orders"):
        store.put(["x"], at.blocks([4]), stream=0)
    with pytest.raises(ValueError, match="there is no memory"):
        terrane_kv.KvCache.at([1], AXES, arrays[0].shape, element_bytes=2, keep=None, memory="disk")


def test_what_an_adoption_keeps_is_released_when_the_cache_is_freed():
    arrays = caches()[0]

    class Owner:
        pass

    owner = Owner()
    owner.arrays, seen = arrays, weakref.ref(owner)
    cache = terrane_kv.KvCache.at(
        [array.ctypes.data for array in arrays], AXES, arrays[0].shape, element_bytes=2, keep=owner
    )
    del owner
    assert seen() is not None and len(cache) == BLOCKS
    del cache
    assert seen() is None


def test_tiers_are_named_in_the_snapshot_and_serve_from_memory(opened):
    arrays, cache = caches()
    tier = cache.allocate_like(4)
    tiers = [terrane_kv.Tier.of([tier], "fast"), terrane_kv.Tier.system(1 << 20)]
    assert [it.name for it in tiers] == ["fast", "host"] and "4096" in repr(terrane_kv.Tier.system(4096))
    manager = terrane_kv.Manager()
    store = opened(groups=[("kv", cache)], tiers=tiers, manager=manager)
    assert [it["name"] for it in store.snapshot()["tiers"]] == ["fast", "host", "disk"]
    before = [array[:, 1].copy() for array in arrays]
    assert store.put(["k"], cache.blocks([1])).wait(10).ok
    assert store.get(["k"], cache.blocks([5])).wait(10).ok
    assert all((array[:, 5] == old).all() for array, old in zip(arrays, before))
    assert sum(it["hits"] for it in store.snapshot()["tiers"] if it["name"] != "disk") == 1
    with pytest.raises(ValueError, match="a cache for each group"):
        terrane_kv.Tier.of([], "empty")


def disk_blocks(store):
    (disk,) = (tier for tier in store.snapshot()["tiers"] if tier["name"] == "disk")
    return disk["blocks"]


def test_blocks_are_written_to_disk_by_the_policy(opened):
    memory = bytearray(64 << 10)
    store = opened(tiers=[terrane_kv.Tier.system(1 << 20)], write="back")
    assert store.put(["k"], [bytes(64 << 10)]).wait(10).ok
    assert disk_blocks(store) == 0
    store.sync()
    assert disk_blocks(store) == 1
    store.close()
    store = opened(tiers=[terrane_kv.Tier.system(1 << 20)], write=2, persistent=False)
    assert store.put(["k"], [bytes(64 << 10)]).wait(10).ok
    assert store.get(["k"], [memory]).wait(10).ok
    assert disk_blocks(store) == 0
    assert store.get(["k"], [memory]).wait(10).ok
    until = time.monotonic() + 10
    while disk_blocks(store) == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert disk_blocks(store) == 1
    store.close()
    with pytest.raises(ValueError, match="write="):
        opened(write="later")


def test_pinned_memory_without_a_driver_is_an_error_with_its_reason(directory):
    text = (
        "import sys, terrane_kv\n"
        "try: terrane_kv.Store(sys.argv[1], 1 << 20, groups=[('kv', 4096)], namespace='n',\n"
        "                      tiers=[terrane_kv.Tier.pinned(1 << 20)])\n"
        "except terrane_kv.StoreError as error: print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", text, directory], env=environment, check=True, capture_output=True, text=True
    )
    if not done.stdout:
        pytest.skip("this machine has a CUDA driver")
    assert "libcuda" in done.stdout or "CUDA" in done.stdout


SCRIPT = """
import os, sys, numpy, terrane_kv
arrays = [numpy.ones((2, 64, 16, 8, 128), dtype=numpy.uint16) for _ in range(4)]
cache = terrane_kv.KvCache(arrays, "outer block token head dim")
manager, other = terrane_kv.Manager(), cache.allocate_like(64)
everything = list(range(64))
"""


def script(text):
    done = subprocess.run([sys.executable, "-c", SCRIPT + text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_forked_child_gets_an_error():
    text = """
transfer = manager.copy(cache.blocks([1]), other.blocks([1]))
child = os.fork()
if child == 0:
    told = 0
    for call in (lambda: transfer.wait(), lambda: transfer.has_ended(), lambda: manager.copy(cache.blocks([2]), other.blocks([2]))):
        try:
            call()
        except terrane_kv.ForkedError:
            told += 1
    os._exit(told)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), transfer.wait().bytes == cache.block_bytes)
"""
    assert script(text) == ["3", "True"]


def test_the_interpreter_exits_with_copies_in_flight():
    text = """
for turn in range(50):
    blocks = (cache, other) if turn % 2 == 0 else (other, cache)
    try: manager.copy(blocks[0].blocks(everything), blocks[1].blocks(everything))
    except terrane_kv.StoreError: pass
print("leaving", flush=True)
"""
    assert script(text) == ["leaving"]


def test_a_plan_is_a_dictionary():
    plan = terrane_kv.plan("llama-3.1-8b", host="256GiB", disks={"/nvme": "1TiB"}, context=32_768, users=4)
    assert plan["groups"][0]["bytes_per_token"] == 131_072
    assert plan["tiers"][0]["blocks"] == 131_072
    halved = terrane_kv.plan("meta-llama/Llama-3.1-8B", tensor_parallel=2, kv_dtype="fp8")
    assert halved["groups"][0]["bytes_per_token"] == 32_768
    with pytest.raises(ValueError, match="did you mean"):
        terrane_kv.plan("lama-3.1-8b")
    with pytest.raises(ValueError, match="fp8"):
        terrane_kv.plan("llama-3.1-8b", kv_dtype="int3")


@pytest.mark.parametrize(
    "question",
    [{"host": -1}, {"host": 1 << 64}, {"gpu_memory": -1}, {"users": -1}, {"context": -1}, {"block_tokens": -1},
     {"chunk_tokens": 1 << 32}, {"tensor_parallel": -1}, {"disks": {"/nvme": -1}}, {"host": "much"}],
)
def test_numbers_of_a_plan_that_cannot_be_are_value_errors(question):
    with pytest.raises(ValueError):
        terrane_kv.plan("llama-3.1-8b", **question)


def test_the_disks_of_a_plan_are_paths(tmp_path):
    plans = [terrane_kv.plan("llama-3.1-8b", disks={path: "1TiB"}) for path in (tmp_path, str(tmp_path), os.fsencode(tmp_path))]
    assert plans[0] == plans[1] == plans[2] and str(tmp_path) in json.dumps(plans[0])


def test_a_plan_of_a_config_of_the_caller(tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = 2 * 4 * 2 * 64 * 2
    for model in (config, tmp_path, str(tmp_path / "config.json")):
        assert terrane_kv.plan(model)["groups"][0]["bytes_per_token"] == expected
    with pytest.raises(FileNotFoundError):
        terrane_kv.plan("missing.json")


def command(*arguments):
    script = os.path.join(os.path.dirname(sys.executable), "terrane")
    return subprocess.run([script, *arguments], check=False, capture_output=True, text=True)


def test_the_command_is_installed():
    script = command("plan", "llama-3.1-8b", "--host", "256GiB", "--json")
    module = subprocess.run(
        [sys.executable, "-m", "terrane_kv", "plan", "llama-3.1-8b", "--host", "256GiB", "--json"],
        check=True, capture_output=True, text=True,
    )
    assert script.returncode == 0 and script.stdout == module.stdout
    assert json.loads(script.stdout) == terrane_kv.plan("llama-3.1-8b", host="256GiB")
    assert "terrane" in command("--help").stdout
    assert command("nonsense").returncode == 2


def test_the_command_imports_nothing_from_the_current_directory(tmp_path):
    for name in ("terrane_kv", "signal", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w').close()\n")
    script = os.path.join(os.path.dirname(sys.executable), "terrane")
    done = subprocess.run([script, "doctor", "--json"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("imported-*"))


def test_the_command_measures_pytorch_with_its_own_interpreter(tmp_path):
    (tmp_path / "torch.py").write_text("import sys; raise ImportError(f'run by {sys.executable}')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    script = os.path.join(os.path.dirname(sys.executable), "terrane")
    options = ["bench", "movers", "llama-3.2-1b", "--size", "1MiB", "--passes", "1", "--json"]
    done = subprocess.run(
        [script, *options], env={**os.environ, "PYTHONPATH": paths}, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no CUDA device: {done.stderr}")
    (reason,) = (it["reason"] for it in json.loads(done.stdout)["not_measured"] if it["case"].endswith("PyTorch"))
    assert f"run by {sys.executable}" in reason


def test_the_command_starts_itself_again_for_probes(directory):
    done = command("doctor", directory, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def one_page(array, page_bytes, sizes, strides):
    """A cache of pages in one array."""
    (cache,) = terrane_kv.KvCache.pages([[([array.ctypes.data], page_bytes, sizes, strides)]], keep=array)
    return cache


def rows():
    """Four chunks of three pages, in rows with other bytes at the end, and their cache."""
    array = numpy.random.default_rng(1).integers(0, 256, (4, 3 * 48 + 16), dtype=numpy.uint8)
    return array, one_page(array, 48, [4, 3], [160, 48])


def test_pages_of_unknown_content_are_copied_into_chunks_of_blocks():
    pages = numpy.random.default_rng(2).integers(0, 256, (7, 64), dtype=numpy.uint8)
    plain, (array, cache) = one_page(pages, 48, [7], [64]), rows()
    assert (len(plain), len(cache), cache.block_bytes) == (7, 12, 48)
    expected = array.copy()
    # Block 7 is the second page of chunk 2.
    expected[2, 48:96] = pages[6, :48]
    expected[0, 96:144] = pages[1, :48]
    terrane_kv.Manager().copy(plain.blocks([6, 1]), cache.blocks([7, 2])).wait(10)
    assert (array == expected).all()


def test_groups_of_pages_share_tensors():
    array, shared = numpy.zeros((8, 64), dtype=numpy.uint8), numpy.ones((8, 64), dtype=numpy.uint8)
    part = lambda page: ([array.ctypes.data, shared.ctypes.data], page, [8], [64])
    groups = terrane_kv.KvCache.pages([[part(64)], [part(48)]], keep=(array, shared))
    assert [cache.block_bytes for cache in groups] == [128, 96]
    with pytest.raises(terrane_kv.StoreError, match="in use by another endpoint"):
        one_page(array, 64, [8], [64])
    assert terrane_kv.KvCache.pages([], keep=None) == []


def test_pages_that_cannot_be_are_refused():
    array = numpy.zeros((4, 256), dtype=numpy.uint8)
    with pytest.raises(ValueError, match="pass \\[blocks\\]"):
        one_page(array, 64, [4], [256, 64])
    with pytest.raises(ValueError, match="pass \\[blocks\\]"):
        one_page(array, 64, [2, 2, 2], [512, 256, 64])
    for page_bytes, sizes, strides in ((65, [4, 4], [256, 64]), (64, [4], [63]), (0, [4], [256])):
        with pytest.raises((ValueError, terrane_kv.StoreError)):
            one_page(array, page_bytes, sizes, strides)
    at = array.ctypes.data
    owner = type("Owner", (), {})()
    seen = weakref.ref(owner)
    with pytest.raises(terrane_kv.StoreError):
        terrane_kv.KvCache.pages([[([at, at], 64, [4], [256])]], keep=owner)
    del owner
    assert seen() is None, "an adoption that failed keeps nothing"
    for parts in ([], [([], 64, [4], [256])], [([0], 64, [4], [256])], [([at], 64, [1 << 40], [256])]):
        with pytest.raises((ValueError, terrane_kv.StoreError)):
            terrane_kv.KvCache.pages([parts], keep=array)
    _, cache = rows()
    with pytest.raises(ValueError, match="unknown content"):
        cache.allocate_like(4)
    with pytest.raises(terrane_kv.StoreError):
        terrane_kv.Manager().copy(one_page(array, 64, [4], [256]).blocks([0]), cache.blocks([0]))


def test_a_copy_runs_after_earlier_copies():
    arrays = [numpy.full((64, 1 << 16), number, dtype=numpy.uint8) for number in range(3)]
    one, two, three = (one_page(array, 1 << 16, [64], [1 << 16]) for array in arrays)
    manager, everything = terrane_kv.Manager(), list(range(64))
    earlier = manager.copy(one.blocks(everything), two.blocks(everything))
    manager.copy(two.blocks(everything), three.blocks(everything), after=[earlier]).wait(10)
    assert earlier.has_ended() and (arrays[2] == 0).all()
