"""After the storing process was killed, each adapter finds correct blocks or none, and never another model's."""

import json
import os
import signal
import subprocess
import sys

import pytest

import adapters

ENGINES = ["vllm", "lmcache", "sglang"]
CHILD = os.path.join(os.path.dirname(__file__), "child.py")


def child(verb, engine, directory, model="m", environment=(), **options):
    command = [sys.executable, CHILD, verb, engine, directory, model, json.dumps(options)]
    environment = {**os.environ, **dict(environment)}
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def stored_and_killed(engine, directory, **options):
    """Stores eight blocks in a process, and kills it. Returns its standard error."""
    process = child("store", engine, directory, **options)
    line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert line.strip() == "true", errors
    return errors


def loaded(engine, directory, **options):
    """Returns the blocks that another process finds, and its standard error."""
    process = child("load", engine, directory, **options)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_are_right_after_kill_9(engine, directory):
    stored_and_killed(engine, directory)
    found, _ = loaded(engine, directory)
    # The kernel has the writes of a killed process, so no block is lost. A power failure may lose blocks.
    assert found == [True] * 8


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model_finds_nothing(engine, directory):
    stored_and_killed(engine, directory)
    found, _ = loaded(engine, directory, model="another")
    assert found == [None] * 8
    assert loaded(engine, directory)[0] == [True] * 8


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flipped_bit_is_a_miss(engine, directory):
    stored_and_killed(engine, directory)
    block = adapters.content(3).tobytes()
    flipped = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "r+b") as file:
                at = file.read().find(block)
                if at >= 0:
                    file.seek(at + 12_345)
                    file.write(bytes([block[12_345] ^ 1]))
                    flipped += 1
    assert flipped == 1, "the block was found in the files"
    found, _ = loaded(engine, directory)
    assert found == [True, True, None, True, True, True, True, True]


def test_keys_that_change_with_each_process_are_detected(directory, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seedless = {"hash_algorithm": "xxhash"}
    errors = stored_and_killed("vllm", directory, **seedless)
    assert errors.count("will not survive a restart") == 1 and "PYTHONHASHSEED" in errors
    assert loaded("vllm", directory, **seedless)[0] == [None] * 8


def test_a_seed_makes_keys_reproducible(directory):
    options = {"hash_algorithm": "xxhash", "environment": {"PYTHONHASHSEED": "0"}}
    errors = stored_and_killed("vllm", directory, **options)
    assert "will not survive" not in errors
    assert loaded("vllm", directory, **options)[0] == [True] * 8
    # The seed is part of the namespace.
    other = {**options, "environment": {"PYTHONHASHSEED": "1"}}
    process = child("load", "vllm", directory, **other)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "key_seed" in errors


SCRIPT = """
import os, sys, threading
import terrane_kv
store = terrane_kv.Store(sys.argv[1], 256 << 20, groups=[("kv", 1 << 20)], namespace="n")
"""


def script(text, directory, timeout=60):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + text, directory], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_forked_child_gets_an_error(directory):
    text = """
store.put(["k"], [bytes(1 << 20)]).wait()
queue = terrane_kv.CompletionQueue(1)
child = os.fork()
if child == 0:
    told = 0
    for call in (
        lambda: store.put(["x"], [b"x"]), lambda: store.get(["k"], [bytearray(1 << 20)]), lambda: store.remove(["k"]),
        lambda: queue.drain(), lambda: queue.wait(), lambda: store.presence("k"), lambda: store.presences(["k"]),
        lambda: store.prefix(["k"]), lambda: store.touch(["k"]), lambda: store.drain(timeout=0.1),
    ):
        try:
            call()
        except terrane_kv.ForkedError:
            told += 1
    del store
    os._exit(told)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
memory = bytearray(1 << 20)
print(store.get(["k"], [memory]).wait().ok, flush=True)
"""
    done = script(text, directory)
    assert done.stdout.split() == ["10", "True"], done.stderr


def test_a_child_that_was_forked_amid_calls_exits_and_later_ones_open_a_store(directory):
    text = """
stop = threading.Event()
def work(number):
    while not stop.is_set():
        store.put([f"{number}"], [bytearray(64 << 10)]).wait()
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
def in_child(body):
    child = os.fork()
    if child == 0:
        body()
        # Exits as a program does, with the functions that are called at exit.
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
def use_the_parent_s():
    global store
    try:
        store.presence("0")
    except terrane_kv.ForkedError:
        assert store.close() == 0
    else:
        os._exit(1)
    terrane_kv.Region(bytearray(8), 4).release()
    del store
for _ in range(30):
    in_child(use_the_parent_s)
stop.set()
for thread in threads:
    thread.join()
def open_one():
    own = terrane_kv.Store(f"{sys.argv[1]}/child", 64 << 20, groups=[("kv", 1 << 20)], namespace="n")
    assert own.put(["k"], [bytearray(4096)]).wait(20).ok
in_child(open_one)
assert store.put(["k"], [bytearray(4096)]).wait(20).ok
print("done", flush=True)
"""
    done = script(text, directory)
    assert done.stdout.strip() == "done", done.stderr


def test_a_child_that_was_forked_while_threads_cancel_a_job_may_cancel_it(directory):
    text = """
import signal
job, stop = store.put(["k"], [bytearray(64 << 10)]), threading.Event()
def work():
    while not stop.is_set():
        job.cancel()
        job.raise_priority("high")
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        # Ends a child that waits for a lock of the parent.
        signal.alarm(5)
        job.cancel()
        job.raise_priority("high")
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended != 0:
        break
stop.set()
for thread in threads:
    thread.join()
job.wait()
print(ended, flush=True)
"""
    done = script(text, directory)
    assert done.stdout.strip() == "0", done.stderr


def test_the_interpreter_exits_with_jobs_in_flight(directory):
    text = """
jobs = [store.put([f"k{number}"], [bytearray([number]) * (1 << 20)]) for number in range(100)]
queue = terrane_kv.CompletionQueue(200)
for number in range(100):
    store.get([f"k{number}"], [bytearray(1 << 20)], queue=queue)
print("leaving", flush=True)
"""
    done = script(text, directory)
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr
    again = script('print(store.prefix([f"k{number}" for number in range(100)]))', directory)
    assert again.stdout.strip() == "100", again.stderr


def test_the_interpreter_exits_while_a_daemon_thread_submits(directory):
    text = """
import itertools
def work():
    for number in itertools.count():
        try:
            store.put([f"k{number}"], [bytearray(4096)]).wait()
        except terrane_kv.ClosedError:
            return
thread = threading.Thread(target=work, daemon=True)
thread.start()
import time; time.sleep(0.3)
"""
    done = script(text, directory)
    assert done.returncode == 0, done.stderr


def test_an_exception_in_a_callback_of_asyncio_stops_nothing(directory):
    text = """
import asyncio
async def main():
    loop = asyncio.get_running_loop()
    queue = terrane_kv.CompletionQueue(10)
    told = []
    loop.set_exception_handler(lambda loop, context: told.append(context["exception"]))
    def ended():
        queue.drain()
        raise RuntimeError("of the engine")
    loop.add_reader(queue.fileno(), ended)
    for number in range(3):
        store.put([f"k{number}"], [bytes(4096)], queue=queue)
        while not told or len(told) <= number:
            await asyncio.sleep(0.001)
    loop.remove_reader(queue.fileno())
    assert (await store.get(["k1"], [bytearray(4096)])).ok
    print(len(told))
asyncio.run(main())
"""
    done = script(text, directory)
    assert done.stdout.strip() == "3", done.stderr


def test_a_subinterpreter_is_refused_by_name(directory):
    text = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
number = interpreters.create()
try:
    refused = interpreters.run_string(number, "import terrane_kv")
except Exception as error:
    refused = error
print("terrane_kv" if refused is None else "refused", flush=True)
assert store.put(["k"], [b"x" * 4096]).wait().ok
"""
    done = script(text, directory)
    assert done.returncode == 0 and done.stdout.strip() == "refused", done.stdout + done.stderr


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not permit mounts")
    try:
        # The store reserves 256 MiB.
        done = script("", str(place / "kv"))
        assert done.returncode != 0 and "terrane_kv.StoreError" in done.stderr
        assert "free space" in done.stderr
    finally:
        subprocess.run(["umount", place], check=False)
