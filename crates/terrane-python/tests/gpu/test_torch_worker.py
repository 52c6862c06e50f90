"""vLLM's worker by Terrane over PyTorch's CUDA tensors: the tests of `test_vllm_worker`, and the order of streams."""

import numpy
import pytest

import test_torch
import test_vllm_worker
from test_vllm_worker import *  # noqa: F403

torch = getattr(test_torch, "torch", None)
pytestmark = test_torch.pytestmark


class Tensors:
    """Memory of PyTorch: on the GPU, and on the host with or without registration."""

    def __init__(self, is_pinned):
        self.is_pinned, self.registered = is_pinned, set()

    def on_gpu(self, array):
        return torch.from_numpy(array).cuda()

    def on_host(self, array):
        base = array
        while base.base is not None:
            base = base.base
        if self.is_pinned and base.ctypes.data not in self.registered:
            error = torch.cuda.cudart().cudaHostRegister(base.ctypes.data, base.nbytes, 0)
            assert error.value == 0
            self.registered.add(base.ctypes.data)
        return torch.from_numpy(array)

    @staticmethod
    def array(tensor):
        return tensor.cpu().numpy()

    @staticmethod
    def assign(tensor, places, other, other_places):
        tensor[places] = other[other_places].to(tensor.device)

    def release(self):
        torch.cuda.synchronize()
        for address in self.registered:
            torch.cuda.cudart().cudaHostUnregister(address)


@pytest.fixture(params=["pinned", "pageable"])
def memory(request):
    tensors = Tensors(request.param == "pinned")
    yield tensors
    tensors.release()


def test_copies_run_after_the_work_of_the_current_stream(pair):
    worker, own, expected = pair(per_chunk=1, **test_vllm_worker.ONE_GROUP)
    gpu, host = test_vllm_worker.gpu, test_vllm_worker.host
    blocks, chunks = list(range(8)), list(range(8))
    for turn, stream in enumerate((torch.cuda.default_stream(), torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            # A kernel that takes about 30 ms, and then a write to the blocks that are stored.
            torch.cuda._sleep(50_000_000)
            for tensor in own._store_handler.src_tensors:
                tensor[:8] = 17 + turn
            worker.submit_store(2 * turn, gpu(blocks, [8], [0]), host(chunks))
            # The load overwrites blocks that this stream zeroes.
            torch.cuda._sleep(50_000_000)
            for tensor in own._store_handler.src_tensors:
                tensor[8:16] = 0
            worker.submit_load(2 * turn + 1, host(chunks), gpu(range(8, 16), [8], [0]))
        assert all(result.success for result in test_vllm_worker.finished(worker, 2))
        torch.cuda.synchronize()
        for tensor in expected._store_handler.src_tensors:
            tensor.array[:16] = 17 + turn
        expected.copy(gpu(blocks, [8], [0]), chunks, True)
        assert test_vllm_worker.same(own, expected)
        assert numpy.all(own.memory.array(own._store_handler.src_tensors[0])[8:16] == 17 + turn)
    worker.shutdown()
    assert own.is_shut_down
