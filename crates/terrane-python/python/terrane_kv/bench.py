"""Reads and writes of chunks through a `Store`, beside one file a chunk as engines' own tiers keep them.

usage: python -m terrane_kv.bench DIRECTORY [--chunk BYTES] [--chunks N] [--requests N …]

The baseline is written again after the method of vLLM's fs tier: one file a chunk, written under another name and
renamed, one blocking call a chunk, direct I/O where the file system has it, and one thread a request. Each case runs
three times in turn with its baseline. Figures of other machines or days are not comparable.
"""

import argparse
import concurrent.futures
import mmap
import os
import shutil
import statistics
import tempfile
import time

from terrane_kv._native import Region, Store


class Files:
    """One file a chunk."""

    def __init__(self, folder, view, chunk):
        self.folder, self.view, self.chunk = folder, view, chunk
        self.flags = os.O_DIRECT
        try:
            os.close(os.open(os.path.join(folder, "probe"), os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            self.flags = 0

    def move(self, is_write, numbers):
        for number in numbers:
            part = self.view[number * self.chunk : (number + 1) * self.chunk]
            path = os.path.join(self.folder, f"{number}.bin")
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
        capacity = len(view) + 16 * chunk
        self.store = Store(folder, capacity, groups=[("kv", chunk)], namespace="bench")
        self.region = Region(view, chunk)

    def move(self, is_write, numbers):
        verb = self.store.put if is_write else self.store.get
        outcome = verb([f"chunk {number}" for number in numbers], self.region.rows(numbers)).wait()
        if not outcome.ok:
            raise OSError(outcome.error)

    def close(self):
        self.store.close()
        self.region.release()


def seconds(backend, is_write, chunks, requests):
    """The time of all chunks in so many requests at once, and its processor time."""
    parts = [list(range(start, chunks, requests)) for start in range(requests)]
    with concurrent.futures.ThreadPoolExecutor(requests) as threads:
        started, used = time.perf_counter(), time.process_time()
        list(threads.map(lambda part: backend.move(is_write, part), parts))
        return time.perf_counter() - started, time.process_time() - used


def measure(directory, chunk, chunks, requests):
    """One round: for each backend and direction the seconds and the processor time."""
    found = {}
    for name, make in (("files", Files), ("terrane", Terrane)):
        folder = tempfile.mkdtemp(dir=directory)
        memory = mmap.mmap(-1, chunk * chunks)
        memory.write(os.urandom(chunk) * chunks)
        backend = make(folder, memoryview(memory), chunk)
        try:
            found[name, "write"] = seconds(backend, True, chunks, requests)
            found[name, "read"] = seconds(backend, False, chunks, requests)
        finally:
            if isinstance(backend, Terrane):
                backend.close()
            shutil.rmtree(folder)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m terrane_kv.bench", description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a folder on the drive to measure")
    parser.add_argument("--chunk", type=int, default=2 << 20, help="bytes of a chunk (default 2 MiB)")
    parser.add_argument("--chunks", type=int, default=256, help="chunks of a round (default 256)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="requests at once")
    stated = parser.parse_args()
    total = stated.chunk * stated.chunks / 1e9
    for requests in stated.requests:
        rounds = [measure(stated.directory, stated.chunk, stated.chunks, requests) for _ in range(3)]
        for direction in ("write", "read"):
            line = f"{direction:5} {requests} requests:"
            for name in ("files", "terrane"):
                times = [it[name, direction][0] for it in rounds]
                used = statistics.median(it[name, direction][1] for it in rounds)
                rates = sorted(total / it for it in times)
                line += f"  {name} {rates[1]:.2f} GB/s ({rates[0]:.2f} to {rates[2]:.2f}), {used / total:.2f} s/GB"
            print(line, flush=True)


if __name__ == "__main__":
    main()
