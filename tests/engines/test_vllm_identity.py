"""Whose state vLLM computes: equal for equal contents wherever they lie, another for all that decides a state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

from vllm.engine.arg_utils import EngineArgs
from vllm_models import make_model

from tiered_cache.engines.vllm import identity as module
from tiered_cache.engines.vllm.identity import cached_weights_digest, check, identity_of, weight_files
from tiered_cache.errors import ConfigError
from tiered_cache.identity import weights_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def config_of(model: Path, **settings: Any) -> Any:
    return EngineArgs(model=str(model), enforce_eager=True, max_model_len=1024, **settings).create_engine_config()


def digest_of(model: Path, salt: bytes = b"", **settings: Any) -> bytes:
    return identity_of(config_of(model, **settings), salt, None).digest()


def test_the_same_contents_elsewhere_are_the_same_identity(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert digest_of(model) == digest_of(tmp_path / "copy")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}},
        {"tensor_parallel_size": 2},
        {"salt": b"tenant"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_all_that_decides_a_state_is_part_of_it(model: Path, settings: dict[str, Any]) -> None:
    assert digest_of(model) != digest_of(model, **settings)


def test_other_weights_at_the_same_path_are_another_identity(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    before = digest_of(tmp_path / "model")
    make_model("llama", tmp_path / "model", seed=1, num_hidden_layers=1)
    assert digest_of(tmp_path / "model") != before


def test_a_digest_is_remembered_until_a_file_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "model")
    files, memory = weight_files(tmp_path / "model"), tmp_path / "cache" / "weights.json"
    first = cached_weights_digest(files, memory)
    assert first == weights_digest(files)
    with monkeypatch.context() as patched:
        patched.setattr(module, "weights_digest", lambda _: pytest.fail("read again"))
        assert cached_weights_digest(files, memory) == first
    times = files[0].stat()
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had been written
    assert cached_weights_digest(files, memory) == weights_digest(files) != first
    memory.write_text("not json")
    assert cached_weights_digest(files, memory) == weights_digest(files)


def test_what_would_give_two_states_one_name_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xxhash"):
        check(config_of(model, prefix_caching_hash_algo="xxhash"))
    with pytest.raises(ConfigError, match="dummy"):
        check(config_of(model, load_format="dummy"))
    shutil.copytree(model, tmp_path / "empty")
    for file in weight_files(tmp_path / "empty"):
        file.unlink()
    with pytest.raises(ConfigError, match="no weight files"):
        digest_of(tmp_path / "empty")
