"""The device conformance suite on a CUDA device, through CuPy."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_cache.devices import Device, Direction
from tiered_cache.devices.cupy import CupyDevice
from tiered_cache.errors import ConfigError
from tiered_cache.testing.device_suite import DeviceTests, download


@pytest.fixture(scope="module")
def cuda_device() -> CupyDevice:
    try:
        return CupyDevice(staging_bytes=1 << 20)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
class TestCupyDevice(DeviceTests):
    @pytest.fixture
    def device(self, cuda_device: CupyDevice) -> Device:
        return cuda_device

    def test_copies_wait_for_the_current_stream(self, device: Device) -> None:
        """A copy that is asked for while a kernel still writes its source delivers what the kernel wrote."""
        cupy = device.xp
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy.zeros(1 << 24, dtype=np.float32)
            for _ in range(50):
                array += 1
            out = device.host_buffer(array.nbytes).view(np.float32)
            stream = device.stream(Direction.TO_HOST)
            device.to_host(array, out, stream)
            device.synchronize(stream)
        assert (out == 50).all()

    def test_staging_is_bounded_and_reused(self, device: Device) -> None:
        stream = device.stream(Direction.TO_DEVICE)
        source = np.arange(5_000_000, dtype=np.uint32)
        device.synchronize(stream)
        pinned = device.xp.get_default_pinned_memory_pool()
        device.upload(source, stream)
        free_before = pinned.n_free_blocks()
        for _ in range(3):
            array = device.upload(source, stream)
        device.synchronize(stream)
        assert pinned.n_free_blocks() == free_before
        assert (download(device, array) == source).all()

    def test_torch_cuda_tensors_are_adopted_as_bits(self, device: Device) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        tensor = torch.arange(8, device="cuda").to(torch.bfloat16)
        adopted = device.adopt(tensor)
        assert (adopted.dtype, adopted.shape) == (np.uint16, (8,))
        adopted[7] = adopted[0]
        assert float(tensor[7]) == 0.0


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_device")
def test_an_absent_device_is_named() -> None:
    with pytest.raises(ConfigError, match="CUDA device 99"):
        CupyDevice(99)


def test_without_a_device_the_refusal_says_so() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="no CUDA device"):
        CupyDevice()
