"""`checked`: a message from another process with one field of another type is refused, and the field named."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import some_tokens

from tiered_cache.cache import Offer, PlannedFrame
from tiered_cache.errors import ConfigError, IdentityError, StateError, TokenError
from tiered_cache.identity import FrameKey
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import LeaseRef, Prompt, RestorePlan, SequenceRef, SpillOffer, Ticket
from tiered_cache.service.wire import checked

KEY = FrameKey(b"n" * 32, b"p" * 32, b"q" * 32, "rows", 16)
SOURCE = SequenceRef("x", 1, 2, 3, (SequenceRef("x.0", 1, 2, 3),))
OFFER = Offer(b"n" * 32, 16, 0, (b"0" * 32,), ((10, b"1" * 32),), (5,), 6)
PLAN = RestorePlan("a", 1, 16, (PlannedFrame(KEY, 3),), 4)
PROMPT = Prompt(some_tokens(20), {1: (b"cat",)}, Hints(pin_s=1, returns_in_s=2.5), "s", 3.0)
MESSAGES = (
    SOURCE,
    LeaseRef("x", 1, 2),
    SpillOffer(SOURCE, OFFER, (SpillOffer(SOURCE, OFFER),)),
    PLAN,
    PROMPT,
    Ticket(b"n" * 32, PROMPT, PLAN, b"state"),
    KEY,
)


def fields_of(value: Any) -> list[str]:
    return list(value._fields) if isinstance(value, tuple) else [f.name for f in dataclasses.fields(value)]


def damaged(value: Any, field: str, other: object) -> Any:
    """A copy as unpickling makes it: without a constructor."""
    if isinstance(value, tuple):
        return value._replace(**{field: other})  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(value))
    object.__setattr__(copy, field, other)
    return copy


def everything() -> Iterator[tuple[Any, str]]:
    for message in MESSAGES:
        for field in fields_of(message):
            yield message, field


def name_of(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_what_is_as_declared_passes(message: Any) -> None:
    assert checked(message, type(message)) is message
    again = pickle.loads(pickle.dumps(message))
    assert checked(again, type(message)) is again


@pytest.mark.parametrize(("message", "field"), list(everything()), ids=name_of)
def test_a_field_of_another_type_is_named(message: Any, field: str) -> None:
    for other in (object(), [1], True if field != "private" else 1.5, 2.5j, "text" if field not in TEXTS else b"raw"):
        with pytest.raises((StateError, IdentityError, TokenError), match=field):
            checked(damaged(message, field, other), type(message))


TEXTS = {"owner", "node", "group", "session"}


def test_it_is_looked_for_all_the_way_down() -> None:
    cases: dict[str, tuple[Any, type]] = {
        r"SpillOffer\.offer\.hashes\[1\] is str": (
            SpillOffer(SOURCE, damaged(OFFER, "hashes", (b"0" * 32, "1"))),
            SpillOffer,
        ),
        r"SpillOffer\.offer\.checkpoints\[0\]\[0\] is float": (
            SpillOffer(SOURCE, damaged(OFFER, "checkpoints", ((1.0, b"1" * 32),))),
            SpillOffer,
        ),
        r"SequenceRef\.ranks\[0\]\.epoch is NoneType": (
            SOURCE._replace(ranks=(SequenceRef("x", 1, 2, None),)),
            SequenceRef,
        ),  # type: ignore[arg-type]
        r"RestorePlan\.frames\[0\]\.key\.tokens is str": (
            damaged(PLAN, "frames", (PlannedFrame(damaged(KEY, "tokens", "9"), 3),)),
            RestorePlan,
        ),
        r"Prompt\.tokens is int64": (damaged(PROMPT, "tokens", np.arange(3)), Prompt),
        r"Prompt\.extra_keys\[1\]\[0\] is str": (damaged(PROMPT, "extra_keys", {1: ("cat",)}), Prompt),
        "SpillOffer is str": ("an offer", SpillOffer),
    }
    for message, (value, kind) in cases.items():
        with pytest.raises(StateError, match=message):
            checked(value, kind)


def test_what_a_constructor_would_have_refused_is_refused() -> None:
    with pytest.raises(TokenError, match="uint32"):
        checked(damaged(PROMPT, "tokens", np.zeros((2, 2), np.uint32)), Prompt)
    with pytest.raises(IdentityError, match="from 0 on"):
        checked(damaged(PROMPT, "extra_keys", {-1: (b"cat",)}), Prompt)
    with pytest.raises(ConfigError, match="duration"):
        checked(damaged(PROMPT, "hints", damaged(Hints(), "pin_s", float("nan"))), Prompt)
