"""SGLang's linker over PyTorch's CUDA tensors: the tests of `test_sglang_linker`, and the order of streams."""

import types

import numpy
import pytest

import test_torch
from linker_pools import Arrays, Pools
from test_sglang_linker import *  # noqa: F403
from test_sglang_linker import window_pages

torch = getattr(test_torch, "torch", None)
pytestmark = test_torch.pytestmark
# These tests use the driver's own streams.
del test_transfers_run_after_the_work_of_the_streams  # noqa: F821
del test_a_wait_for_the_first_layer_returns_before_the_last_one_has_arrived  # noqa: F821
del test_the_stream_of_the_forward_pass_waits_for_a_layer_and_the_thread_does_not  # noqa: F821
del test_the_thread_waits_for_the_whole_load_if_the_stream_cannot_wait  # noqa: F821
del test_a_load_overwrites_pages_after_the_forward_pass_that_still_writes_them  # noqa: F821


class Tensors:
    """Memory of PyTorch on the GPU. PyTorch's functions for 16 bits without a sign are few."""

    @staticmethod
    def tensor(array):
        return torch.from_numpy(array.view(numpy.int16)).cuda()

    @staticmethod
    def array(tensor):
        return tensor.cpu().numpy().view(numpy.uint16)

    @staticmethod
    def zero(tensor):
        tensor.zero_()
        torch.cuda.synchronize()

    @staticmethod
    def overwrite(tensor, array):
        tensor.copy_(torch.from_numpy(array.view(numpy.int16)))
        torch.cuda.synchronize()

    @staticmethod
    def indices(values):
        return torch.tensor(values, dtype=torch.int64, device="cuda")

    @staticmethod
    def settle():
        torch.cuda.current_stream().synchronize()

    @staticmethod
    def is_ready(event):
        return types.SimpleNamespace(synchronize=lambda: event.wait(20))


@pytest.fixture
def memory():
    yield Tensors()
    torch.cuda.synchronize()


def test_transfers_run_after_the_work_of_pytorch_s_streams(linker, memory):
    forward = torch.cuda.Stream()
    made = linker(kind="hybrid", forward_stream=forward)
    fresh = Pools(Arrays(), "hybrid", seed=5)
    tensors = [it for buffers in made.pools.buffers.values() for it in buffers]
    contents = [memory.tensor(it.array) for buffers in fresh.buffers.values() for it in buffers]
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        # A kernel that takes about 30 ms, and then writes to the pages that are stored.
        torch.cuda._sleep(50_000_000)
        for tensor, content in zip(tensors, contents):
            tensor.copy_(content)
    assert made.offload([1, 2], [0, 1])
    # The load overwrites pages that the current stream zeroes.
    torch.cuda._sleep(50_000_000)
    for tensor in tensors:
        tensor.zero_()
    assert made.load([1, 2], [7, 8])
    torch.cuda.synchronize()
    for name in made.pools.buffers:
        pages = window_pages(made.types.PoolName, name, [0, 1]), window_pages(made.types.PoolName, name, [7, 8])
        for source, loaded in zip(*pages):
            assert made.pools.pages(name, loaded) == fresh.pages(name, source)
