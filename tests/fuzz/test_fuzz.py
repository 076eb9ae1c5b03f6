"""The short part of fuzzing: a few mutations of the corpus for each target. `run.py` beside this goes on for hours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent))

from targets import TARGETS

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63)


@st.composite
def mutated(draw: st.DrawFn, corpus: Sequence[bytes]) -> bytes:
    """A sound input with a few changes: a bit, a number, a cut, a piece of another, a piece twice, some noise."""
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("bit", "number", "cut", "splice", "repeat", "noise", "drop")))
        if kind == "bit" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from(NUMBERS)) % (1 << 8 * width)
            data[at : at + width] = number.to_bytes(width, draw(st.sampled_from(("little", "big"))))
        elif kind == "cut":
            del data[at:]
        elif kind == "splice":
            other = draw(st.sampled_from(corpus))
            data[at:] = other[draw(st.integers(0, len(other))) :]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 8))
        elif kind == "noise":
            data[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        else:
            del data[at : at + draw(st.integers(1, 16))]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_read(name: str) -> None:
    for data in TARGETS[name].corpus:
        TARGETS[name].run(data)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_brings_a_reader_down(name: str, pytestconfig: pytest.Config) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=int(pytestconfig.getoption("--examples")),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=mutated(target.corpus))
    def run(data: bytes) -> None:
        target.run(data)

    run()
