"""Numbers and reasons for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tiered_cache.report.document import Unit

_REASONS: Final = {
    "not_stored": "not stored before",
    "evicted": "evicted",
    "no_checkpoint": "no checkpoint there",
    "window_gone": "window gone",
    "shard_missing": "shard missing",
    "too_short": "prompt too short",
    "namespace": "another model or layout",
    "quarantined": "failed its checks",
    "lost": "lost with its owner",
    "version": "newer format",
    "tier_error": "tier failed",
    "deadline": "too late",
    "capacity": "no room on a worker",
    "expired": "expired",
    "faster_to_compute": "faster to compute",
    "discarded": "discarded by the caller",
    "crowded": "crowded out of its block",
    "abandoned": "spill abandoned",
    "moved": "moved to the tier below",
    "refused": "not admitted",
    "rest": "last token or partial block",
}
SUBJECT_CHARACTERS_MAX: Final = 200


def reason(name: str) -> str:
    """A counted reason in words."""
    return _REASONS.get(name, name.replace("_", " "))


def percent(fraction: float) -> str:
    """A fraction, to a tenth of a point."""
    return f"{100 * fraction:.1f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def share(fraction: float) -> str:
    """A fraction where there is little room."""
    return f"{100 * fraction:.0f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def points(difference: float) -> str:
    """A difference of two fractions."""
    return f"{100 * difference:+.1f}\N{NO-BREAK SPACE}points".replace("-", "\N{MINUS SIGN}")


def count(number: float) -> str:
    """A whole number."""
    return f"{number:,.0f}"


def byte_unit(sizes: Iterable[int]) -> Unit:
    """The powers that the sizes were thought in: of 1000 if that makes all of them round."""
    return Unit.BYTES if all(size % 10**6 == 0 for size in sizes) else Unit.BINARY_BYTES


def scale(unit: Unit, largest: float) -> tuple[float, str]:
    """What to divide values of a unit by so that they read well, and the suffix they then have."""
    steps: list[tuple[float, str]]
    if unit is Unit.PERCENT:
        return 0.01, "%"
    if unit is Unit.COUNT:
        return 1.0, ""
    if unit is Unit.SECONDS:
        steps = [(86_400 * 3.0, "d"), (3_600 * 2.0, "h"), (60 * 3.0, "min"), (1.0, "s"), (1e-3, "ms"), (0.0, "µs")]
        sizes = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
        suffix = next(name for least, name in steps if largest >= least)
        return sizes[suffix], suffix
    base, infix = (1000.0, "") if unit is Unit.BYTES else (1024.0, "i")
    power = 0
    while largest >= base ** (power + 1) and power < 5:
        power += 1
    prefix = ("", "k" if unit is Unit.BYTES else "K", "M", "G", "T", "P")[power]
    return base**power, f"{prefix}{infix if power else ''}B"


def text(unit: Unit, value: float) -> str:
    """A number with its unit, in three digits."""
    if unit is Unit.PERCENT:
        return percent(value)
    if unit is Unit.COUNT:
        return count(value)
    factor, suffix = scale(unit, abs(value))
    return f"{_digits(value / factor)}\N{NO-BREAK SPACE}{suffix}"


def _digits(value: float) -> str:
    """Three significant digits, and none behind the point of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown(name: str) -> str:
    """A name from elsewhere on one line of bounded length."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    if len(line) > SUBJECT_CHARACTERS_MAX:
        half = SUBJECT_CHARACTERS_MAX // 2
        return f"{line[:half]}\N{HORIZONTAL ELLIPSIS}{line[-half:]}"
    return line
