"""The functions that engines call when they start, by the package's entry points."""


def register_vllm() -> None:
    """Registers the tier `terrane` and the spec `TerraneOffloadingSpec` with vLLM's factories.

    vLLM may call it several times, in several processes. For a vLLM without secondary tiers, it does nothing.
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return
    for register, name, class_name in (
        (SecondaryTierFactory.register_tier, "terrane", "TerraneTier"),
        (OffloadingSpecFactory.register_spec, "TerraneOffloadingSpec", "TerraneOffloadingSpec"),
    ):
        try:
            register(name, "terrane_kv.vllm", class_name)
        except ValueError:
            # It is registered already.
            pass
