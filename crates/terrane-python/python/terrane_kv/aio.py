"""Waiting for jobs in asyncio."""

import asyncio


async def ended(completion):
    """Waits for a `Completion` without blocking the event loop, and returns its `Outcome`."""
    if not completion.has_ended():
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = completion.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
    return completion.wait()
