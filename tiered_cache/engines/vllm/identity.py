"""Whose state vLLM computes: the checkpoint's contents, and every setting that decides what the numbers are."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from tiered_cache.errors import ConfigError
from tiered_cache.identity import Identity, tagged_hash, weights_digest

REVISION = "1"
"""Goes up whenever pages are taken from vLLM otherwise."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
HASHES = frozenset({"sha256", "sha256_cbor"})
"""vLLM's block hashes that no two prefixes share."""

_NOT_THE_MODEL = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
_CACHED_MAX = 256
_log = logging.getLogger(__name__)


def check(vllm_config: Any) -> None:
    """Raise `ConfigError` for what would make equal names of different states."""
    problems = []
    cache = vllm_config.cache_config
    if cache.prefix_caching_hash_algo not in HASHES:
        problems.append(
            f"prefix_caching_hash_algo {cache.prefix_caching_hash_algo!r} is not one of {', '.join(sorted(HASHES))}: "
            "two prefixes might share a hash"
        )
    if getattr(cache, "calculate_kv_scales", False):
        problems.append("calculate_kv_scales: the scales depend on the first request of each process")
    if vllm_config.load_config.load_format == "dummy":
        problems.append("load_format dummy: there is no checkpoint to tell whose state it is")
    if problems:
        raise ConfigError("; ".join(problems))


def identity_of(vllm_config: Any, salt: bytes, digest_cache: Path | None) -> Identity:
    """The identity of all states of this engine; reads every byte of the checkpoint, unless that was done before.

    Raises `ConfigError` if there are no weight files to read.
    """
    model = vllm_config.model_config
    digests = [_checkpoint_digest(vllm_config, model, digest_cache)]
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        digests.append(_checkpoint_digest(vllm_config, draft, digest_cache))
    return Identity(
        weights_digest=tagged_hash("vllm checkpoint", *digests),
        engine="vllm",
        engine_revision=f"{REVISION}, vllm {vllm.__version__}, torch {torch.__version__}",
        rounding=_text(_settings(vllm_config)),
        number_format=_text({"kv": vllm_config.cache_config.cache_dtype, "weights": model.quantization}),
        tenant_salt=salt,
    )


def _settings(vllm_config: Any) -> dict[str, object]:
    """What, besides weights and tokens, decides the bytes of a page, or their order."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return {
        "device": [vllm_config.device_config.device_type, str(current_platform.get_device_capability())],
        "dtype": str(model.dtype),
        "model": _document(model.hf_config.to_dict()),
        "quantization": _document(model.quantization_config),
        "max_model_len": model.max_model_len,  # some rotary embeddings depend on it
        "attention": str(vllm_config.attention_config.backend),
        "cascade": not model.disable_cascade_attn,
        "sliding_window": not model.disable_sliding_window,
        "layout": cache.kv_cache_layout,
        "mamba": [str(cache.mamba_cache_mode), str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "skipped_layers": sorted(map(str, cache.kv_cache_dtype_skip_layers)),
        "compiled": [model.enforce_eager, str(vllm_config.compilation_config.mode)],
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.enable_expert_parallel,
        ],
        "speculative": None if speculative is None else str(speculative.method),
    }


def _document(value: object) -> object:
    """Plain data, without where a model came from."""
    if isinstance(value, Mapping):
        return {str(name): _document(item) for name, item in value.items() if name not in _NOT_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_document(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _checkpoint_digest(vllm_config: Any, model: Any, digest_cache: Path | None) -> bytes:
    files = weight_files(_directory(model, vllm_config.load_config.download_dir))
    if not files:
        raise ConfigError(f"{model.model}: no weight files ({', '.join(WEIGHTS)}) to tell whose state it is")
    return cached_weights_digest(files, digest_cache)


def _directory(model: Any, download_dir: str | None) -> Path:
    """Where the checkpoint lies; one from a hub has been downloaded by the workers before this is asked."""
    source = model.model_weights or model.model
    path = Path(source)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=model.revision, cache_dir=download_dir, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{source}: no local files to tell whose state it is: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The weight files of a checkpoint, which is a directory or a single file."""
    if path.is_file():
        return [path]
    return sorted({file for pattern in WEIGHTS for file in path.glob(pattern) if file.is_file()})


def cached_weights_digest(files: Sequence[Path], digest_cache: Path | None) -> bytes:
    """`identity.weights_digest`, remembered in a file for as long as no file's inode, size or times change."""
    if digest_cache is None:
        return weights_digest(files)
    name = hashlib.sha256(_text([_marks(file) for file in files]).encode()).hexdigest()
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        document = json.loads(digest_cache.read_text())
        known = {k: v for k, v in document.items() if isinstance(k, str) and isinstance(v, str)}
    found = known.pop(name, None)
    if found is not None and len(found) == 64:
        with suppress(ValueError):
            return bytes.fromhex(found)
    digest = weights_digest(files)
    if hashlib.sha256(_text([_marks(file) for file in files]).encode()).hexdigest() != name:
        raise ConfigError(f"{files[0].parent}: the weight files changed while they were read")
    known = {**dict(list(known.items())[-_CACHED_MAX + 1 :]), name: digest.hex()}
    try:
        digest_cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = digest_cache.with_name(f"{digest_cache.name}.{os.getpid()}")
        temporary.write_text(json.dumps(known))
        temporary.replace(digest_cache)
    except OSError as error:
        _log.warning("the digest of the weights is not remembered: %s", error)
    return digest


def _marks(file: Path) -> list[object]:
    status = file.stat()
    return [str(file.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
