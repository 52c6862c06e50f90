"""The numbers of SGLang's ranks, groups and servers."""

from terrane_kv.folders import whole


def engine_numbers(dp_rank, extra, is_shared):
    """The group of dp attention, the number of groups, the number of engines, and the numbers that this engine may use,
    the preferred number first.

    `dp_rank` is the group that SGLang passes, and `is_shared` whether ranks share a store. Raises `ValueError` if the
    options in `extra` do not match.
    """
    group = dp_rank or 0
    groups = int(extra.get("dp_groups") or parallel_setting("attn_dp_size") or 1)
    if group >= groups:
        raise ValueError(
            f"this is group {group} (from 0) of dp attention, and {groups} are known; set `dp_groups` in the extra "
            "config to the value of --dp-size"
        )
    replicas = max(1, (parallel_setting("num_dp_ranks") or groups) // groups)
    engines = whole("engines", extra.get("engines", replicas), 1)
    if "engine" in extra:
        engine = whole("engine", extra["engine"], 0)
        if engine >= engines:
            raise ValueError(
                f"this is engine {engine} (from 0), and {engines} share root_dir; set `engines` in the extra config "
                "to the number of servers"
            )
        return group, groups, engines, [engine]
    replica = parallel_setting("dp_rank") if groups == 1 else None
    if is_shared and engines > 1:
        if replica is None or replica >= engines:
            raise ValueError(
                f"{engines} engines share root_dir, and the ranks of each must find their rank 0; set `engine` in the "
                "extra config to the number of this engine, from 0"
            )
        return group, groups, engines, [replica]
    numbers = sorted(range(engines), key=lambda number: number != replica)
    return group, groups, engines, numbers


def parallel_setting(name):
    """A rank or a size from SGLang's context of this process, or None."""
    value = engine_setting("get_parallel", name)
    return value if isinstance(value, int) else None


def engine_setting(part, name):
    """A value in a part of SGLang's context of this process, or None."""
    try:
        from sglang.srt import runtime_context

        return getattr(getattr(runtime_context, part)(), name)
    except Exception:
        # The context raises errors of several types for an unknown name, or before SGLang has started.
        return None
