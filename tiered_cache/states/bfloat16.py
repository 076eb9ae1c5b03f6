"""bfloat16 by bit operations, alike in NumPy and CuPy: uint16 bit patterns to and from float32."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

QUIET_NAN = 0x7FC0


def to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact: every bfloat16 is a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(xp: ModuleType, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even; every NaN becomes 0x7FC0: its sign and payload depend on the processor."""
    bits = values.view(np.uint32)
    nearest = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    result: npt.NDArray[np.uint32] = xp.where(values != values, np.uint32(QUIET_NAN), nearest)  # noqa: PLR0124
    return result.astype(np.uint16)


def rounded(xp: ModuleType, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`values` as bfloat16 holds them, in float32."""
    return to_float32(from_float32(xp, values))
