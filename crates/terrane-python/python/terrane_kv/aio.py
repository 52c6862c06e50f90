"""Waiting for jobs in asyncio."""

import asyncio
import functools

# The watched descriptors of each event loop. A loop has one callback for a descriptor, and several tasks may await one
# job.
_watched = {}


class _Watched:
    """The tasks of a loop that wait for one job."""

    def __init__(self, loop):
        self.tasks = 0
        self.event = asyncio.Event()
        self.wake = functools.partial(_wake, loop, self.event)


async def ended(completion):
    """Waits for a `Job` without blocking the event loop, and returns its `Outcome`.

    Several tasks of one event loop, and other threads, may wait for the same job.
    """
    if not completion.has_ended():
        loop = asyncio.get_running_loop()
        descriptor = completion.fileno()
        watched = _watched.get((loop, descriptor))
        if watched is None:
            watched = _Watched(loop)
            loop.add_reader(descriptor, watched.event.set)
            _watched[loop, descriptor] = watched
            # A thread that takes the outcome clears the descriptor before the loop sees it.
            completion._add_taken_callback(watched.wake)
        watched.tasks += 1
        try:
            await watched.event.wait()
        finally:
            watched.tasks -= 1
            # The job is referenced until the last task has ended, so no other job has this descriptor.
            if watched.tasks == 0:
                completion._remove_taken_callback(watched.wake)
                loop.remove_reader(descriptor)
                del _watched[loop, descriptor]
    return completion.wait()


def _wake(loop, event):
    """Sets an event of a loop from any thread."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        # The loop is closed, so no task waits.
        pass


async def copied(transfer):
    """Waits for a `Transfer` on a thread of the event loop's executor, and returns its `Copied`."""
    return await asyncio.to_thread(transfer.wait)
