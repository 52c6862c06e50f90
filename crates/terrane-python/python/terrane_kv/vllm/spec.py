"""vLLM's tiering spec with Terrane's manager and worker."""

import logging

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from terrane_kv._native import StoreError
from terrane_kv.folders import log_like, seconds, warn_about_names
from terrane_kv.vllm.manager import WaitingTieringManager
from terrane_kv.vllm.worker import TerraneOffloadingWorker

logger = logging.getLogger("terrane_kv")

SPEC_OPTIONS = ("room_wait_s", "clear_on_reset", "copy_engine")


class TerraneOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with `WaitingTieringManager`.

    Keys of `kv_connector_extra_config`:

    - `room_wait_s`: the time that a request waits for free host memory (default 5 s).
    - `clear_on_reset`: whether a reset of vLLM's caches, such as after new weights, also empties the tier (default
      false).
    - `copy_engine`: "terrane" or "vllm" (default): the copies between the GPU and host memory.
    """

    def get_manager(self):
        if self._manager is None:
            log_like("vllm")
            warn_about_names(self.extra_config, SPEC_OPTIONS, "kv_connector_extra_config")
            # Before the tiers are opened.
            own = {
                "room_wait_s": seconds("room_wait_s", self.extra_config.get("room_wait_s", 5.0)),
                "clear_on_reset": self.extra_config.get("clear_on_reset", False),
            }
            if not isinstance(own["clear_on_reset"], bool):
                raise ValueError(f"clear_on_reset is {own['clear_on_reset']!r}; set true or false")
            options = {}
            interval = getattr(self, "tier_poll_interval_s", None)
            if interval is not None:
                # The manager that super() creates is used only for its tiers, and starts no thread.
                self.tier_poll_interval_s = 0.0
                options["tier_poll_interval_s"] = interval
            plain = super().get_manager()
            self._manager = WaitingTieringManager(
                plain.primary_tier,
                plain.secondary_tiers,
                **own,
                **options,
            )
        return self._manager

    def create_worker(self, kv_caches):
        engine = self.extra_config.get("copy_engine", "vllm")
        if engine not in ("terrane", "vllm"):
            raise ValueError(f'copy_engine is {engine!r}; set "terrane" or "vllm"')
        own = super().create_worker(kv_caches)
        if engine == "vllm":
            return own
        log_like("vllm")
        try:
            worker = TerraneOffloadingWorker(own)
        except (AttributeError, StoreError, ValueError) as error:
            # Another release of vLLM may lack an attribute.
            logger.warning("vLLM's own worker copies between the GPU and host memory: %s", error)
            return own
        logger.info("Terrane copies between the GPU and host memory")
        return worker
