"""The CUDA kernels without a GPU: NVRTC compiles them, and a C++ compiler's build of the same source copies rightly."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tiered_cache.devices import NumpyDevice
from tiered_cache.devices.cupy import KERNEL_NAMES, KERNEL_OPTIONS, KERNEL_SOURCE

# One thread of one block: the grid-stride loop of a kernel then covers everything.
HOST_PRELUDE = """
struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static const Index blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
#define __global__
"""


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_nvrtc_compiles_every_kernel(architecture: str) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    if importlib.util.find_spec("nvidia.cuda_nvrtc") is None:
        pytest.skip("the NVRTC library is not installed")
    program = nvrtc.createProgram(KERNEL_SOURCE, "rows.cu", (), ())
    nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *KERNEL_OPTIONS))
    binary = bytes(nvrtc.getCUBIN(program))
    for name in KERNEL_NAMES:
        assert name.encode() in binary


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("kernels")
    source, library = folder / "rows.cpp", folder / "rows.so"
    source.write_text(HOST_PRELUDE + KERNEL_SOURCE)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True, timeout=240)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("unit_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("start", "stop"), [(0, 12), (5, 11), (4, 5), (0, 1)])
def test_kernels_copy_what_the_numpy_device_copies(
    host_kernels: ctypes.CDLL, unit_bytes: int, start: int, stop: int
) -> None:
    rng = np.random.default_rng(unit_bytes)
    layers, page_tokens, row_units = 3, 4, 5
    pages = np.array([4, 1, 2], dtype=np.int64)
    pool = np.frombuffer(rng.bytes(layers * 5 * page_tokens * row_units * unit_bytes), np.uint8).copy()
    pool = pool.reshape(layers, 5, page_tokens, row_units * unit_bytes)
    numpy_device = NumpyDevice()

    def launch(verb: str, *arrays: np.ndarray) -> None:
        sizes = (layers, 5, page_tokens, row_units, start, stop - start)
        kernel = getattr(host_kernels, f"{verb}_rows_{unit_bytes}")
        kernel(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), *(ctypes.c_longlong(size) for size in sizes))

    rows = np.zeros((layers, stop - start, row_units * unit_bytes), np.uint8)
    launch("gather", pool, pages, rows)
    assert (rows == numpy_device.gather_rows(pool, pages, start, stop)).all()

    fresh = np.frombuffer(rng.bytes(rows.nbytes), np.uint8).reshape(rows.shape)
    expected = pool.copy()
    numpy_device.scatter_rows(expected, pages, start, fresh)
    launch("scatter", pool, pages, fresh)
    assert (pool == expected).all()
