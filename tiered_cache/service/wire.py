"""What comes from another process is what it says it is: every field of the declared type, before anything is done.

Unpickling runs no constructor and checks nothing, so that a list where a tuple of hashes should be, or a text where
bytes should be, would only show as some error deep inside. `checked` looks once, at the door.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from tiered_cache.errors import StateError

_T = TypeVar("_T")
_Check = Callable[[object, str], None]


def checked(value: object, kind: type[_T]) -> _T:
    """The value, which is a `kind` all the way down. Raises `StateError` that names the first field that is not."""
    _check_of(typing.cast("Hashable", kind))(value, kind.__name__)
    return value  # type: ignore[return-value]


@functools.cache
def _check_of(kind: Any) -> _Check:
    """What tells whether a value is of an annotation's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        return _any_of(kind, inner)
    if origin is tuple:
        return _tuple_of(kind, inner)
    if origin in {dict, Mapping, frozenset}:
        return (_set_of if origin is frozenset else _dict_of)(*map(_check_of, inner))
    if origin is np.ndarray:
        (scalar,) = typing.get_args(inner[1])
        return _array_of(scalar)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _record_of(kind)
    assert isinstance(kind, type), kind
    return _plain((int, float) if kind is float else (kind,), kind.__name__)


def _plain(kinds: tuple[type, ...], name: str) -> _Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise StateError(f"{where} is {type(value).__name__}, not {name}")

    return check


def _any_of(kind: object, inner: tuple[Any, ...]) -> _Check:
    def check(value: object, where: str) -> None:
        for one in inner:
            base = typing.get_origin(one) or one
            if isinstance(value, (int, float) if base is float else base):
                return _check_of(one)(value, where)
        raise StateError(f"{where} is {type(value).__name__}, not {kind}")

    return check


def _tuple_of(kind: object, inner: tuple[Any, ...]) -> _Check:
    if len(inner) == 2 and inner[1] is Ellipsis:
        item = _check_of(inner[0])

        def check_all(value: object, where: str) -> None:
            if not isinstance(value, tuple):
                raise StateError(f"{where} is {type(value).__name__}, not a tuple")
            for index, each in enumerate(value):
                item(each, f"{where}[{index}]")

        return check_all
    items = [_check_of(each) for each in inner]

    def check_each(value: object, where: str) -> None:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise StateError(f"{where} is not {kind}")
        for index, (each, item) in enumerate(zip(value, items, strict=True)):
            item(each, f"{where}[{index}]")

    return check_each


def _dict_of(key: _Check, item: _Check) -> _Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise StateError(f"{where} is {type(value).__name__}, not a dict")
        for name, each in value.items():
            key(name, f"a key of {where}")
            item(each, f"{where}[{name!r}]")

    return check


def _set_of(item: _Check) -> _Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, frozenset):
            raise StateError(f"{where} is {type(value).__name__}, not a frozenset")
        for each in value:
            item(each, f"an item of {where}")

    return check


def _array_of(scalar: type[np.generic]) -> _Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, np.ndarray) or value.dtype != scalar:
            form = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise StateError(f"{where} is {form}, not an array of {scalar.__name__}")

    return check


def _record_of(kind: type) -> _Check:
    """Of a dataclass or a named tuple, whose own check of its values is made up for."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)  # type: ignore[attr-defined]
    post_init = getattr(kind, "__post_init__", None)

    def check(value: object, where: str) -> None:
        if type(value) is not kind:
            raise StateError(f"{where} is {type(value).__name__}, not {kind.__name__}")
        for name in names:
            _check_of(hints[name])(getattr(value, name, None), f"{where}.{name}")
        if post_init is not None:
            post_init(value)

    return check
