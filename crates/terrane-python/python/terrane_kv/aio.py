"""Waiting for jobs in asyncio."""

import asyncio

# The watched descriptors of each event loop: the event that the callback sets, and the number of waiting tasks. A loop
# has one callback for a descriptor, and several tasks may await one job.
_watched = {}


async def ended(completion):
    """Waits for a `Job` without blocking the event loop, and returns its `Outcome`.

    Several tasks of one event loop, and other threads, may wait for the same job.
    """
    if not completion.has_ended():
        loop = asyncio.get_running_loop()
        descriptor = completion.fileno()
        watched = _watched.get((loop, descriptor))
        if watched is None:
            watched = _watched[loop, descriptor] = [asyncio.Event(), 0]
            loop.add_reader(descriptor, watched[0].set)
            # A thread that takes the outcome clears the descriptor before the loop sees it.
            completion._when_taken(lambda: _wake(loop, watched[0]))
        watched[1] += 1
        try:
            await watched[0].wait()
        finally:
            watched[1] -= 1
            # The job is referenced until the last task has ended, so no other job has this descriptor.
            if watched[1] == 0:
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
