"""A disk tier below vLLM's host memory."""

import logging
import time
from typing import ClassVar

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from terrane_kv import keys as key_seeds
from terrane_kv import report
from terrane_kv._native import CompletionQueue, Region, StoreError
from terrane_kv.folders import RateLimitedWarning, log_like, open_rank, seconds, whole

logger = logging.getLogger("terrane_kv")

# The return values of Store.presence.
ABSENT, WRITING, READY = 0, 1, 2

# The maximum number of jobs in flight of one engine. vLLM submits one for each request and step.
MAX_JOBS = 65_536


class TerraneTier(SecondaryTierManager):
    """A secondary tier with a `terrane_kv.Store`.

    Keys of the tier's configuration:

    - `root_dir`: a folder on a local drive; `capacity`: bytes, or a text such as "500GiB", for all data-parallel
      engines of this machine together.
    - `engines`: the value of `--data-parallel-size`. For dense models, vLLM does not pass it to the tier.
    - `load_timeout_s`: a load that takes longer is a miss; in seconds (default 30).
    - `hash_algorithm`: the value of `--prefix-caching-hash-algo` (default "sha256").
    - `revision`, `rope_scaling`: set them if two models of the same name differ in them, because vLLM does not pass
      them to the tier.
    - `cp_kv_cache_interleave_size`: the value of vLLM's option of this name, if it is not 1.
    - `enable_kv_events`, `locality`: as for vLLM's own tiers.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec,
        primary_kv_view,
        tier_type,
        backpressure_detector=None,
        *,
        root_dir,
        capacity,
        engines=None,
        load_timeout_s=30.0,
        hash_algorithm="sha256",
        revision=None,
        rope_scaling=None,
        cp_kv_cache_interleave_size=None,
        enable_kv_events=False,
        locality=None,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_like("vllm")
        self.locality = Locality(locality) if locality is not None else None
        self._load_timeout_s = seconds("load_timeout_s", load_timeout_s)
        self._failures, self._refusals = RateLimitedWarning(), RateLimitedWarning()
        self._root_dir = root_dir
        self._seed = key_seeds.vllm(hash_algorithm)
        self._is_seed_checked = False
        config = offloading_spec.config
        parallel = config.parallel
        row_bytes = primary_kv_view.strides[0]
        # vLLM tells each engine of a dense model that it is the only one, but passes its number among all engines.
        engine = parallel.data_parallel_index
        engines = parallel.data_parallel_size if engines is None else whole("engines", engines, 1)
        if engine >= engines:
            raise ValueError(
                f"this is engine {engine} (from 0), and the tier expects {engines} in all; set the tier's `engines` to "
                "the value of --data-parallel-size"
            )
        fields = {
            "dtype": config.model.dtype,
            "block_bytes": row_bytes,
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "groups": [[group.tokens_per_block, group.layer_names] for group in config.groups],
            "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "kv_cache_layout": getattr(config, "kv_cache_layout", None),
            "layout": [config.replicated_layout, getattr(config, "canonical_layout", False)],
            "revision": revision,
            "rope_scaling": rope_scaling,
            "cp_kv_cache_interleave_size": cp_kv_cache_interleave_size,
        }
        self._store = open_rank(
            engine="vllm",
            directory=root_dir,
            capacity=capacity,
            groups=[("kv", row_bytes)],
            model=config.model.name,
            fields=fields,
            seed=self._seed,
            rank=engine,
            ranks=engines,
        )
        self._queue = CompletionQueue(MAX_JOBS)
        self._region = Region(primary_kv_view, row_bytes)
        # Jobs in flight: the keys, whether the job is a load, and the request.
        self._jobs = {}
        self._finished = []
        # Keys whose load failed, for each request. They are misses, because vLLM would otherwise load them again in
        # each step.
        self._failed_keys = {}
        # Requests in progress. A load may end after its request, and then affects no lookup.
        self._active_requests = set()
        wants_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = self._store.events(MAX_JOBS) if wants_events else None
        # The number of events that were dropped because there were too many.
        self._lost_events = 0
        # The keys of each completed store job, until vLLM takes them as events, and all keys that vLLM has taken.
        self._stored, self._announced = [], set()

    def lookup(self, key, req_context):
        presence = self._store.presence(key)
        if presence == ABSENT or key in self._failed_keys.get(req_context.req_id, ()):
            return LookupResult.MISS
        return LookupResult.RETRY if presence == WRITING else LookupResult.HIT

    def submit_store(self, job_metadata):
        self._submit(job_metadata, self._store.put, priority="low")

    def submit_load(self, job_metadata):
        self._submit(job_metadata, self._store.get, priority="high", timeout=self._load_timeout_s)

    def _submit(self, job, verb, **options):
        job_keys = list(job.keys)
        self._jobs[job.job_id] = (job_keys, job.is_promotion, job.req_context.req_id)
        if not job_keys:
            self._finish(job.job_id, [], 0.0, 0)
            return
        try:
            blocks = self._region.rows(job.chunk_ids)
            verb(job_keys, blocks, queue=self._queue, tag=job.job_id, **options)
        except Exception as error:
            # No exception reaches a step of the engine.
            if self._refusals.is_due():
                logger.warning("job %d was refused: %r", job.job_id, error)
            self._fail(job.job_id)

    def get_finished_jobs(self):
        for outcome in self._queue.drain():
            self._take(outcome)
        finished, self._finished = self._finished, []
        return finished

    def _take(self, outcome):
        if outcome.error and self._failures.is_due():
            logger.warning("a %s failed: %s", "load" if self._jobs[outcome.tag][1] else "store", outcome.error)
        self._finish(outcome.tag, outcome.done, outcome.seconds, outcome.bytes)

    def _fail(self, job_id):
        self._finish(job_id, [False] * len(self._jobs[job_id][0]), None, 0)

    def _finish(self, job_id, done, seconds, moved):
        job_keys, is_load, request = self._jobs.pop(job_id)
        if self._events is not None and not is_load and any(done):
            self._stored.append([key for key, is_done in zip(job_keys, done) if is_done])
        successful = None
        if is_load and not all(done):
            successful = tuple(key for key, is_done in zip(job_keys, done) if is_done) or None
            if request in self._active_requests:
                failed = (key for key, is_done in zip(job_keys, done) if not is_done)
                self._failed_keys.setdefault(request, set()).update(failed)
        self._finished.append(
            JobResult(
                job_id=job_id,
                success=all(done),
                successful_keys=successful,
                transfer_time=seconds,
                # vLLM replaces None by the size of all keys. A store of stored keys would then look infinitely fast.
                transfer_bytes=moved,
            )
        )

    def touch(self, keys, req_context):
        self._store.touch(list(keys))

    def clear(self):
        """Removes all blocks. A failure is logged, because no exception reaches a step of the engine."""
        try:
            self._store.clear()
        except StoreError as error:
            logger.error("the cache in %s cannot be emptied, and may serve old blocks: %s", self._root_dir, error)

    def take_events(self):
        stored, self._stored = self._stored, []
        for job_keys in stored:
            self._announced.update(job_keys)
            yield self._event(job_keys, False)
        if self._events is None:
            return
        changes = self._events.drain()
        # If a key is stored again by now, it has been announced as stored. A write that has not ended may still fail.
        changed = dict.fromkeys(key for kind, key in changes if kind != "stored" and key is not None)
        removed = [key for key in changed if self._store.presence(key) < READY]
        lost = self._events.lost
        if lost != self._lost_events or any(kind == "cleared" for kind, _ in changes):
            # These changes have no keys.
            self._lost_events = lost
            others = list(self._announced.difference(changed))
            presences = self._store.presences(others)
            removed += [key for key, presence in zip(others, presences) if presence < READY]
        if removed:
            self._announced.difference_update(removed)
            yield self._event(removed, True)

    def _event(self, job_keys, removed):
        return OffloadingEvent(
            keys=job_keys,
            medium=self.medium,
            removed=removed,
            locality=self.locality,
            # Otherwise vLLM forgets which blocks a chunk has once the chunk leaves host memory.
            removal_expected=not removed,
        )

    def on_new_request(self, req_context):
        if not self._is_seed_checked:
            self._is_seed_checked = True
            self._check_seed()
        self._active_requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context):
        self._active_requests.discard(req_context.req_id)
        self._failed_keys.pop(req_context.req_id, None)

    def _check_seed(self):
        """Empties the store if vLLM's seed is random.

        The seed is known once vLLM has computed its first hash, which is after it has created the tier.
        """
        used = kv_cache_utils.get_none_hash_seed()
        expected = self._seed.seed
        if expected == "default":
            expected = kv_cache_utils.DEFAULT_NONE_HASH_SEED
        if not self._seed.is_reproducible or used == expected:
            return
        self._seed = key_seeds.vllm_random(f"not {self._seed.algorithm}, the tier's `hash_algorithm`")
        report.note_store(self._store, "vllm", self._root_dir, self._seed)
        logger.warning("the cache in %s will not survive a restart: %s", self._root_dir, self._seed.remedy)
        try:
            self._store.clear()
        except StoreError as error:
            logger.warning("the blocks of earlier sessions, which never hit, stay: %s", error)

    def drain_jobs(self):
        # The wait ends each second, so that Python can handle signals.
        while self._jobs:
            started = time.monotonic()
            outcome = self._queue.wait(timeout=1.0)
            if outcome is not None:
                self._take(outcome)
            elif time.monotonic() - started < 0.5:
                # The queue returns at once if it expects no outcome.
                self._fail_all()

    def _fail_all(self):
        for job_id in list(self._jobs):
            logger.error("job %d of vLLM has no job in the store; it counts as failed", job_id)
            self._fail(job_id)

    def shutdown(self):
        self._store.close(timeout=30.0)
        for outcome in self._queue.drain():
            self._take(outcome)
        self._fail_all()
        self._region.release()
