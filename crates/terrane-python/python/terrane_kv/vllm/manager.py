"""A manager of vLLM's tiers that waits for free host memory."""

import time

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from terrane_kv.vllm.tier import TerraneTier


class WaitingTieringManager(TieringOffloadingManager):
    """vLLM's tiering manager, with RETRY instead of MISS while host memory is too full for a promotion.

    A block on disk is then loaded a little later, instead of being computed again. Each request waits for at most
    `room_wait_s` seconds, and then vLLM computes the missing blocks. After a preemption, the request waits again.

    A promotion never evicts a chunk that the same step or the step before has found ready for a waiting request. So the
    beginning of a prefix that is longer than host memory is used, and the rest is computed.

    With `clear_on_reset`, a reset of vLLM's caches also empties the tiers of Terrane.
    """

    def __init__(self, *arguments, room_wait_s, clear_on_reset=False, **options):
        # The constructor of vLLM's class may start a thread that calls `_initiate_promotion`.
        self._room_wait_s = room_wait_s
        self._clears_on_reset = clear_on_reset
        # The time at which each waiting request stops waiting.
        self._room_deadlines = {}
        self._has_lacked_room = False
        # The chunks that this step has found ready: for each request, and with those of the step before.
        self._ready, self._protected = {}, set()
        super().__init__(*arguments, **options)

    def _initiate_promotion(self, tier_idx, key, req_context):
        deadline = self._room_deadlines.get(req_context.req_id)
        if deadline is not None and time.monotonic() >= deadline:
            # No promotion either, because chunks of one request could evict each other endlessly.
            return False
        primary = self.primary_tier
        evictable = primary._num_evictable_cache_chunks
        if primary._get_num_free_chunks() == 0 and evictable <= len(self._protected):
            is_promoted = False
            # If only this request has chunks in host memory, no other one can free room for it.
            is_alone = evictable == primary._num_chunks and len(self._protected) <= len(
                self._ready.get(req_context.req_id, ())
            )
            if is_alone:
                return False
        else:
            is_promoted = super()._initiate_promotion(tier_idx, key, req_context)
        if not is_promoted:
            self._has_lacked_room = True
            self._room_deadlines.setdefault(req_context.req_id, time.monotonic() + self._room_wait_s)
        return is_promoted

    def lookup(self, key, req_context, **options):
        self._has_lacked_room = False
        result = super().lookup(key, req_context, **options)
        if result is LookupResult.MISS and self._has_lacked_room:
            return LookupResult.RETRY
        if result is LookupResult.HIT:
            self._ready.setdefault(req_context.req_id, set()).add(key)
            self._protected.add(key)
        return result

    def on_schedule_end(self, context):
        super().on_schedule_end(context)
        # A request that is not scheduled looks its chunks up again in the next step, perhaps after another request.
        scheduled = {*context.new_req_ids, *context.preempted_req_ids}
        waiting = (chunks for request, chunks in self._ready.items() if request not in scheduled)
        self._protected = set().union(*waiting)
        self._ready = {}
        # Not after each promotion, because chunks of one request that evict each other would then wait endlessly.
        for request in (*context.new_req_ids, *context.preempted_req_ids):
            self._room_deadlines.pop(request, None)

    def on_request_finished(self, req_context, **options):
        self._room_deadlines.pop(req_context.req_id, None)
        super().on_request_finished(req_context, **options)

    def reset_cache(self):
        super().reset_cache()
        self._ready, self._protected = {}, set()
        if self._clears_on_reset:
            for tier in self.secondary_tiers:
                if isinstance(tier, TerraneTier):
                    tier.clear()
