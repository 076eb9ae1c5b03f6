"""Where sequence state lives: one interface over host memory (NumPy) and CUDA memory (CuPy)."""

from tiered_cache.devices.base import Array, Device, Direction, Stream
from tiered_cache.devices.numpy import NumpyDevice

__all__ = ["Array", "Device", "Direction", "NumpyDevice", "Stream"]
