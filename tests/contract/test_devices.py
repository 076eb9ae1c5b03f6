"""The device conformance suite against host memory, and what adopting foreign tensors asks of every device."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_cache.devices import Device, NumpyDevice
from tiered_cache.testing.device_suite import DeviceTests


class TestNumpyDevice(DeviceTests):
    @pytest.fixture
    def device(self) -> Device:
        return NumpyDevice()


def test_host_copies_are_complete_at_once() -> None:
    """No synchronisation is needed in host memory, and uploads are the caller's own array."""
    device = NumpyDevice()
    array = np.arange(6, dtype=np.uint16)
    out = np.zeros(6, np.uint16)
    device.to_host(array, out, device.stream("to_host"))
    assert (out == array).all()
    assert device.upload(array, device.stream("to_device")) is array


def test_torch_tensors_are_adopted_as_bits() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = NumpyDevice()
    for dtype, bits in ((torch.bfloat16, np.uint16), (torch.float8_e4m3fn, np.uint8), (torch.float32, np.float32)):
        tensor = torch.arange(8).to(dtype).reshape(2, 4)
        adopted = device.adopt(tensor)
        assert (adopted.dtype, adopted.shape) == (bits, (2, 4))
        adopted[1, 3] = adopted[0, 0]
        assert tensor[1, 3] == tensor[0, 0]
