"""The promises every device keeps, as a test class to inherit from.

    class TestMyDevice(DeviceTests):
        @pytest.fixture
        def device(self):
            return MyDevice()

The states run unchanged on every device: what they compute there must equal, bit for bit, what they compute in host
memory. Needs pytest (the `test` extra).
"""

from __future__ import annotations

import threading
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from tiered_cache.devices import Array, Device, Direction, NumpyDevice
from tiered_cache.devices.base import HostArray
from tiered_cache.errors import CapacityError, GeometryError
from tiered_cache.geometry import ArraySpec, storage_dtype
from tiered_cache.states.dsa import DsaLayout
from tiered_cache.states.paged_kv import KvLayout
from tiered_cache.states.ple import PleLayout
from tiered_cache.states.qsa import QsaLayout, Rounding, pool_blocks
from tiered_cache.states.recurrent import RecurrentLayout
from tiered_cache.states.sequence import Restoration, SequenceLayout, SequenceState, StatePool, StateSet

LAYOUT = SequenceLayout(
    kv=KvLayout((1, 3), heads=2, key_dim=6, value_dim=5),
    qsa=QsaLayout((1, 3), head_dim=8, ratio=4, rotary_dim=4),
    dsa=DsaLayout((2,), head_dim=3),
    ple=PleLayout((0, 2), vocab=97, eos=2, channels=3, kernel=3, ngram_size=3, heads_per_ngram=1, size_base=50),
    recurrent=(RecurrentLayout("ssm", (0, 2), (2, 3)), RecurrentLayout("shift", (0,), ())),
)
"""Every kind of state, with sizes that are no powers of two."""


def random_bits(rng: np.random.Generator, spec: ArraySpec) -> HostArray:
    """Random bytes in the storage dtype."""
    return np.frombuffer(rng.bytes(spec.bytes), spec.storage).reshape(spec.shape)


def upload(device: Device, host: HostArray) -> Array:
    """A copy of `host` on the device, complete."""
    stream = device.stream(Direction.TO_DEVICE)
    array = device.empty(ArraySpec(str(host.dtype), host.shape))
    device.to_device(np.ascontiguousarray(host), array, stream)
    device.synchronize(stream)
    return array


def download(device: Device, array: Array) -> HostArray:
    """A copy of `array` in host memory, complete."""
    stream = device.stream(Direction.TO_HOST)
    out: HostArray = np.empty(array.shape, dtype=array.dtype)
    device.to_host(array, out, stream)
    device.synchronize(stream)
    return out


class Step(NamedTuple):
    """Arguments of `SequenceState.append`, in host memory."""

    rows: dict[str, HostArray]
    carries: dict[str, HostArray]
    token_ids: npt.NDArray[np.uint32]

    def append_to(self, sequence: SequenceState) -> None:
        """Append at the sequence's cursor, on its device."""
        device = sequence.pool.device
        rows, carries = (
            {name: upload(device, array) for name, array in arrays.items()} for arrays in (self.rows, self.carries)
        )
        sequence.append(sequence.tokens, rows, carries, self.token_ids)


def random_step(rng: np.random.Generator, pool: StatePool, tokens: int) -> Step:
    """A step of `tokens` tokens: random bits, token ids and flags."""
    parts = [part for group in pool.geometry.block_groups for part in group.parts]
    rows = {part.name: random_bits(rng, part.array(tokens)) for part in parts}
    if "dsa.valid" in rows:
        rows["dsa.valid"] = rng.integers(0, 2, rows["dsa.valid"].shape, dtype=np.uint8)
    carries = {p.name: random_bits(rng, p.array(0)) for p in pool.geometry.carries if p.name != "ple.history"}
    vocab = pool.layout.ple.vocab if pool.layout.ple else 1
    return Step(rows, carries, rng.integers(0, vocab, tokens, dtype=np.uint32))


class DeviceTests:
    """Subclass, give the fixture `device`, and pytest runs every check."""

    @pytest.fixture
    def device(self) -> Device:
        """The device under test; may be one and the same for all checks."""
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "uint8", "uint32", "bool"])
    def test_arrays_have_the_storage_dtype(self, device: Device, dtype: str) -> None:
        spec = ArraySpec(dtype, (3, 5))
        for array in (device.empty(spec), device.zeros(spec)):
            assert (array.shape, array.dtype) == ((3, 5), storage_dtype(dtype))
            assert array.flags.c_contiguous
        assert not download(device, device.zeros(spec)).any()

    def test_an_array_beyond_all_memory_is_a_capacity_error(self, device: Device) -> None:
        with pytest.raises(CapacityError, match="memory"):
            device.empty(ArraySpec("uint8", (1 << 55,)))

    @pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100_003])
    def test_host_buffers_are_aligned_and_writable(self, device: Device, nbytes: int) -> None:
        buffer = device.host_buffer(nbytes)
        assert buffer.dtype == np.uint8
        assert buffer.shape == (nbytes,)
        assert not nbytes or buffer.ctypes.data % 64 == 0
        buffer[...] = 7
        assert (buffer == 7).all()

    @pytest.mark.parametrize("pinned", [False, True])
    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 20_000_001])
    def test_bytes_come_back(self, device: Device, nbytes: int, pinned: bool) -> None:
        """Larger than the staging buffers, and through page-locked memory or not."""
        rng = np.random.default_rng(nbytes)
        source = device.host_buffer(nbytes) if pinned else np.empty(nbytes, np.uint8)
        source[...] = np.frombuffer(rng.bytes(nbytes), np.uint8)
        back = device.host_buffer(nbytes) if pinned else np.empty(nbytes, np.uint8)
        array = device.empty(ArraySpec("uint8", (nbytes,)))
        out, home = device.stream(Direction.TO_DEVICE), device.stream(Direction.TO_HOST)
        device.to_device(source, array, out)
        device.synchronize(out)
        device.to_host(array, back, home)
        device.synchronize(home)
        assert (source == back).all()

    def test_many_copies_share_one_synchronisation(self, device: Device) -> None:
        rng = np.random.default_rng(1)
        sources = [random_bits(rng, ArraySpec("uint32", (size,))) for size in (1, 300, 70_000)]
        stream = device.stream(Direction.TO_DEVICE)
        arrays = [device.upload(source, stream) for source in sources]
        device.synchronize(stream)
        home = device.stream(Direction.TO_HOST)
        outs = [np.empty_like(source) for source in sources]
        for array, out in zip(arrays, outs, strict=True):
            device.to_host(array, out, home)
        device.synchronize(home)
        for source, out in zip(sources, outs, strict=True):
            assert (source == out).all()

    def test_copies_of_unequal_arrays_are_refused(self, device: Device) -> None:
        array = device.zeros(ArraySpec("uint16", (4, 4)))
        stream = device.stream(Direction.TO_HOST)
        for out in (
            np.full((4, 5), 9, np.uint16),
            np.full((4, 4), 9, np.uint32),
            np.full((4, 8), 9, np.uint16)[:, ::2],
        ):
            with pytest.raises(GeometryError):
                device.to_host(array, out, stream)
            with pytest.raises(GeometryError):
                device.to_device(out, array, stream)
            assert (out == 9).all()
        assert not download(device, array).any()

    @pytest.mark.parametrize("row", [(), (1,), (3,), (2, 4), (5, 16)])
    @pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
    def test_paged_rows_equal_a_plain_loop(self, device: Device, dtype: str, row: tuple[int, ...]) -> None:
        rng = np.random.default_rng(2)
        layers, page_tokens, pages = 2, 4, np.array([6, 0, 5, 3], dtype=np.int64)
        for start, stop in ((0, 16), (0, 4), (4, 12), (3, 4), (1, 2), (2, 15), (7, 9), (16, 16)):
            before = random_bits(rng, ArraySpec(dtype, (layers, 7, page_tokens, *row)))
            rows = random_bits(rng, ArraySpec(dtype, (layers, stop - start, *row)))
            expected = before.copy()
            for position in range(start, stop):
                page, slot = pages[position // page_tokens], position % page_tokens
                expected[:, page, slot] = rows[:, position - start]
            pool = upload(device, before)
            device.scatter_rows(pool, pages, start, upload(device, rows))
            assert download(device, pool).tobytes() == expected.tobytes()
            gathered = device.gather_rows(pool, pages, start, stop)
            assert gathered.flags.c_contiguous
            assert download(device, gathered).tobytes() == rows.tobytes()
            out = device.empty(ArraySpec(dtype, rows.shape))
            assert device.gather_rows(pool, pages, start, stop, out) is out
            assert download(device, out).tobytes() == rows.tobytes()

    def test_adopted_tensors_share_memory(self, device: Device) -> None:
        tensor = upload(device, np.arange(12, dtype=np.float32).reshape(3, 4))
        adopted = device.adopt(tensor)
        assert adopted.shape == (3, 4)
        adopted[1, 2] = 99
        assert download(device, tensor)[1, 2] == 99

    def test_tensors_that_cannot_be_adopted_are_refused(self, device: Device) -> None:
        tensor = upload(device, np.arange(12, dtype=np.float32).reshape(3, 4))
        with pytest.raises(GeometryError, match="not C-contiguous"):
            device.adopt(tensor[:, ::2])

        class Elsewhere:
            def __dlpack_device__(self) -> tuple[int, int]:
                return 10, 0  # kDLROCM

            def __dlpack__(self, *, stream: None = None) -> NoReturn:
                raise AssertionError

        with pytest.raises(GeometryError, match="kind 10"):
            device.adopt(Elsewhere())

    def test_threads_share_the_streams(self, device: Device) -> None:
        rng = np.random.default_rng(3)
        sources = [random_bits(rng, ArraySpec("uint8", (size,))) for size in (3_000_001, 2_000_003, 17, 999_999)]
        backs: list[HostArray] = [np.zeros_like(source) for source in sources]

        def there_and_back(index: int) -> None:
            for _ in range(5):
                backs[index] = download(device, upload(device, sources[index]))

        threads = [threading.Thread(target=there_and_back, args=(index,)) for index in range(len(sources))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        for source, back in zip(sources, backs, strict=True):
            assert (source == back).all()

    @pytest.mark.parametrize("rounding", ["once", "each"])
    def test_pooling_is_the_same_bits_as_in_host_memory(self, device: Device, rounding: Rounding) -> None:
        rng = np.random.default_rng(4)
        layout = QsaLayout((0, 1), head_dim=24, ratio=4, rotary_dim=10, rounding=rounding)
        keys = np.frombuffer(rng.standard_normal(2 * 400 * 24, np.float32).tobytes(), np.uint16)[1::2]
        keys = np.ascontiguousarray(keys.reshape(2, 400, 24))
        weight = rng.standard_normal((2, 24), np.float32)
        here: npt.NDArray[np.uint16] = pool_blocks(np, layout, keys, weight, 1000)
        there = pool_blocks(device.xp, layout, upload(device, keys), upload(device, weight), 1000)  # type: ignore[arg-type]
        assert download(device, there).tobytes() == here.tobytes()

    def test_a_sequence_is_the_same_bytes_as_in_host_memory(self, device: Device) -> None:
        """Grow, draft, stage, export, restore elsewhere, and whole-layer blobs, on both devices side by side."""
        pools = [
            StatePool(LAYOUT, on, block_tokens=8, kv_tokens=128, page_tokens=4, buffer_bytes=1 << 20)
            for on in (NumpyDevice(), device)
        ]
        here, there = (SequenceState(StateSet(pool, 48)) for pool in pools)
        rng = np.random.default_rng(5)
        for count in (3, 8, 1, 14):
            self._append_alike(rng, here, there, count)
        for sequence in (here, there):
            sequence.begin_draft()
        self._append_alike(rng, here, there, 2)
        assert here.accept(1) == there.accept(1) == 1
        assert here.digest() == there.digest()
        staged = [sequence.stage() for sequence in (here, there)]
        self._append_alike(rng, here, there, 5)
        assert here.tokens == there.tokens == 31
        exported = [one.export() for one in staged]
        for name, array in exported[0].items():
            assert array.tobytes() == exported[1][name].tobytes(), name
        for target in pools:  # frames of either device restore on the other
            for source in (here, there):
                with Restoration(StateSet(target, 48), source.tokens) as restoration:
                    frames = source.export_frames(restoration.needed)
                    for (group, tokens), arrays in zip(restoration.needed, frames, strict=True):
                        restoration.put(group, tokens, arrays)
                    restored = restoration.commit()
                assert restored.digest() == here.digest()
                restored.restore_layers(source.layer_snapshots())
                assert restored.digest() == here.digest()
                restored.release()

    @staticmethod
    def _append_alike(rng: np.random.Generator, here: SequenceState, there: SequenceState, count: int) -> None:
        step = random_step(rng, here.pool, count)
        step.append_to(here)
        step.append_to(there)
        assert here.digest() == there.digest()
