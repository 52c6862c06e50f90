"""A model's device pools and SGLang's linker with the engine's calls, over memory of the host or of a device."""

import contextlib
import gc
import sys
import time
import types
from ctypes import byref, c_size_t, c_uint32, c_void_p

import numpy

import cuda_driver

PAGES, PAGE, LAYERS = 24, 4, 3


class Tensor:
    """The part of a PyTorch tensor that SGLang's pools and the linker use."""

    device = types.SimpleNamespace(type="cpu", index=None)

    def __init__(self, array):
        self.array, self.shape, self.nbytes, self.dtype = array, array.shape, array.nbytes, array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self, dimension):
        return self.array.strides[dimension] // self.array.itemsize

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def __getitem__(self, at):
        return Tensor(self.array[at])


class Arrays:
    """Memory of NumPy in place of a GPU's."""

    @staticmethod
    def tensor(array):
        return Tensor(array)

    @staticmethod
    def array(tensor):
        return tensor.array

    @staticmethod
    def zero(tensor):
        tensor.array[...] = 0

    @staticmethod
    def overwrite(tensor, array):
        tensor.array[...] = array

    @staticmethod
    def indices(values):
        return numpy.array(values, dtype=numpy.int64)

    @staticmethod
    def is_ready(event):
        """Makes an event that ends by `set`."""
        return types.SimpleNamespace(synchronize=lambda: event.wait(20))

    def settle(self):
        """Waits for the work of the current stream."""


class DriverTensor:
    """The same part of a tensor on a device."""

    def __init__(self, driver, array):
        self.held = cuda_driver.DeviceTensor(driver, array.shape)
        self.shape, self.nbytes, self.dtype = array.shape, array.nbytes, array.dtype
        self.device = types.SimpleNamespace(type="cuda", index=driver.number)
        self.strides = [stride // array.itemsize for stride in array.strides]
        self.write(array)

    def write(self, array):
        source = c_void_p(array.ctypes.data)
        self.held.driver.call("cuMemcpyHtoD_v2", self.held.address, source, c_size_t(self.nbytes))

    def data_ptr(self):
        return self.held.data_ptr()

    def stride(self, dimension):
        return self.strides[dimension]

    def element_size(self):
        return 2

    def is_contiguous(self):
        return True

    def __getitem__(self, at):
        return self


class DriverStream:
    """The part of PyTorch's streams that the linker uses."""

    def __init__(self, driver, stream):
        self.driver, self.stream = driver, stream
        self.cuda_stream = stream.handle.value

    def record_event(self):
        event = c_void_p()
        self.driver.call("cuEventCreate", byref(event), c_uint32(2))
        self.driver.call("cuEventRecord", event, self.stream.handle)
        return types.SimpleNamespace(synchronize=lambda: self.driver.call("cuEventSynchronize", event))


class DriverMemory(Arrays):
    """Memory of the driver's device, and PyTorch's functions of streams."""

    def __init__(self, driver):
        self.driver, self.made = driver, []
        self.current = self.stream()
        self.torch = types.SimpleNamespace(
            arange=numpy.arange,
            cuda=types.SimpleNamespace(
                Stream=lambda device: self.stream(),
                stream=contextlib.nullcontext,
                current_stream=lambda device=None: self.current,
            ),
        )

    def stream(self):
        return DriverStream(self.driver, cuda_driver.Stream(self.driver))

    def tensor(self, array):
        self.made.append(DriverTensor(self.driver, array))
        return self.made[-1]

    @staticmethod
    def array(tensor):
        return tensor.held.content()

    @staticmethod
    def zero(tensor):
        tensor.held.clear()

    @staticmethod
    def overwrite(tensor, array):
        tensor.write(array)

    def settle(self):
        self.driver.call("cuStreamSynchronize", self.current.stream.handle)

    def release(self):
        # A cache owns its addresses until it is freed, and the driver reuses them.
        gc.collect()
        self.driver.synchronize()
        for tensor in self.made:
            tensor.held.free()


def content(random, *shape):
    return random.integers(1, 1 << 16, shape, dtype=numpy.uint16)


class Pools:
    """A model's pools: plain attention, or latents with a draft, an indexer, a sliding window and states of Mamba layers.

    Values of plain attention have other sizes than keys, or equal ones. Pages of the kind "wide" are large.
    """

    def __init__(self, memory, kind, seed=0):
        self.memory, random = memory, numpy.random.default_rng(seed)
        types_of = sys.modules["sglang.srt.mem_cache.hicache_storage"].PoolName
        assembler = sys.modules["sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"]
        rows = PAGES * PAGE
        make = lambda *shape: memory.tensor(content(random, *shape))
        self.counters = []
        register = self.counters.append
        self.kvcache = type("HybridPool" if kind == "hybrid" else "MHATokenToKVPool", (), {})()
        self.kvcache.dtype, self.kvcache.layer_num, self.group = "bfloat16", LAYERS, None
        self.req_pool = types.SimpleNamespace(register_layer_transfer_counter=register)
        if kind != "hybrid":
            row = {"plain": 6, "equal": 8, "wide": 4096}[kind]
            self.kvcache.k_buffer = [make(rows, 2, max(8, row)) for _ in range(LAYERS)]
            self.kvcache.v_buffer = [make(rows, 2, row) for _ in range(LAYERS)]
            self.buffers = {types_of.KV: [*self.kvcache.k_buffer, *self.kvcache.v_buffer]}
            self.components = [types.SimpleNamespace(name="FULL")]
            return
        self.buffers = {
            types_of.KV: [make(rows, 1, 18) for _ in range(3)],
            types_of.INDEXER: [make(PAGES, 50) for _ in range(2)],
            types_of.SWA: [make(rows, 2, 8)],
            types_of.MAMBA: [make(PAGES, 40), make(PAGES, 12)],
        }
        # The draft's layer is the last buffer, and belongs to the first layer of the model. Two layers share an index.
        layers = {
            types_of.KV: {1: (0, 2), 2: 1}, types_of.INDEXER: {1: 0, 2: (0, 1)}, types_of.SWA: {2: 0},
            types_of.MAMBA: {0: 0},
        }
        entries = []
        for name, buffers in self.buffers.items():
            is_state = name == types_of.MAMBA
            entries.append(
                assembler.DevicePoolEntry(
                    name=name, indices_from_pool=types_of.KV if name == types_of.INDEXER else name, device_pool=None,
                    components=[[buffer] for buffer in buffers] if is_state else [buffers],
                    layer_mapping=layers[name],
                    page_size=1 if is_state else PAGE, rows_are_pages=name in (types_of.INDEXER, types_of.MAMBA),
                )
            )
        self.group = assembler.DevicePoolGroup(entries, LAYERS, PAGE)
        self.components = [types.SimpleNamespace(name=name) for name in ("FULL", "SWA", "MAMBA")]

    def pages(self, name, page):
        """The bytes of a page in each buffer of a pool."""
        arrays = [self.memory.array(buffer) for buffer in self.buffers[name]]
        return [array.reshape(PAGES, -1)[page].tobytes() for array in arrays]

    def zero(self):
        for buffers in self.buffers.values():
            for buffer in buffers:
                self.memory.zero(buffer)

    def indices(self, pages, page_size=PAGE):
        return self.memory.indices([page * page_size + at for page in pages for at in range(page_size)])


class Linker:
    """A linker with SGLang's calls."""

    def __init__(self, module, memory, directory, /, kind="plain", seed=0, forward_stream=None, pools=None, **extra):
        self.pools = pools or Pools(memory, kind, seed)
        self.types = sys.modules["sglang.srt.mem_cache.hicache_storage"]
        device_pools = __import__("terrane_kv.sglang.device_pools", fromlist=["it"])
        device_pools.linker_pool_assembler.resolve_hybrid_device_pool_group = lambda **_: self.pools.group
        params = sys.modules["sglang.srt.mem_cache.cache_init_params"].CacheInitParams(
            disable=False, req_to_token_pool=self.pools.req_pool, page_size=PAGE, pp_rank=0, pp_size=1, attn_cp_rank=0,
            attn_cp_size=1, is_eagle=False, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
            token_to_kv_pool_allocator=types.SimpleNamespace(get_kvcache=lambda: self.pools.kvcache),
        )
        options = {"root_dir": directory, "capacity": "8MiB", "memory": "8MiB", **extra}
        self.own = module.TerraneCacheLinker(
            types.SimpleNamespace(), params, components=self.pools.components, extra_config=options,
            forward_stream=forward_stream,
        )

    def transfer(self, name, keys, pages=None, policy="ALL_PAGES"):
        name = getattr(self.types.PoolName, name)
        size = 1 if name == self.types.PoolName.MAMBA else PAGE
        return self.types.PoolTransfer(
            name=name, keys=keys, device_indices=None if pages is None else self.pools.indices(pages, size),
            hit_policy=getattr(self.types.PoolHitPolicy, policy),
        )

    def transfers(self, numbers, pages=None, window=2):
        """The transfers of a node or of a tail, with a window of two pages and the state at its end."""
        keys = [key(number) for number in numbers]
        made = [self.transfer("KV", keys, pages)]
        if len(self.pools.buffers) > 1:
            made.append(self.transfer("SWA", keys[-window:], pages and pages[-window:], "TRAILING_PAGES"))
            made.append(self.transfer("MAMBA", keys[-1:], pages and pages[-1:], "TRAILING_PAGES"))
        return made

    def offload(self, numbers, pages, **options):
        assert self.own.offload(self.transfers(numbers, pages), **options)
        return self.finished(1)[0]

    def finished(self, count):
        """The results of the oldest offloads."""
        ends_at = time.monotonic() + 20
        while self.own.num_completed_offloads() < count:
            assert time.monotonic() < ends_at, "the offloads have not ended"
            time.sleep(0.001)
        return [self.own.pop_completed_offload() for _ in range(count)]

    def lookup(self, numbers):
        return self.own.lookup("r", self.transfers(numbers))

    def forward(self, index):
        """The waits of a forward pass, and then SGLang's wait for the batch."""
        counter = self.own.layer_done_counter
        counter.set_consumer(index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        return self.own.finish_layer_wise_loading(index)

    def load(self, numbers, pages, rid="r"):
        assert self.own.load(rid, self.transfers(numbers, pages))
        return self.forward(self.own.start_layer_wise_loading())


def key(number):
    return f"{number:064x}"
