"""What owner, tiering and router say to each other: messages that cannot be meant are refused where they are made."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tiered_cache.deadline import Deadline, duration_s
from tiered_cache.errors import ConfigError, DeadlineError, IdentityError, TokenError
from tiered_cache.service.messages import Prompt

TOKENS = np.arange(40, dtype=np.uint32)


@pytest.mark.parametrize(
    "tokens",
    [TOKENS.astype(np.int64), TOKENS.astype(">u4"), TOKENS.astype(np.float32), TOKENS.reshape(4, 10), TOKENS.tolist()],
    ids=["int64", "big endian", "float32", "two dimensions", "list"],
)
def test_tokens_in_another_form_are_refused_by_name(tokens: object) -> None:
    with pytest.raises(TokenError, match=r"tokens are uint32 \[n\], not "):
        Prompt(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("extra_keys", [{-1: (b"image",)}, {0.5: (b"image",)}, {0: ("image",)}, {0: (None,)}])
def test_media_that_would_be_left_out_of_the_key_are_refused(extra_keys: dict[int, tuple[bytes, ...]]) -> None:
    with pytest.raises(IdentityError, match="extra keys"):
        Prompt(TOKENS, extra_keys)


def test_views_of_tokens_and_media_beyond_the_prompt_are_sound() -> None:
    prompt = Prompt(np.repeat(TOKENS, 2)[::2], {99: (b"image",)})
    plain = Prompt(TOKENS).chain(b"n" * 32, 16).block_hashes()
    assert prompt.chain(b"n" * 32, 16).block_hashes() == plain
    assert pickle.loads(pickle.dumps(prompt)).head(16).chain(b"n" * 32, 16).block_hashes() == plain[:2]


@pytest.mark.parametrize("now_s", [np.nan, np.inf, -np.inf, 1e308])
def test_a_time_that_is_none_is_refused(now_s: float) -> None:
    """It would be every later request's time, too."""
    with pytest.raises(ConfigError, match="now_s is"):
        Prompt(TOKENS, now_s=now_s)


@pytest.mark.parametrize("seconds", [np.nan, np.inf, 10**400, 1e18, "1"])
def test_what_would_never_end_is_refused(seconds: float) -> None:
    with pytest.raises(DeadlineError, match="not a finite number of seconds"):
        Deadline.after(seconds)
    with pytest.raises(ConfigError, match="pin_s is"):
        duration_s(seconds, "pin_s")
