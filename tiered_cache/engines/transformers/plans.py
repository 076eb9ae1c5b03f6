"""What each cache layer class of transformers 5.23 holds, attribute by attribute: the adapter's only knowledge of it.

A `LayerPlan` names every attribute of one layer: tensors (`Slot`), numbers that follow from the token count
(`Counter`), names for a tensor that another attribute holds (`aliases`), and settings that no step changes
(`constants`). What is not named is refused: an attribute or a class that this module does not know may be state.

Left out on purpose, and refused by name: quantised layers (the scale of all rows is that of the first call, so rows
are not a function of their prefix), reference sliding windows (what is kept depends on where the first call ended),
encoder-decoder, multi-token-prediction and draft caches, offloaded caches.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tiered_cache.errors import StateError

SUPPORTED_VERSIONS = ("5.23",)
"""Releases whose cache classes were read for this module; of another one nothing is known."""


class Kind(enum.Enum):
    """How a tensor's size follows from the token count n."""

    ROWS = "rows"  # one entry for every `every` tokens, n // every in all, never changed
    LAST = "last"  # the entries of the last min(n, keep) tokens
    OPEN = "open"  # the entries of the n % every tokens since the last full group
    WHOLE = "whole"  # a fixed shape, overwritten in place


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layer: where it is, and how its size follows from the token count."""

    attribute: str
    kind: Kind
    key: str | int | None = None
    """Entry of the attribute, if it is a dict or a list."""
    token_axis: int = -2
    """Of all kinds but `WHOLE`."""
    batch_axis: int | None = 0
    every: int = 1
    keep: int = 0
    since: int = 1
    """The tensor exists from this token count on."""
    is_buffer: bool = False
    """It has a fixed capacity, zero beyond the entries."""

    @property
    def name(self) -> str:
        prefix = "window." if self.kind is Kind.LAST else ""
        return f"{prefix}{self.attribute}" if self.key is None else f"{prefix}{self.attribute}.{self.key}"

    def count(self, tokens: int) -> int:
        """How many entries there are along the token axis at `tokens` tokens."""
        if self.kind is Kind.ROWS:
            return tokens // self.every
        return min(tokens, self.keep) if self.kind is Kind.LAST else tokens % self.every

    @property
    def entries_max(self) -> int:
        """The most entries of a carry."""
        return self.keep if self.kind is Kind.LAST else self.every - 1

    def read(self, layer: Any) -> Any:
        """The tensor, or None."""
        value = getattr(layer, self.attribute)
        if self.key is None:
            return value
        if isinstance(self.key, int) and isinstance(value, list):
            value = value[self.key] if self.key < len(value) else None
            return None if isinstance(value, list) else value  # an empty list stands for "none" there
        return value[self.key]

    def write(self, layer: Any, tensor: Any) -> None:
        if self.key is None:
            setattr(layer, self.attribute, tensor)
        else:
            getattr(layer, self.attribute)[self.key] = tensor


@dataclass(frozen=True, slots=True)
class Counter:
    """A number, an int or a tensor of one, that is always `tokens // every`."""

    attribute: str
    key: str | None = None
    every: int = 1

    def read(self, layer: Any) -> int:
        value = getattr(layer, self.attribute)
        return int(value if self.key is None else value[self.key])

    def write(self, layer: Any, tokens: int) -> None:
        value = getattr(layer, self.attribute)
        number = tokens // self.every
        if self.key is not None:
            value[self.key] = number
        elif isinstance(value, int):
            setattr(layer, self.attribute, number)
        else:
            value.fill_(number)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Every attribute of one layer."""

    slots: tuple[Slot, ...] = ()
    counters: tuple[Counter, ...] = ()
    constants: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Attribute -> the attribute whose very tensor it is."""
    required: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Settings with which alone the layer can be carried."""
    marks: frozenset[str] = frozenset()
    """What others write on it for themselves; not carried."""

    def __add__(self, other: LayerPlan) -> LayerPlan:
        return LayerPlan(
            self.slots + other.slots,
            self.counters + other.counters,
            self.constants | other.constants,
            {**self.aliases, **other.aliases},
            {**self.required, **other.required},
            self.marks | other.marks,
        )

    @property
    def attributes(self) -> frozenset[str]:
        named = {slot.attribute for slot in self.slots} | {counter.attribute for counter in self.counters}
        return self.constants.union(named, self.aliases, self.required, self.marks)

    @property
    def tokens_to_show_all(self) -> int:
        """From how many tokens on every tensor exists."""
        return max((slot.since for slot in self.slots), default=1)


_Planner = Callable[[Any], LayerPlan]

_BASE = frozenset({"is_initialized", "dtype", "device"})
_KEY_VALUE = ("keys", "values")


def _full(layer: Any) -> LayerPlan:
    del layer
    return LayerPlan(tuple(Slot(name, Kind.ROWS) for name in _KEY_VALUE), constants=_BASE)


def _sliding(layer: Any) -> LayerPlan:
    """The last `sliding_window - 1` tokens stay; every call drops the rest."""
    return LayerPlan(
        tuple(Slot(name, Kind.LAST, keep=layer.sliding_window - 1) for name in _KEY_VALUE),
        (Counter("cumulative_length"),),
        _BASE | {"sliding_window", "_sliding_window_tensor"},
        required={"record_past": False},
    )


def _indexer(layer: Any) -> LayerPlan:
    del layer
    return LayerPlan(
        (
            Slot("indexer_keys", Kind.ROWS, token_axis=1),
            Slot("indexer_position_ids", Kind.ROWS, token_axis=-1, batch_axis=1),
        ),
        constants=frozenset({"is_indexer_initialized", "indexer_dtype", "indexer_device"}),
    )


_STATIC = _BASE | {"max_cache_len", "batch_size", "num_heads", "v_head_dim", "k_head_dim"}


def _static(layer: Any) -> LayerPlan:
    del layer
    return LayerPlan(
        tuple(Slot(name, Kind.ROWS, is_buffer=True) for name in _KEY_VALUE), (Counter("cumulative_length"),), _STATIC
    )


def _static_sliding(layer: Any) -> LayerPlan:
    """Buffers of the window's size; the tensor counter stops at the call that fills them, so it is state, too."""
    del layer
    return LayerPlan(
        (*(Slot(name, Kind.WHOLE) for name in _KEY_VALUE), Slot("cumulative_length", Kind.WHOLE, batch_axis=None)),
        (Counter("cumulative_length_int"),),
        _STATIC,
    )


def _static_indexer(layer: Any) -> LayerPlan:
    del layer
    return LayerPlan(
        (
            Slot("indexer_keys", Kind.ROWS, token_axis=1, is_buffer=True),
            Slot("indexer_position_ids", Kind.ROWS, token_axis=-1, batch_axis=1),
        ),
        (Counter("indexer_cumulative_length"),),
        frozenset({"is_indexer_initialized", "indexer_dtype", "indexer_device"}),
    )


def _linear(layer: Any) -> LayerPlan:
    """Convolution and recurrent states by number; which of them a model uses shows in its first step."""
    numbers = range(layer.number_of_states)
    return LayerPlan(
        tuple(Slot(name, Kind.WHOLE, number) for name in ("conv_states", "recurrent_states") for number in numbers),
        constants=frozenset(
            {
                "number_of_states",
                "is_conv_states_initialized",
                "is_recurrent_states_initialized",
                "has_previous_state",
                "conv_kernel_size",
                "dtype",
                "device",
            }
        ),
        required={"record_past": False},
    )


def _compressed(layer: Any) -> LayerPlan:
    """DeepSeek V4: a window whose keys are its values, and per name one pooled entry for every `compress_rate` tokens.

    `buffer_*` hold the tokens since the last full group, `overlap_*` the last full group's first series.
    """
    every = layer.compress_rate
    slots = [Slot("keys", Kind.LAST, keep=layer.sliding_window - 1)]
    counters = [Counter("cumulative_length")]
    for name in layer.compressed_kv:
        slots.append(Slot("compressed_kv", Kind.ROWS, name, token_axis=1, every=every))
        slots += [Slot(buffer, Kind.OPEN, name, token_axis=1, every=every) for buffer in ("buffer_kv", "buffer_gate")]
        counters.append(Counter("entry_count", name, every))
    for name in getattr(layer, "overlap_kv", ()):
        slots += [Slot(overlap, Kind.WHOLE, name, since=every) for overlap in ("overlap_kv", "overlap_gate")]
    return LayerPlan(
        tuple(slots),
        tuple(counters),
        _BASE | {"sliding_window", "_sliding_window_tensor", "compress_rate"},
        {"values": "keys"},
        {"record_past": False},
    )


def _block_sparse(layer: Any) -> LayerPlan:
    return _full(layer) + LayerPlan((Slot("idx_keys", Kind.ROWS),))


def _static_block_sparse(layer: Any) -> LayerPlan:
    return _static(layer) + LayerPlan(
        (Slot("idx_keys", Kind.ROWS, is_buffer=True),), (Counter("idx_cumulative_length"),)
    )


def _both(*planners: _Planner) -> _Planner:
    def plan(layer: Any) -> LayerPlan:
        total = LayerPlan()
        for planner in planners:
            total += planner(layer)
        return total

    return plan


_UTILS = "transformers.cache_utils"
_DEEPSEEK_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_MINIMAX_M3 = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"

_LAYERS: Mapping[str, _Planner] = MappingProxyType(
    {
        f"{_UTILS}.DynamicLayer": _full,
        f"{_UTILS}.DynamicSlidingWindowLayer": _sliding,
        f"{_UTILS}.DynamicIndexedLayer": _both(_full, _indexer),
        f"{_UTILS}.StaticLayer": _static,
        f"{_UTILS}.StaticSlidingWindowLayer": _static_sliding,
        f"{_UTILS}.StaticIndexedLayer": _both(_static, _static_indexer),
        f"{_UTILS}.LinearAttentionLayer": _linear,
        f"{_UTILS}.LinearAttentionAndFullAttentionLayer": _both(_linear, _full),
        f"{_UTILS}.LinearAttentionAndSlidingWindowAttentionLayer": _both(_linear, _sliding),
        f"{_UTILS}.LinearAttentionAndStaticFullAttentionLayer": _both(_linear, _static),
        f"{_UTILS}.LinearAttentionAndStaticSlidingWindowAttentionLayer": _both(_linear, _static_sliding),
        f"{_UTILS}.DummyLayer": lambda _: LayerPlan(constants=frozenset({"is_initialized", "keys", "values"})),
        f"{_DEEPSEEK_V4}.DeepseekV4HCACache": _compressed,
        f"{_DEEPSEEK_V4}.DeepseekV4CSACache": _compressed,
        f"{_MINIMAX_M3}.MiniMaxM3VLSparseCacheLayer": _block_sparse,
        f"{_MINIMAX_M3}.MiniMaxM3VLSparseStaticCacheLayer": _static_block_sparse,
    }
)

_CACHE = LayerPlan(
    constants=frozenset({"layers", "layer_class_to_replicate"}),
    required={"offloading": False},
    marks=frozenset({"_is_user_defined"}),  # `generate` notes there that the caller passed the cache
)
_CACHES: Mapping[str, LayerPlan] = MappingProxyType(
    {
        f"{_UTILS}.DynamicCache": _CACHE,
        f"{_UTILS}.StaticCache": _CACHE,
        "transformers.models.minimax.modeling_minimax.MiniMaxCache": _CACHE
        + LayerPlan((Slot("linear_cache", Kind.WHOLE, 0),)),
    }
)


def class_name(value: object) -> str:
    """Module and name of a value's class; a subclass is another class, and may hold other state."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def plan_of_layer(index: int, layer: object) -> LayerPlan:
    """The plan of a cache's layer. Raises `StateError` naming a class, attribute or setting that cannot be carried."""
    planner = _LAYERS.get(class_name(layer))
    if planner is None:
        raise StateError(f"cache layer {index} is a {class_name(layer)}, which cannot be carried")
    return _checked(f"cache layer {index}, a {type(layer).__name__},", layer, planner(layer))


def plan_of_cache(cache: object, layers: int) -> LayerPlan:
    """What the cache itself holds beside its layers, each slot's key being the layer's number. Raises `StateError`."""
    plan = _CACHES.get(class_name(cache))
    if plan is None:
        raise StateError(f"the cache is a {class_name(cache)}, which cannot be carried")
    by_layer = tuple(replace(slot, key=index) for index in range(layers) for slot in plan.slots)
    return _checked(f"the cache, a {type(cache).__name__},", cache, replace(plan, slots=by_layer))


def _checked(what: str, owner: object, plan: LayerPlan) -> LayerPlan:
    unknown = vars(owner).keys() - plan.attributes
    if unknown:
        raise StateError(f"{what} holds {', '.join(sorted(unknown))}: not known whether that is state")
    check_settings(what, owner, plan)
    return plan


def check_settings(what: str, owner: object, plan: LayerPlan) -> None:
    """Raise `StateError` naming a setting with which the layer cannot be carried."""
    for attribute, wanted in plan.required.items():
        if getattr(owner, attribute, wanted) != wanted:
            raise StateError(f"{what} has {attribute} = {getattr(owner, attribute)}, and can only be carried without")
