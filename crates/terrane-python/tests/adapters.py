"""Each engine's adapter in a minimal environment, to store and load numbered blocks."""

import select
import types

import numpy

import engines

BLOCK = 64 * 1024


def content(number, size=BLOCK):
    return numpy.random.default_rng(number).integers(0, 256, size, dtype=numpy.uint8)


class Vllm:
    """A tier with a memory region of 16 chunks."""

    def __init__(self, module, directory, model="m", capacity=64 * BLOCK, dp=(0, 1), layers=(), **options):
        import sys

        config = sys.modules["vllm.v1.kv_offload.config"]
        self.base = sys.modules["vllm.v1.kv_offload.base"]
        self.tiering = sys.modules["vllm.v1.kv_offload.tiering.base"]
        parallel = config.OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=dp[0],
            data_parallel_size=dp[1], data_parallel_rank_local=None, is_parallelism_agnostic=False,
        )
        group = config.OffloadingGroupConfig(tokens_per_block=16, layer_names=tuple(layers), group_id=0)
        stated = config.OffloadingConfig(
            groups=(group,), worker_kv_bytes_per_block=BLOCK, enable_kv_cache_events=True, extra_config={}, engine_id="e",
            model=config.OffloadingModelConfig(name=model, dtype="bfloat16"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1), parallel=parallel,
        )
        events = types.SimpleNamespace(enable_kv_cache_events=True)
        spec = types.SimpleNamespace(config=stated, kv_events_config=events)
        self.memory = numpy.zeros((16, BLOCK), dtype=numpy.int8)
        self.tier = module.TerraneTier(
            offloading_spec=spec, primary_kv_view=memoryview(self.memory), tier_type="terrane",
            root_dir=directory, capacity=capacity, **options,
        )
        self.job = 0

    def context(self, request="r"):
        return self.base.ReqContext(req_id=request)

    def submit(self, verb, keys, chunks, request="r"):
        self.job += 1
        job = self.tiering.TransferJob(
            job_id=self.job, keys=keys, chunk_ids=numpy.array(chunks, dtype=numpy.int64),
            is_promotion=verb == "load", req_context=self.context(request), submit_time=0.0,
        )
        (self.tier.submit_load if verb == "load" else self.tier.submit_store)(job)

    def run(self, verb, keys, chunks, request="r"):
        self.submit(verb, keys, chunks, request)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result

    @staticmethod
    def key(number):
        return bytes([number]) * 32 + b"\0\0\0\0"

    def store(self, numbers):
        for at, number in enumerate(numbers):
            self.memory[at] = content(number).view(numpy.int8)
        return self.run("store", [self.key(number) for number in numbers], range(len(numbers))).success

    def load(self, numbers):
        """For each block, None if it is absent, else whether its bytes are right."""
        keys = [self.key(number) for number in numbers]
        self.memory[:] = 0
        result = self.run("load", keys, range(len(keys)))
        loaded = keys if result.success else result.successful_keys or ()
        return [
            bool((self.memory[at].view(numpy.uint8) == content(number)).all()) if key in loaded else None
            for at, (key, number) in enumerate(zip(keys, numbers))
        ]

    def close(self):
        self.tier.shutdown()


class Lmcache:
    def __init__(self, module, directory, model="m", capacity=64 * BLOCK, **options):
        options = {"chunk_bytes": [4096, BLOCK], "kv_dtype": "bfloat16", **options}
        self.connector = module.Connector(directory=directory, capacity=capacity, model=model, **options)

    def wait(self, number, seconds=20):
        """The completion of a batch, from the descriptor that LMCache polls."""
        poll = select.poll()
        poll.register(self.connector.event_fd(), select.POLLIN)
        while poll.poll(seconds * 1000):
            for completion in self.connector.drain_completions():
                if completion[0] == number:
                    return completion
        raise AssertionError(f"batch {number} did not complete")

    @staticmethod
    def key(number):
        return f"model@00000000@0@{number:064x}"

    @staticmethod
    def size(number):
        return (BLOCK, 1000, 4097)[number % 3]

    def store(self, numbers):
        buffers = [memoryview(content(number, self.size(number))) for number in numbers]
        return self.wait(self.connector.submit_batch_set([self.key(it) for it in numbers], buffers))[1]

    def load(self, numbers):
        buffers = [numpy.zeros(self.size(number), dtype=numpy.uint8) for number in numbers]
        keys = [self.key(number) for number in numbers]
        _, _, _, done = self.wait(self.connector.submit_batch_get(keys, [memoryview(it) for it in buffers]))
        right = [bool((it == content(number, len(it))).all()) for it, number in zip(buffers, numbers)]
        return [is_right if is_done else None for is_done, is_right in zip(done, right)]

    def close(self):
        self.connector.close()


class Pool:
    """A host pool of 16 pages in two parts, with the interface of SGLang's pools."""

    page_size, dtype, layout = 4, "bfloat16", "page_first"

    def __init__(self, size=BLOCK):
        self.half = size // 2
        self.kv_buffer = numpy.zeros((2, 16, self.half), dtype=numpy.uint8)

    def get_page_buffer_meta(self, indices):
        pages = [int(index) // self.page_size for index in list(indices)[:: self.page_size]]
        pointers = [self.kv_buffer[part, page].ctypes.data for page in pages for part in (0, 1)]
        return pointers, [self.half] * len(pointers)

    def indices(self, pages):
        return numpy.array([page * self.page_size + at for page in pages for at in range(self.page_size)])

    def write(self, page, number):
        self.kv_buffer[:, page] = content(number, 2 * self.half).reshape(2, self.half)

    def holds(self, page, number):
        return bool((self.kv_buffer[:, page].ravel() == content(number, 2 * self.half)).all())


class Sglang:
    def __init__(self, module, directory, model="m", capacity=64 * BLOCK, tp=(0, 1), mla=False, changes=(), **options):
        import sys

        self.types = sys.modules["sglang.srt.mem_cache.hicache_storage"]
        config = self.types.HiCacheStorageConfig(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
            enable_storage_metrics=False, is_page_first_layout=True, model_name=model,
            extra_config={"root_dir": directory, "capacity": capacity, **options}, **dict(changes),
        )
        self.storage = module.TerraneHiCacheStorage(config, {})
        self.pool = Pool()
        self.storage.register_mem_pool_host(self.pool)

    @staticmethod
    def key(number):
        return f"{number:064x}"

    def store(self, numbers):
        for page, number in enumerate(numbers):
            self.pool.write(page, number)
        keys = [self.key(number) for number in numbers]
        return all(self.storage.batch_set_v1(keys, self.pool.indices(range(len(keys)))))

    def load(self, numbers):
        self.pool.kv_buffer[:] = 0
        keys = [self.key(number) for number in numbers]
        done = self.storage.batch_get_v1(keys, self.pool.indices(range(len(keys))))
        return [
            self.pool.holds(page, number) if is_done else None
            for page, (number, is_done) in enumerate(zip(numbers, done))
        ]

    def close(self):
        self.storage.close()


ADAPTERS = {"vllm": Vllm, "lmcache": Lmcache, "sglang": Sglang}


def newest(engine):
    return engines.releases(engine)[0]
