"""The pages of SGLang's device pools, as blocks of caches."""

import bisect

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler

from terrane_kv._native import KvCache, StoreError

# The pools of models whose layers are alike. SGLang's own assembly refuses them.
PLAIN = ("MHATokenToKVPool", "MLATokenToKVPool")
# The attributes of these pools with scales of quantized elements.
SCALES = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")


def pool_group(params, components):
    """SGLang's group of the physical device pools of a model.

    Raises `ValueError` for a model that SGLang or Terrane cannot describe.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    if type(kvcache).__name__ in PLAIN and {component.name for component in components} == {"FULL"}:
        return _plain_group(kvcache, params)
    return linker_pool_assembler.resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=params.page_size, params=params, components=components
    )


def _plain_group(kvcache, params):
    """The group of the only pool of a model."""
    drafts = (*getattr(params, "mtp_draft_device_pools", ()), *getattr(params, "sidecar_draft_device_pools", ()))
    if drafts:
        raise ValueError(
            "Terrane's linker does not store the cache of a draft model; start SGLang without speculative decoding, or "
            "use HiCache"
        )
    if any(getattr(kvcache, name, None) is not None for name in SCALES):
        raise ValueError(
            "Terrane's linker does not store a cache with scales; set another --kv-cache-dtype, or use HiCache"
        )
    layers = kvcache.layer_num
    is_latent = "MLA" in type(kvcache).__name__
    buffers = list(kvcache.kv_buffer) if is_latent else [*(kvcache.k_buffer or ()), *(kvcache.v_buffer or ())]
    if len(buffers) != layers * (1 if is_latent else 2):
        raise ValueError(f"SGLang's pool has {len(buffers)} buffers for {layers} layers; use HiCache for this model")
    entry = linker_pool_assembler.DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=kvcache,
        components=[buffers],
        layer_mapping={layer: layer if is_latent else (layer, layers + layer) for layer in range(layers)},
        page_size=params.page_size,
        # In any other layout, a row has the tokens of a page.
        rows_are_pages=(getattr(kvcache, "kv_cache_layout", None) or "nhd") != "nhd",
    )
    return linker_pool_assembler.DevicePoolGroup([entry], layers, params.page_size, rank_replicated=is_latent)


class Layers:
    """The layer of a forward pass that first needs each layer of a cache. It does not keep the cache alive."""

    def __init__(self, first_needs):
        self._first_needs = first_needs

    def last(self, layer):
        """The last layer of the cache that a forward pass needs for its layers up to this one; -1 if it needs none."""
        return bisect.bisect_right(self._first_needs, layer) - 1


class DevicePool:
    """The pages of one of SGLang's device pools. `number` is its group in the store.

    Raises `ValueError` for memory that Terrane cannot describe.
    """

    def __init__(self, number, entry):
        self.number, self._entry = number, entry
        self.name = getattr(entry.name, "value", entry.name)
        buffers = [buffer for component in entry.components for buffer in component]
        device = buffers[0].device
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"the pool {self.name} is on the device {device}; Terrane copies to and from CUDA devices")
        self.device = (device.index or 0) if device.type == "cuda" else None
        rows = {_rows_of_page(self.name, buffer, meta) for buffer, meta in _with_meta(entry)}
        if len(rows) != 1:
            raise ValueError(f"the pages of the pool {self.name} have different numbers of rows: {sorted(rows)}")
        (self._rows,) = rows
        pages = min(buffer.shape[0] for buffer in buffers) // self._rows
        # Buffers are loaded in the order in which a forward pass needs them. It is the order of a page's bytes, too.
        ordered = sorted(_with_layers(entry), key=lambda it: it[0])
        members = {}
        for layer, number_of_buffer, (pointer, row_stride, span) in ordered:
            members.setdefault((span, row_stride * self._rows), []).append((layer, number_of_buffer, pointer))
        parts = [
            ([pointer for _, _, pointer in buffers], span, [pages], [stride])
            for (span, stride), buffers in members.items()
        ]
        # A layer of the cache has one buffer of each part. The forward pass needs it at the earliest of their layers.
        self.layers = Layers([min(layers) for layers in zip(*([layer for layer, _, _ in it] for it in members.values()))])
        # The geometry on which stored pages depend: the bytes of a page in each buffer, and the order of the buffers.
        self.form = [[span, [number for _, number, _ in it]] for (span, _), it in members.items()]
        memory = "host" if self.device is None else self.device
        try:
            (self.cache,) = KvCache.pages([parts], keep=buffers, memory=memory)
        except (StoreError, ValueError) as error:
            raise ValueError(f"Terrane cannot describe SGLang's device pool {self.name}: {error}") from error

    def page_ids(self, indices):
        """The ids of the pages with these token indices. Copies the indices from the device."""
        return [row // self._rows for row in self._entry.prepare_locations(indices)]


def _with_meta(entry):
    """Each buffer of a pool, with its address, the bytes from row to row, and the bytes of a page."""
    for component, meta in zip(entry.components, entry.buffer_meta, strict=True):
        yield from zip(component, meta, strict=True)


def _with_layers(entry):
    """Each buffer of a pool, as the first layer of a forward pass that needs it, its number, and its meta values."""
    first = {}
    for layer, places in entry.layer_mapping.items():
        for place in (places,) if isinstance(places, int) else places:
            first[place] = min(layer, first.get(place, layer))
    # A buffer of no layer is loaded with the first one.
    any_layer = min(entry.layer_mapping)
    number = 0
    for meta in entry.buffer_meta:
        for place, values in enumerate(meta):
            yield first.get(place, any_layer), number, values
            number += 1


def _rows_of_page(name, buffer, meta):
    _, row_stride, span = meta
    row = buffer.nbytes // buffer.shape[0]
    if not buffer[0].is_contiguous() or (span > row and row_stride != row):
        raise ValueError(
            f"SGLang's device pool {name} has gaps between the bytes of a page; use HiCache for this model"
        )
    return span // row
