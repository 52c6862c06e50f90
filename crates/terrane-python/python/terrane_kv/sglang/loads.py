"""Loads and offloads of SGLang's linker: the jobs of each, and the layers that a forward pass waits for."""

import logging
import os
import queue
import threading
import time

from terrane_kv.folders import RateLimitedWarning

logger = logging.getLogger("terrane_kv")


class Moves:
    """Jobs of the store that succeed or fail together, one for each pool.

    A thread submits them. Until then, `cancel` makes them fail. In a forked child, they have failed.
    """

    def __init__(self):
        self._owner = os.getpid()
        self._is_submitted = threading.Event()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._jobs = {}
        # The last layer of each pool for which the thread (None) or a stream waits.
        self._layers = {}
        # The ids of the pages in each pool, once the thread has them.
        self.pages = {}
        self.error = None

    def submit(self, jobs):
        """Submits the jobs that `jobs` yields: pairs of the pool's name, and a function that submits the job."""
        try:
            for name, start in jobs:
                # A cancelled job must not use the memory later.
                with self._lock:
                    if self._is_cancelled:
                        raise RuntimeError("the transfer was cancelled before it started")
                    self._jobs[name] = start()
        except Exception as error:
            self.error = error
        finally:
            self._is_submitted.set()

    def fail(self, error):
        self.error = error
        self._is_submitted.set()

    def _is_forked(self):
        if self._owner == os.getpid():
            return False
        self.error = RuntimeError("the transfer belongs to the parent of this process")
        return True

    def has_ended(self):
        if self._is_forked():
            return True
        return self._is_submitted.is_set() and all(job.has_ended() for job in self._jobs.values())

    def wait(self, deadline=None):
        """Waits until all jobs have ended. Returns False at the deadline."""
        if self._is_forked():
            return True
        while not self._is_submitted.wait(_slice(deadline)):
            if _has_passed(deadline):
                return False
        return all(self._wait_for(job, deadline) for job in self._jobs.values())

    def wait_layers(self, layers, stream=None):
        """Waits for this layer of each pool, and those before it: the thread, or the CUDA `stream` with this handle.

        The thread waits for a job that fails until it has ended.
        """
        if self._is_forked():
            return
        while not self._is_submitted.wait(_slice(None)):
            pass
        reached = self._layers.setdefault(stream, {})
        for name, layer in layers.items():
            first = reached.get(name, -1) + 1
            if first <= layer and name in self._jobs:
                self._wait_for_layers(self._jobs[name], (first, layer), stream)
                reached[name] = layer

    def _wait_for_layers(self, job, layers, stream):
        first, last = layers
        while True:
            try:
                return job.wait_layer(last, _slice(None), first=first, stream=stream)
            except TimeoutError:
                continue
            except Exception:
                # The outcome of the job has the cause, or the layer has arrived by then.
                return self._wait_for(job)

    def _wait_for(self, job, deadline=None):
        while True:
            try:
                job.wait(_slice(deadline))
                return True
            except TimeoutError:
                if _has_passed(deadline):
                    return False
            except Exception as error:
                self.error = error
                return True

    def cancel(self):
        """Cancels the jobs, and those that are not submitted yet. They still end before their memory may be reused."""
        with self._lock:
            self._is_cancelled = True
            jobs = list(self._jobs.values())
            if not self._is_submitted.is_set():
                self.error = RuntimeError("the transfer was cancelled before all of its jobs had started")
        for job in jobs:
            job.cancel()

    def end(self, deadline):
        """Waits for the jobs until the deadline, cancels the rest, and waits until no job uses its memory."""
        if self.wait(deadline=deadline):
            return
        self.cancel()
        # The thread may still wait for the device. It then submits no job.
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._wait_for(job)

    def failure(self):
        """Why the moves failed, or None if each block was moved. They must have ended."""
        if self.error is not None:
            return repr(self.error)
        for name, job in self._jobs.items():
            outcome = job.wait()
            if not outcome.ok:
                missing = outcome.done.count(False)
                return f"{missing} of {len(outcome.done)} pages of the pool {name}: {outcome.error or 'absent'}"
        return None


def _slice(deadline):
    """A second, in which Python cannot handle signals, or the time to the deadline."""
    return 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))


def _has_passed(deadline):
    return deadline is not None and time.monotonic() >= deadline


class LayerCounter:
    """The counter by which SGLang's pools wait for the layers of a batch of loads.

    Layers arrive one by one, and each pool has layers of its own. With a device, its current stream waits for them, so
    that the thread submits the work of the next layers meanwhile. A failure raises no exception here: `finish` returns
    it.

    `pools` has a function for each pool, from a layer of the forward pass to the last layer of the pool that it needs.
    `current_stream` returns the handle of the stream that waits, or None if the thread waits. `on_failure` gets the
    moves of a load that has failed.
    """

    def __init__(self, num_layers, pools, current_stream, on_failure):
        self.num_layers = num_layers
        self.consumer_index = -1
        self._pools, self._current_stream, self._on_failure = pools, current_stream, on_failure
        self._batches, self._last = {}, -1
        self._warnings = RateLimitedWarning()

    def add(self, moves):
        """Adds a batch of loads, and returns its index."""
        self._last += 1
        self._batches[self._last] = moves
        return self._last

    def set_consumer(self, index):
        """Makes later waits those for the batch with this index. -1 is no batch."""
        self.consumer_index = index

    def wait_until(self, threshold):
        moves = self._batches.get(self.consumer_index)
        if moves is not None:
            layers = {name: last_layer(threshold) for name, last_layer in self._pools.items()}
            moves.wait_layers(layers, self._current_stream())

    def finish(self, index):
        """Waits for a batch, and returns whether each of its pages was loaded."""
        moves = self._batches.get(index)
        if moves is None:
            return True
        moves.wait()
        del self._batches[index]
        failure = moves.failure()
        if failure is None:
            return True
        if self._warnings.is_due():
            logger.warning("a load failed, and SGLang ends its requests: %s", failure)
        self._on_failure(moves)
        return False

    def end(self, deadline):
        """Ends all batches, and forgets them."""
        for moves in self._batches.values():
            moves.end(deadline)
            if moves.failure() is not None:
                self._on_failure(moves)
        self._batches.clear()
        self.consumer_index = -1


class Worker:
    """Calls functions in order on one thread."""

    def __init__(self, name):
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function, *arguments):
        self._calls.put((function, arguments))

    def _run(self):
        while (call := self._calls.get()) is not None:
            function, arguments = call
            function(*arguments)
            # The thread keeps nothing of the call while it waits for the next one.
            del call, function, arguments

    def stop(self, timeout):
        self._calls.put(None)
        self._thread.join(timeout)
