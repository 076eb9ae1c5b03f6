"""From a transformers `Cache` to the parts of a geometry, and back.

`CacheLayout` is learnt from one cache that a model filled: which tensors there are, on which layers, with which dtypes
and shapes. It then reads frames out of any cache of that model and makes caches from frames. Tensors of equal dtype
and row shape share a part over their layers. A cache of one sequence alone can be carried (batch size 1).

    ROWS   a row part; where a row stands for `every` tokens its elements are laid over them, ceil(elements / every) a
           token, zeros for tokens of a group that is not full
    LAST, OPEN   a carry of the most entries there can be, zeros after those there are
    WHOLE  a carry, zeros before it exists
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tiered_cache.engines.base import HostArray
from tiered_cache.engines.transformers.plans import (
    Kind,
    LayerPlan,
    Slot,
    check_settings,
    class_name,
    plan_of_cache,
    plan_of_layer,
)
from tiered_cache.errors import BlobError, GeometryError, LockstepError, StateError
from tiered_cache.geometry import Geometry, Part, PartKind

Cache = Any
"""A transformers cache; the package is not there where types are checked."""
Tensor = Any


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a cache: whose, and what it looks like."""

    owner: int
    """Number of the layer that holds it, or -1 for the cache itself."""
    slot: Slot
    shape: tuple[int, ...]
    """As the model shaped it; the token axis' size is the capacity of a buffer, and else meaningless."""
    dtype: Any
    device: Any
    part: str
    """Name of the part, empty if there is nothing to store."""
    index: int
    """Which of the part's layers it is."""

    def entries(self, tensor: Tensor) -> Tensor:
        """The tensor as a view without its batch axis: [entries, *entry], or [*shape] if it changes as a whole."""
        slot = self.slot
        axis = slot.token_axis % tensor.ndim if tensor.ndim else 0
        if slot.batch_axis is not None:
            axis -= slot.batch_axis < axis
            tensor = tensor.select(slot.batch_axis, 0)
        return tensor if slot.kind is Kind.WHOLE else tensor.movedim(axis, 0)

    def shape_at(self, tokens: int) -> tuple[int, ...]:
        """The tensor's shape at `tokens` tokens."""
        if self.slot.kind is Kind.WHOLE or self.slot.is_buffer:
            return self.shape
        axis = self.slot.token_axis % len(self.shape)
        return (*self.shape[:axis], self.slot.count(tokens), *self.shape[axis + 1 :])


class CacheLayout:
    """Where every tensor of one model's caches is, and the geometry that they make."""

    def __init__(self, cache: Cache, tokens: int, block_tokens: int | None = None) -> None:
        """Learn from `cache`, which a model filled over `tokens` tokens and which belongs to the layout from now on.

        Raises `StateError` naming what cannot be carried, `GeometryError` for a block size that cuts pooled rows.
        """
        self._plans = list(plans_of(cache))
        for _, plan in self._plans:
            assert tokens >= plan.tokens_to_show_all, "the cache is too short to show every tensor"
        shown = [(owner, slot, slot.read(_owner(cache, owner))) for owner, plan in self._plans for slot in plan.slots]
        shown = [(owner, slot, tensor) for owner, slot, tensor in shown if tensor is not None]
        _check_distinct(shown)
        parts: dict[tuple[object, ...], _GrowingPart] = {}
        places = []
        for owner, slot, tensor in shown:
            place = Place(owner, slot, tuple(tensor.shape), tensor.dtype, tensor.device, "", 0)
            layer, title = (owner, slot.name) if owner >= 0 else (int(slot.key or 0), slot.attribute)
            kind, shape = _part_shape(place, tensor)
            if not math.prod(shape):  # nothing to store; the tensor itself must be there all the same
                places.append(place)
                continue
            like = (title, slot.kind, tensor.dtype, shape)
            growing = parts.setdefault(like, _GrowingPart(title, kind, tensor.dtype, shape))
            growing.places.append((layer, place))
        made: dict[str, Part] = {}
        for growing in parts.values():
            number = sum(other.title == growing.title for other in list(parts.values())[: len(made)])
            name = f"{growing.title}.{number + 1}" if number else growing.title
            growing.places.sort(key=lambda pair: pair[0])
            made[name] = growing.part(name)
            places += [replace(place, part=name, index=index) for index, (_, place) in enumerate(growing.places)]
        self.places = tuple(places)
        self.places_of = {name: [place for place in places if place.part == name] for name in made}
        group = self.group_tokens = math.lcm(*(slot.every for _, slot, _ in shown))
        self.geometry = Geometry(tuple(made.values()), block_tokens or _block_tokens(list(made.values()), group))
        if self.geometry.block_tokens % group:
            raise GeometryError(
                f"block_tokens {self.geometry.block_tokens} is not a multiple of {group}, the tokens of a pooled row"
            )
        self._place_of = {(place.owner, place.slot): place for place in self.places}
        self._skeleton = cache
        self.check(cache, tokens)
        _strip(cache, self._plans)

    @property
    def carries(self) -> list[Place]:
        """The places that are overwritten by every step."""
        carried = {part.name for part in self.geometry.carries}
        return [place for place in self.places if place.part in carried]

    def check(self, cache: Cache, tokens: int) -> None:
        """Raise `StateError` unless `cache` is one of this model, of one sequence, that stands at `tokens` tokens."""
        plans = list(plans_of(cache))
        if [owner for owner, _ in plans] != [owner for owner, _ in self._plans]:
            raise StateError(f"the cache has {len(plans) - 1} layers, not {len(self._plans) - 1}")
        for owner, plan in plans:
            holder, title = _owner(cache, owner), _title(cache, owner)
            check_settings(title, holder, plan)
            for slot in plan.slots:
                _check_tensor(
                    f"{title} {slot.name}", self._place_of.get((owner, slot)), slot, slot.read(holder), tokens
                )
            for counter in plan.counters:
                if _is_set(holder, counter.attribute) and counter.read(holder) != tokens // counter.every:
                    raise LockstepError(
                        f"{title} has {counter.attribute} {counter.read(holder)}, not the {tokens // counter.every} of "
                        f"{tokens} tokens"
                    )
            for alias, attribute in plan.aliases.items():
                if getattr(holder, alias) is not getattr(holder, attribute):
                    raise StateError(f"{title}: {alias} is not the tensor of {attribute}")
            _check_constants(title, holder, _owner(self._skeleton, owner), plan)

    def read(self, cache: Cache, start: int, stop: int, name: str, out: HostArray) -> None:
        """Copy the tokens [start, stop) of a row part to `out`, [layers, stop - start, *shape]."""
        for place in self.places_of[name]:
            entries = place.entries(place.slot.read(_owner(cache, place.owner)))
            _read_rows(place, entries, start, stop, out[place.index])

    def take(self, cache: Cache) -> dict[Place, Tensor]:
        """Copies of all carries, on their device."""
        held = {place: place.slot.read(_owner(cache, place.owner)) for place in self.carries}
        return {place: None if tensor is None else tensor.clone() for place, tensor in held.items()}

    def read_carry(self, taken: Mapping[Place, Tensor], name: str, out: HostArray) -> None:
        """Copy one carry part to `out`, [layers, *shape]."""
        for place in self.places_of[name]:
            tensor, target = taken[place], out[place.index, ...]
            target[...] = 0
            if tensor is None:
                continue
            entries = place.entries(tensor)
            if place.slot.kind is not Kind.WHOLE:
                target = target[: len(entries)]
            _tensor(target, place.dtype).copy_(entries)

    def carries_of(self, cache: Cache) -> dict[Place, Tensor]:
        """All carries, live."""
        return {place: place.slot.read(_owner(cache, place.owner)) for place in self.carries}

    def make(self, tokens: int) -> Cache:
        """A cache that stands at `tokens` tokens, one or more; its tensors are still to be loaded."""
        cache = copy.deepcopy(self._skeleton)
        for place in self.places:
            if tokens >= place.slot.since:
                make = torch.zeros if place.slot.is_buffer else torch.empty
                tensor = make(place.shape_at(tokens), dtype=place.dtype, device=place.device)
                place.slot.write(_owner(cache, place.owner), tensor)
        for owner, plan in self._plans:
            holder = _owner(cache, owner)
            for counter in plan.counters:
                if _is_set(holder, counter.attribute):
                    counter.write(holder, tokens)
            for alias, attribute in plan.aliases.items():
                setattr(holder, alias, getattr(holder, attribute))
        return cache

    def load(self, cache: Cache, start: int, stop: int, arrays: Mapping[str, HostArray]) -> None:
        """Copy one frame's arrays, of the tokens [start, stop), into a cache of `make`.

        Raises `BlobError` where bytes that stand for nothing are not zero.
        """
        kinds = {part.name: part.kind for part in self.geometry.parts}
        for name, array in arrays.items():
            for place in self.places_of[name]:
                source = array[place.index, ...]
                tensor = place.slot.read(_owner(cache, place.owner))
                if kinds[name] is PartKind.CARRY:
                    _load_carry(place, tensor, source)
                else:
                    _load_rows(place, place.entries(tensor), start, stop, source)


@dataclass(slots=True)
class _GrowingPart:
    """A part while its layers are gathered."""

    title: str
    kind: PartKind
    dtype: Any
    shape: tuple[int, ...]
    places: list[tuple[int, Place]] = field(default_factory=list)
    """(layer, place)."""

    def part(self, name: str) -> Part:
        layers = tuple(layer for layer, _ in self.places)
        return Part(name, self.kind, str(self.dtype).removeprefix("torch."), self.shape, layers)


def plans_of(cache: Cache) -> Iterator[tuple[int, LayerPlan]]:
    """Owner and plan: every layer by its number, then the cache itself as owner -1. Raises `StateError`."""
    for index, layer in enumerate(cache.layers):
        yield index, plan_of_layer(index, layer)
    yield -1, plan_of_cache(cache, max(len(cache.layers), len(cache)))


def _owner(cache: Cache, owner: int) -> Any:
    return cache if owner < 0 else cache.layers[owner]


def _title(cache: Cache, owner: int) -> str:
    return type(cache).__name__ if owner < 0 else f"layer {owner}, a {type(cache.layers[owner]).__name__},"


def _is_set(holder: object, attribute: str) -> bool:
    return getattr(holder, attribute, None) is not None


def _check_distinct(shown: list[tuple[int, Slot, Tensor]]) -> None:
    seen: dict[int, str] = {}
    for owner, slot, tensor in shown:
        here = f"{slot.name} of layer {owner}"
        if id(tensor) in seen:
            raise StateError(f"{here} is the tensor of {seen[id(tensor)]}, and would be carried twice")
        seen[id(tensor)] = here


def _check_constants(title: str, holder: object, model: object, plan: LayerPlan) -> None:
    if class_name(holder) != class_name(model):
        raise StateError(f"{title} is a {class_name(holder)}, not a {class_name(model)}")
    for attribute in plan.constants - {"layers"}:
        mine, theirs = (getattr(o, attribute, None) for o in (holder, model))
        equal = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        if not equal:
            raise StateError(f"{title}: {attribute} is {mine}, where this model has {theirs}")


def _check_tensor(title: str, place: Place | None, slot: Slot, tensor: Tensor, tokens: int) -> None:
    if tensor is None or place is None:
        due = place is not None and tokens >= slot.since
        if due or tensor is not None:
            raise StateError(f"{title} is {'missing' if due else 'set'} at {tokens} tokens")
        return
    if slot.batch_axis is not None and tensor.shape[slot.batch_axis] != 1:
        raise StateError(f"{title} is of {tensor.shape[slot.batch_axis]} sequences: one at a time can be carried")
    if tuple(tensor.shape) != place.shape_at(tokens) or tensor.dtype != place.dtype:
        found, wanted = f"{tensor.dtype} {tuple(tensor.shape)}", f"{place.dtype} {place.shape_at(tokens)}"
        raise LockstepError(f"{title} is {found}, not the {wanted} of {tokens} tokens")


def _part_shape(place: Place, tensor: Tensor) -> tuple[PartKind, tuple[int, ...]]:
    slot = place.slot
    entries = place.entries(tensor)
    if slot.kind is Kind.WHOLE:
        return PartKind.CARRY, tuple(entries.shape)
    entry = tuple(entries.shape[1:])
    if slot.kind is not Kind.ROWS:
        return PartKind.CARRY, (slot.entries_max, *entry)
    return PartKind.ROWS, entry if slot.every == 1 else (-(-math.prod(entry) // slot.every),)


BLOCK_BYTES_WANTED = 2 << 20
"""Rows of one block, where the block size is left to the layout: large enough for a frame, small enough to share."""


def _block_tokens(parts: list[Part], group: int) -> int:
    """A power of two of tokens, from 16 to 512, whose rows are `BLOCK_BYTES_WANTED`; a multiple of `group`."""
    row_bytes = sum(part.row_bytes * len(part.layers) for part in parts if part.kind is PartKind.ROWS)
    size = 16
    while size < 512 and size * row_bytes < BLOCK_BYTES_WANTED:
        size *= 2
    return math.lcm(size, group)


def _strip(cache: Cache, plans: list[tuple[int, LayerPlan]]) -> None:
    for owner, plan in plans:
        holder = _owner(cache, owner)
        for slot in plan.slots:
            if slot.read(holder) is not None:
                slot.write(holder, None)
        for alias in plan.aliases:
            setattr(holder, alias, None)


def _tensor(array: HostArray, dtype: Any) -> Tensor:
    """The array's memory as a tensor of that dtype; a copy of it if it may not be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype)


def _laid_over(place: Place, entries: Tensor, start: int, stop: int) -> tuple[slice, int, int]:
    """The full groups within the tokens, how many there are, and the elements of one."""
    every = place.slot.every
    groups = slice(start // every, stop // every)
    return groups, groups.stop - groups.start, math.prod(entries.shape[1:])


def _read_rows(place: Place, entries: Tensor, start: int, stop: int, out: HostArray) -> None:
    every = place.slot.every
    if every == 1:
        _tensor(out, place.dtype).copy_(entries[start:stop])
        return
    groups, count, elements = _laid_over(place, entries, start, stop)
    out[...] = 0
    laid = out[: count * every].reshape(count, every * out.shape[1])[:, :elements]
    _tensor(laid, place.dtype).copy_(entries[groups].reshape(count, elements))


def _load_rows(place: Place, entries: Tensor, start: int, stop: int, source: HostArray) -> None:
    every = place.slot.every
    if every == 1:
        entries[start:stop].copy_(_tensor(source, place.dtype))
        return
    groups, count, elements = _laid_over(place, entries, start, stop)
    laid = source[: count * every].reshape(count, every * source.shape[1])
    _check_zero(place, laid[:, elements:])
    _check_zero(place, source[count * every :])
    values = np.ascontiguousarray(laid[:, :elements])
    entries[groups].copy_(_tensor(values, place.dtype).reshape(count, *entries.shape[1:]))


def _load_carry(place: Place, tensor: Tensor, source: HostArray) -> None:
    if tensor is None:
        _check_zero(place, source)
        return
    entries = place.entries(tensor)
    if place.slot.kind is not Kind.WHOLE:
        _check_zero(place, source[len(entries) :])
        source = source[: len(entries)]
    entries.copy_(_tensor(source, place.dtype))


def _check_zero(place: Place, unused: HostArray) -> None:
    if np.ascontiguousarray(unused).view(np.uint8).any():
        raise BlobError(f"{place.part}: bytes that stand for no entry are not zero")
