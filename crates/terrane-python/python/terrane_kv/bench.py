"""Measures reads and writes of chunks through a `Store`, and compares them with one file for each chunk.

usage: python -m terrane_kv.bench DIRECTORY [--chunk BYTES] [--chunks N] [--requests N …] [--rounds N] [--rivals] [--huge-pages] [--json]

Two baselines reimplement the methods of the engines' own tiers, with one file for each chunk and one thread for each
request. `direct` is the method of vLLM's fs tier: direct I/O if the file system supports it, a new file name, and one
blocking call for each chunk. `buffered` is the method of LMCache's fs backend and SGLang's file backend: the page
cache. Neither computes a checksum or waits until the data is durable. Do not compare figures from different machines or
days.

Each round uses another order of the methods, because the place of a file on the disk changes a rate by up to 30 %, and
depends on the files before it. Six rounds have every order of three methods. A method first writes and reads other
chunks with the same memory. That is not measured: an engine keeps its memory for its lifetime, and a store registers it
with the kernel once.

The processor time covers all threads of this process, in user mode and in the kernel. It excludes the kernel's own
threads, which write the page cache to disk later.
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time

from terrane_kv import _native
from terrane_kv._native import Region, Store

# The backends with direct I/O. `vllm` uses it if the file system supports it.
DIRECT = {"direct", "vllm", "lmcache-direct"}


def settle(folder):
    """Writes the page cache of a folder to disk and drops it, so that reads come from the disk."""
    for where, _, names in os.walk(folder):
        for name in names:
            file = os.open(os.path.join(where, name), os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class Files:
    """One file for each chunk."""

    def __init__(self, folder, view, chunk, flags=0):
        self.folder, self.view, self.chunk, self.flags = folder, view, chunk, flags
        try:
            os.close(os.open(os.path.join(folder, "probe"), os.O_CREAT | os.O_WRONLY | flags))
        except OSError:
            self.flags = 0

    def move(self, is_write, numbers, first):
        """Writes or reads the chunks with these numbers in memory. The name of chunk 0 is `first`."""
        for number in numbers:
            part = self.view[number * self.chunk : (number + 1) * self.chunk]
            path = os.path.join(self.folder, f"{first + number}.bin")
            if is_write:
                file = os.open(path + ".tmp", os.O_CREAT | os.O_WRONLY | self.flags)
                moved = os.write(file, part)
                os.close(file)
                os.replace(path + ".tmp", path)
            else:
                file = os.open(path, os.O_RDONLY | self.flags)
                moved = os.readv(file, [part])
                os.close(file)
            if moved != self.chunk:
                raise OSError(f"{moved} of {self.chunk} bytes of {path}")


class Terrane:
    """The same chunks in a store."""

    def __init__(self, folder, view, chunk):
        capacity = 2 * len(view) + 16 * chunk
        self.store = Store(folder, capacity, groups=[("kv", chunk)], namespace="bench")
        self.region = Region(view, chunk)

    def move(self, is_write, numbers, first):
        verb = self.store.put if is_write else self.store.get
        outcome = verb([f"chunk {first + number}" for number in numbers], self.region.rows(numbers)).wait()
        if not outcome.ok:
            raise OSError(outcome.error)

    def close(self):
        self.store.close()
        self.region.release()


def backends(with_rivals):
    """The backends by name. Each is a function of folder, view and chunk."""
    made = {
        "buffered": Files,
        "direct": lambda *arguments: Files(*arguments, os.O_DIRECT),
        "terrane": Terrane,
    }
    if with_rivals:
        from terrane_kv import bench_rivals

        rivals, missing = bench_rivals.found()
        for name, reason in missing.items():
            print(f"not measured: {name}: {reason}", file=sys.stderr, flush=True)
        made = {**rivals, **made}
    return made


def seconds(backend, is_write, chunks, requests, first):
    """The time for all chunks with this number of concurrent requests, and the processor time in user mode and the
    kernel. The name of the first chunk is `first`."""
    parts = [list(range(start, chunks, requests)) for start in range(requests)]
    with concurrent.futures.ThreadPoolExecutor(requests) as threads:
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        list(threads.map(lambda part: backend.move(is_write, part, first), parts))
        took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        return took, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def allocated(chunk, chunks, has_huge_pages):
    """Memory for chunks, filled with random bytes."""
    # Shared memory has huge pages only if the administrator has enabled them.
    kind = mmap.MAP_PRIVATE if has_huge_pages else mmap.MAP_SHARED
    memory = mmap.mmap(-1, chunk * chunks, flags=kind | mmap.MAP_ANONYMOUS)
    if has_huge_pages:
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(os.urandom(chunk) * chunks)
    return memory


def in_order(made, number):
    """The backends in the order of a round. With three backends, rounds 0 to 5 have all orders."""
    names = list(made.items())
    start = number // 2 % len(names)
    names = names[start:] + names[:start]
    return names[::-1] if number % 2 else names


def measure(directory, chunk, chunks, requests, made, has_huge_pages=False):
    """Runs one round: for each backend and direction, the results of `seconds`. `made` has the backends in the order of
    the round."""
    found = {}
    for name, make in made:
        folder = tempfile.mkdtemp(dir=directory)
        memory = allocated(chunk, chunks, has_huge_pages)
        backend = make(folder, memoryview(memory), chunk)
        try:
            # The second pass is measured. It has other names, because a store writes a key once.
            for first in (0, chunks):
                found[name, "write"] = seconds(backend, True, chunks, requests, first)
                settle(folder)
                found[name, "read"] = seconds(backend, False, chunks, requests, first)
        finally:
            if hasattr(backend, "close"):
                backend.close()
            shutil.rmtree(folder)
    return found


def checksum_seconds(chunk, chunks, rounds):
    """The processor time of the store's checksum per gigabyte, for bytes in memory and in the processor's cache."""

    def taken(blocks, times):
        used = time.process_time()
        for _ in range(times):
            for block in blocks:
                _native.checksum(block)
        return (time.process_time() - used) / (times * sum(map(len, blocks)) / 1e9)

    memory, cached = [os.urandom(chunk) for _ in range(chunks)], [os.urandom(256 << 10)]
    found = [(taken(memory, 1), taken(cached, 1000)) for _ in range(rounds)]
    return tuple(map(statistics.median, zip(*found)))


def lookup_seconds(directory, chunk):
    """The time to look up a stored key, an absent key, and 1,000 keys of which 16 are stored."""
    folder = tempfile.mkdtemp(dir=directory)
    store = Store(folder, 64 * chunk, groups=[("kv", chunk)], namespace="bench")
    try:
        keys = [os.urandom(36) for _ in range(1000)]
        stored, absent = keys[:16], keys[16:]
        store.put(stored, [bytes(chunk)] * len(stored)).wait()
        if not all(store.presences(stored)) or any(store.presences(absent)):
            raise OSError("the store has other keys than those that were put")

        def each(group):
            started = time.perf_counter()
            for key in group:
                store.presence(key)
            return (time.perf_counter() - started) / len(group)

        hit, miss, many = [], [], []
        for _ in range(50):
            # The number of calls is equal, so both medians are equally reliable.
            hit.append(each(stored * (len(absent) // len(stored))))
            miss.append(each(absent))
            started = time.perf_counter()
            store.presences(keys)
            many.append(time.perf_counter() - started)
        return tuple(map(statistics.median, (hit, miss, many)))
    finally:
        store.close()
        shutil.rmtree(folder)


def summary(rounds, direction, requests, gigabytes, checksum):
    """The rates, the processor time per gigabyte, and the ratios of a case."""
    case = {"case": direction, "requests": requests}
    names = sorted({name for name, _ in rounds[0]})
    for name in names:
        rates = sorted(gigabytes / it[name, direction][0] for it in rounds)
        used = [statistics.median(it[name, direction][at] for it in rounds) / gigabytes for at in (1, 2)]
        case[name] = {"rates": rates, "rate": statistics.median(rates), "processor": sum(used), "user": used[0]}
    ours = case["terrane"]["processor"]
    best = {
        kind: min(case[name]["processor"] for name in names if (name in DIRECT) == (kind == "direct") and name != "terrane")
        for kind in ("buffered", "direct")
    }
    case["of_buffered"] = ours / best["buffered"]
    case["of_direct_and_checksum"] = ours / (best["direct"] + checksum)
    case["names"] = names
    return case


def text(case):
    line = f"{case['case']:5} {case['requests']} requests:"
    for name in case["names"]:
        it = case[name]
        line += f"  {name} {it['rate']:.2f} GB/s ({it['rates'][0]:.2f} to {it['rates'][-1]:.2f}), "
        line += f"{it['processor']:.3f} s/GB, {it['user']:.3f} of them in user mode;"
    line += f" terrane's processor time is {case['of_buffered']:.2f} of the best buffered one,"
    return line + f" {case['of_direct_and_checksum']:.2f} of the best direct one and a checksum"


def main():
    parser = argparse.ArgumentParser(prog="python -m terrane_kv.bench", description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a folder on the drive to measure")
    parser.add_argument("--chunk", type=int, default=2 << 20, help="bytes of a chunk (default 2 MiB)")
    parser.add_argument("--chunks", type=int, default=256, help="chunks of a round (default 256)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="requests at once")
    parser.add_argument("--rounds", type=int, default=6, help="rounds, of which the median is printed (default 6)")
    parser.add_argument("--rivals", action="store_true", help="also the backends of vLLM, LMCache and SGLang, where they are installed")
    parser.add_argument("--json", action="store_true", help="prints one JSON object a line")
    parser.add_argument("--huge-pages", action="store_true", help="memory of huge pages, as far as the kernel has them")
    options = parser.parse_args()
    gigabytes = options.chunk * options.chunks / 1e9
    checksum, cached = checksum_seconds(options.chunk, options.chunks, options.rounds)
    hit, miss, many = lookup_seconds(options.directory, options.chunk)
    if options.json:
        print(json.dumps({"checksum": checksum, "checksum_cached": cached, "lookup_hit": hit, "lookup_miss": miss, "presences_of_1000": many}), flush=True)
    else:
        lookups = f"stored key {hit * 1e6:.2f} µs, of an absent one {miss * 1e6:.2f} µs, of 1,000 keys {many * 1e6:.0f} µs"
        print(f"checksum: {checksum:.3f} s/GB of memory, {cached:.3f} of cached bytes; lookup of a {lookups}", flush=True)
    made = backends(options.rivals)
    for requests in options.requests:
        rounds = [
            measure(options.directory, options.chunk, options.chunks, requests, in_order(made, number), options.huge_pages)
            for number in range(options.rounds)
        ]
        for direction in ("write", "read"):
            case = summary(rounds, direction, requests, gigabytes, checksum)
            print(json.dumps(case) if options.json else text(case), flush=True)


if __name__ == "__main__":
    main()
