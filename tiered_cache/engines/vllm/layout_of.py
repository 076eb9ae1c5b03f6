"""From vLLM's cache groups to a `PageLayout`: which bytes of a row of the host buffer a group's layers use.

A row is one slot a worker, and each slot one page a chunk of every tensor that layers are laid over, in the order in
which the groups name their layers first. Where that is not what the sizes say (packed layouts, layers of several page
sizes in one group, vLLM's canonical layout) the whole row is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

from tiered_cache.engines.vllm.layout import PageGroup, PageLayout
from tiered_cache.geometry import PartKind

_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def layout_of(kv_cache_config: Any, spec: Any, row_bytes: int) -> PageLayout:
    """The layout of rows of `row_bytes` bytes, of vLLM's offloading spec."""
    slots = _worker_slots(kv_cache_config, spec, row_bytes)
    groups = []
    for group in spec.config.groups:
        kv_spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        chunk_tokens = group.tokens_per_block * spec.blocks_per_chunk
        window_chunks = get_sliding_window_size_in_chunks(kv_spec, chunk_tokens)
        if isinstance(kv_spec, MambaSpec):
            kind, window_tokens = PartKind.CARRY, 0
        elif window_chunks is None:
            kind, window_tokens = PartKind.ROWS, 0
        else:
            kind, window_tokens = PartKind.WINDOW, window_chunks * chunk_tokens
        ranges = slots.get(group.group_id, ((0, row_bytes),))
        groups.append(PageGroup(group.group_id, kind, chunk_tokens, ranges, window_tokens, _content_dtype(kv_spec)))
    return PageLayout(tuple(groups), spec.tokens_per_hash, row_bytes)


def _content_dtype(kv_spec: Any) -> str:
    names = {str(d).removeprefix("torch.") for d in getattr(kv_spec, "dtypes", None) or (kv_spec.dtype,)}
    name = names.pop()
    return name if not names and name in _DTYPES else ""


def _worker_slots(kv_cache_config: Any, spec: Any, row_bytes: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """For each group the ranges of a row that its layers use; empty if that is not known."""
    config = spec.config
    if config.canonical_layout:
        return {}
    places: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            places[layer] = (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
    offsets: dict[tuple[int, int], int] = {}
    end = 0
    used: dict[int, list[tuple[int, int]]] = {}
    for group in config.groups:
        kv_spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        page, unpadded = kv_spec.page_size_bytes, _unpadded(kv_spec)
        for layer in group.layer_names:
            place = places.get(layer)
            if place is None or place[1] != page or unpadded is None:
                return {}
            if place not in offsets:
                offsets[place] = end
                end += page * spec.blocks_per_chunk
            for block in range(spec.blocks_per_chunk):
                start = offsets[place] + block * page
                used.setdefault(group.group_id, []).append((start, start + unpadded))
    slot_bytes = config.worker_kv_bytes_per_block * spec.blocks_per_chunk
    workers = 1 if spec.replicated_layout else config.parallel.world_size
    if end != slot_bytes or slot_bytes * workers > row_bytes:
        return {}
    return {
        number: _merged(
            (worker * slot_bytes + a, worker * slot_bytes + b) for worker in range(workers) for a, b in parts
        )
        for number, parts in used.items()
    }


def _unpadded(kv_spec: Any) -> int | None:
    if isinstance(kv_spec, AttentionSpec):
        return int(kv_spec.unpadded_page_size_bytes)
    if isinstance(kv_spec, MambaSpec):
        return int(replace(kv_spec, page_size_padded=None).page_size_bytes)
    return None


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
